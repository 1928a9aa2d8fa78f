"""Entry point of group ``torch.backends``: runs at the end of ``import torch``.

Does nothing unless ``TORCH_OVERLAY`` is set, so an installed overlay costs an
environment lookup.  Runs in Inductor's compile workers and in spawned processes too.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Apply the features that ``TORCH_OVERLAY`` names; an error fails the import."""
    spec = os.environ.get("TORCH_OVERLAY", "")
    if spec in ("", "0"):
        return
    import torch_overlay

    torch_overlay.apply(*torch_overlay.parse_features(spec))
