"""The functions that the overlay changes, looked up in another torch tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_overlay import _manifest
from torch_overlay._overrides import DECLARED, Override
from torch_overlay._sources import fingerprint, source_in_tree


if TYPE_CHECKING:
    from .trees import Tree


@dataclass(frozen=True)
class Finding:
    """A target in the new tree; ``state`` is "known", "changed" or "gone"."""

    change: Override
    source: str | None
    state: str


def find_targets(tree: Tree) -> list[Finding]:
    """Every target of the overlay in ``tree``."""
    _manifest.load()
    found = []
    for change in DECLARED.values():
        if not isinstance(change, Override):
            continue
        source = source_in_tree(change.target, tree.root)
        state = "changed"
        if source is None:
            state = "gone"
        elif fingerprint(source) in change.fingerprints.values():
            state = "known"
        found.append(Finding(change, source, state))
    return found
