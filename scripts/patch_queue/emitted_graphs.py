"""Write the forward and backward graphs that the partitioner emits for five models.

    python scripts/patch_queue/emitted_graphs.py --out FILE [--overlay FEATURES]

To compare the overlay on plain torch (``--overlay remat``) with a patched torch: both
write the same file.  Nothing of the overlay is imported without ``--overlay``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curve.models import build, DEFAULTS, sizes_for


MODELS = tuple(DEFAULTS)
# Activations weigh more than parameters, as in training.
SMALL = {"hidden": 32, "inter": 64, "heads": 2, "vocab": 64, "batch": 2, "seq": 256}
MODES = ("light", "all")


def graph_lines(gm: fx.GraphModule) -> list[str]:
    """One line a node: name, operator, arguments, and what its value is like."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        tensors = value if isinstance(value, (tuple, list)) else [value]
        kinds = [
            f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}"
            for t in tensors
            if isinstance(t, torch.Tensor)
        ]
        lines.append(f"{node.format_node() or node.name} # {' '.join(kinds)}")
    return lines


def emitted(model: str, layers: int, budget: float, mode: str) -> list[list[str]]:
    """Lines of every graph that one training step compiles."""
    from functorch.compile import make_boxed_func

    graphs: list[list[str]] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph_lines(gm))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    module, inputs = build(
        model, sizes_for(model, layers=layers, **SMALL), torch.float32
    )
    with functorch_config.patch(activation_memory_budget=budget, use_site_remat=mode):
        torch.compile(module, backend=backend)(**inputs).backward()
    return graphs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overlay", metavar="FEATURES", help="as in TORCH_OVERLAY")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budgets", default="0,0.1", help="comma list")
    args = parser.parse_args(argv)
    if args.overlay:
        import torch_overlay

        torch_overlay.apply(*torch_overlay.parse_features(args.overlay))
    found = {
        f"{model} {budget} {mode}": emitted(model, args.layers, float(budget), mode)
        for model in MODELS
        for budget in args.budgets.split(",")
        for mode in MODES
    }
    args.out.write_text(json.dumps(found, indent=0), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
