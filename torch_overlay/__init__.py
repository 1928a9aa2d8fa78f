"""An overlay for an installed PyTorch; importing this package changes nothing.

    import torch_overlay
    torch_overlay.apply("remat")             # or TORCH_OVERLAY=remat in the environment
    with torch_overlay.applied("remat=all"): # for A/B runs and tests
        ...
    torch_overlay.revert()
    torch_overlay.status()

A feature is written ``name`` or ``name=value``; ``FEATURES`` lists them.
"""

from ._api import applied, apply, parse_features, revert, status
from ._errors import MismatchError, OverlayError
from ._manifest import FEATURES


__all__ = [
    "FEATURES",
    "MismatchError",
    "OverlayError",
    "applied",
    "apply",
    "parse_features",
    "revert",
    "status",
]
__version__ = "0.1.0"
