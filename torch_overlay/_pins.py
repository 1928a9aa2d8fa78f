"""Read ``pins.json``: the torch versions that the overlay is kept for.

Per version it holds the sha256 of each target's source (null where that version needs
no such change) and what was run on it and where.  ``setup.py``, the set-up script and
the README's table are made from it; ``scripts/refingerprint.py`` writes it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


PINS_FILE = Path(__file__).with_name("pins.json")


@functools.cache
def load_pins() -> dict[str, Any]:
    """The file's content: "main", a version, and "releases", by version."""
    return json.loads(PINS_FILE.read_text(encoding="utf-8"))


def versions() -> tuple[str, ...]:
    return tuple(load_pins()["releases"])


def fingerprints(target: str) -> dict[str, str | None]:
    """Version -> sha256 of ``target``'s source, for the versions that list it."""
    found = {}
    for version, pin in load_pins()["releases"].items():
        if target in pin["fingerprints"]:
            found[version] = pin["fingerprints"][target]
    return found
