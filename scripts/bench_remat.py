#!/usr/bin/env python3
"""Time of the use-site rematerialization pass over growing models.

    python scripts/bench_remat.py --layers 32,64,128 --out docs/results/remat-time.json

Traces a Hugging Face Llama of each depth once, partitions it at one budget and runs the
pass on copies of the backward.  A row holds medians: plan_seconds (reading the graph
and choosing the copies) and pass_seconds (rewriting and checking as well).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--layers", default="32,64,128", help="comma list")
    p.add_argument("--budget", type=float, default=0.05)
    p.add_argument("--mode", choices=("light", "all"), default="all")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--out", type=Path, default=Path("out/remat-time.json"))
    return p


def time_pass(backward: Any, mode: str, repeat: int) -> dict[str, Any]:
    """Medians over ``repeat`` runs on copies of one backward graph."""
    from torch_overlay._functorch._activation_checkpointing import (
        use_site_remat as pass_,
    )
    from torch_overlay._functorch._activation_checkpointing.remat_planner import (
        plan_use_site_copies,
        PlanOptions,
    )

    level = pass_.HEAVY if mode == "all" else pass_.CHEAP
    plan_times, pass_times = [], []
    for _ in range(repeat):
        gm = copy.deepcopy(backward)
        start = time.perf_counter()
        analysis = pass_.analyze_use_site_remat(gm.graph)
        plan = plan_use_site_copies(analysis.schedule, PlanOptions(max_level=level))
        plan_times.append(time.perf_counter() - start)
        # As the partitioner runs it: raise_getitems recompiles the graph afterwards.
        result = pass_.apply_use_site_remat(gm, analysis, plan, recompile=False)
        pass_times.append(time.perf_counter() - start)
    return {
        "backward_nodes": len(analysis.nodes),
        "cuts": len(plan.cuts),
        "copies": result.num_copies,
        "peak_before_bytes": result.peak_before_bytes,
        "peak_after_bytes": result.peak_after_bytes,
        "plan_seconds": statistics.median(plan_times),
        "pass_seconds": statistics.median(pass_times),
    }


def partitioned_llama(layers: int, budget: float) -> tuple[Any, float]:
    """Forward and backward of a Llama of that depth, and the partition's seconds."""
    import torch
    import torch._functorch.config as functorch_config
    from curve import models
    from curve.predict import trace_joint
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    sizes = models.sizes_for("llama", layers=layers)
    model, inputs = models.build("llama", sizes, torch.float32)
    found = []

    def partition(gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        with functorch_config.patch(activation_memory_budget=budget):
            pair = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        found.append((pair, time.perf_counter() - start))
        return pair

    trace_joint(model, inputs, partition, "inductor")
    return found[0]


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import torch
    from budget_curve import machine_kind
    from tabulate import tabulate

    torch.set_num_threads(1)
    rows = []
    for layers in map(int, args.layers.split(",")):
        torch._dynamo.reset()
        row = {"layers": layers, "budget": args.budget, "mode": args.mode}
        (_, backward), _ = partitioned_llama(layers, args.budget)
        row.update(time_pass(backward, args.mode, args.repeat))
        row.update(torch=torch.__version__, machine=machine_kind("cpu"))
        row["command"] = " ".join(["python", "scripts/bench_remat.py", *sys.argv[1:]])
        rows.append(row)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    shown = ("layers", "backward_nodes", "cuts", "plan_seconds", "pass_seconds")
    print(
        tabulate([[r[k] for k in shown] for r in rows], headers=shown, floatfmt=".2f")
    )
    print(f"rows: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
