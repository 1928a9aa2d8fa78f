"""The features, and the overlay modules in the order in which they are applied."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from ._pins import versions


@dataclass(frozen=True)
class Feature:
    """What a user turns on or off.

    Attributes:
        name: as written in ``TORCH_OVERLAY`` and ``apply``.
        tier: "correctness" features are on with ``TORCH_OVERLAY=1``; "memory" features
            are opt-in, all of them with ``TORCH_OVERLAY=memory``.
        summary: one line.
        config: config key that holds the feature's value, or None.
        values: what ``name=value`` accepts; the first is meant by ``name`` alone.
    """

    name: str
    tier: str
    summary: str
    config: str | None = None
    values: tuple[str, ...] = ()


FEATURES: dict[str, Feature] = {
    f.name: f
    for f in (
        Feature(
            "rng",
            "correctness",
            "recompute never changes a random number, nor what must not run twice",
            config="torch._functorch.config:rng_recompute",
            values=("replay", "save"),
        ),
        Feature(
            "rand4x",
            "correctness",
            "one random stream for every Triton kernel, four numbers at a time",
            config="torch._inductor.config:rand_draw",
            values=("quads", "words"),
        ),
        Feature(
            "knapsack",
            "correctness",
            "knapsack solvers keep to the budget; the evaluator's peaks are right",
        ),
        Feature(
            "remat",
            "memory",
            "copies recomputed values to their late uses in the backward",
            config="torch._functorch.config:use_site_remat",
            values=("light", "all", "off"),
        ),
        Feature(
            "peak",
            "memory",
            "chooses what is saved: least recompute within a limit of the peak",
        ),
    )
}

# Versions that the fingerprints are kept for.
RELEASES = versions()

OVERLAY_MODULES = (
    "torch_overlay._functorch.config",
    "torch_overlay._functorch.partitioners",
    "torch_overlay._functorch._aot_autograd.graph_compile",
    "torch_overlay._functorch._activation_checkpointing.knapsack",
    "torch_overlay._functorch._activation_checkpointing.knapsack_evaluator",
    "torch_overlay._inductor.config",
    "torch_overlay._inductor.compile_fx",
    "torch_overlay._inductor.choices",
    "torch_overlay._inductor.codegen.triton",
    "torch_overlay._inductor.codegen.wrapper",
    "torch_overlay._inductor.optimize_indexing",
)


def load() -> None:
    """Import every overlay module once, which declares its changes."""
    for name in OVERLAY_MODULES:
        importlib.import_module(name)
