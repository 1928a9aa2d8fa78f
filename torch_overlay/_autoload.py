"""Entry point of group ``torch.backends``: runs at the end of ``import torch``.

Does nothing unless ``TORCH_OVERLAY`` is set, or the environment was enabled with
``scripts/apply_overlay.py --enable``, so an installed overlay costs an environment
lookup.  Runs in Inductor's compile workers and in spawned processes too.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


# In the site-packages folder of an enabled environment; holds what TORCH_OVERLAY would.
ENABLED_FILE = "torch_overlay.enabled"


def enabled_features() -> str:
    """``TORCH_OVERLAY``, or what the environment was enabled with, or ""."""
    spec = os.environ.get("TORCH_OVERLAY")
    if spec is not None:
        return spec
    path = Path(sysconfig.get_path("purelib")) / ENABLED_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def autoload() -> None:
    """Apply the enabled features; an error fails the import of torch."""
    spec = enabled_features()
    if spec in ("", "0"):
        return
    import torch_overlay

    torch_overlay.apply(*torch_overlay.parse_features(spec))
