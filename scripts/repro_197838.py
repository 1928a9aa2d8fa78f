#!/usr/bin/env python3
"""Does peak memory fall with activation_memory_budget?

    python scripts/repro_197838.py [--overlay] [--json] [--device cpu|cuda]

Runs on any torch; --overlay turns torch_overlay's "rng", "remat" and "peak" on
first.  Without a CUDA device: live bytes of the partitioned backward of a stack of 16
gated MLPs.  With one: the measured peak of a training step of a 32-layer transformer.
See pytorch/pytorch#197838.

Exit code: 0 the peak never rises by more than 1 % as the budget falls and is never
above budget 1's, 1 it does or is, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import warnings
from typing import Any


BUDGETS = (0, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1)
TOLERANCE = 1.01
FEATURES = ("rng", "remat", "peak")


def blocks(layers: int, size: int, inner: int, heads: int) -> Any:
    """Gated MLPs on a residual stream, behind attention where there are heads."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(size) for _ in range(2))
            self.qkv = nn.Linear(size, 3 * size, bias=False) if heads else None
            self.out = nn.Linear(size, size, bias=False) if heads else None
            self.gate = nn.Linear(size, inner, bias=False)
            self.up = nn.Linear(size, inner, bias=False)
            self.down = nn.Linear(inner, size, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if heads:
                parts = self.qkv(self.norms[0](x)).chunk(3, -1)
                parts = [p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts]
                attend = nn.functional.scaled_dot_product_attention
                found = attend(*parts, is_causal=True)
                x = x + self.out(found.transpose(1, 2).flatten(2))
            n = self.norms[1](x)
            return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def live_peak_bytes(graph: Any) -> int:
    """Peak of a backward's live storages, parameters not counted."""
    storage, size, first, last = {}, {}, {}, {}
    nodes = list(graph.nodes)
    for k, node in enumerate(nodes):
        value = node.meta.get("val")
        tensors = value if isinstance(value, (tuple, list)) else [value]
        held = [t.untyped_storage() for t in tensors if hasattr(t, "untyped_storage")]
        storage[node] = [s._cdata for s in held]
        size.update((s._cdata, s) for s in held)
        if not node.name.startswith("primals"):
            for key in storage[node]:
                first.setdefault(key, 0 if node.op == "placeholder" else k)
        for source in node.all_input_nodes:
            last.update(dict.fromkeys(storage[source], k))
    steps = [0] * (len(nodes) + 1)
    for key, k in first.items():
        steps[k] += size[key].nbytes()
        steps[max(last.get(key, k), k) + 1] -= size[key].nbytes()
    return max(itertools.accumulate(steps))


def predicted(budget: float) -> int:
    import torch
    import torch._functorch.config as config
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found = []

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        graphs = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        found.append(live_peak_bytes(graphs[1].graph))
        return graphs

    def compiler(gm: Any, inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition
    )
    model, x = blocks(16, 256, 1024, 0), torch.randn(2, 256, 256)
    with config.patch(activation_memory_budget=budget):
        torch.compile(model, backend=backend)(x).sum().backward()
    return found[0]


def measured(budget: float) -> int:
    import torch
    import torch._functorch.config as config

    torch._dynamo.reset()
    model = blocks(32, 256, 688, 8).cuda()
    x = torch.randn(2, 1024, 256, device="cuda")
    with config.patch(activation_memory_budget=budget):
        run = torch.compile(model)
        for _ in range(2):
            run(x).sum().backward()
            model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(x).sum().backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def curve(device: str) -> list[dict[str, Any]]:
    """A row per budget, from 1 down, and whether its peak is too high."""
    lowest, rows = None, []
    for budget in reversed(BUDGETS):
        peak = measured(budget) if device == "cuda" else predicted(budget)
        bad = lowest is not None and peak > TOLERANCE * lowest
        lowest = peak if lowest is None else min(lowest, peak)
        rows.append({"budget": budget, "peak_bytes": peak, "bad": bad})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overlay", action="store_true", help="with torch_overlay")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    try:
        import torch

        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        with contextlib.ExitStack() as stack:
            if args.overlay:
                import torch_overlay

                stack.enter_context(torch_overlay.applied(*FEATURES))
            rows = curve(device)
    except Exception as error:
        print(f"repro_197838: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    wrong = sum(r["bad"] for r in rows)
    if args.json:
        about = {"torch": torch.__version__, "overlay": args.overlay, "device": device}
        print(json.dumps({**about, "results": rows}, indent=1))
    else:
        print("budget   peak MB")
        for r in rows:
            mark = "  RISES" if r["bad"] else ""
            print(f"{r['budget']:6.2f}  {r['peak_bytes'] / 1e6:8.2f}{mark}")
        print(f"torch {torch.__version__}, {device}: {wrong} of {len(rows)} rise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
