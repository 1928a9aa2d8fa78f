#!/usr/bin/env python3
"""What planning the saved set adds to compilation.

    python scripts/bench_peak.py --layers 32,64,128
    python scripts/bench_peak.py --compile 5 --device cuda

Traces a Hugging Face Llama of each depth, partitions it once at one budget and times
the choice of what to save; a row holds the median.  With --compile it trains one step
instead, each time compiled anew: pairs without and with the feature, in turns, by
processes that run beside each other.  Rows are kept, those of other runs too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_remat import partitioned_llama


if TYPE_CHECKING:
    from collections.abc import Callable


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--layers", default="32", help="comma list")
    p.add_argument("--budget", type=float, default=0.05)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--compile", type=int, metavar="PAIRS")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--out", type=Path, default=Path("out/peak-time.json"))
    p.add_argument("--pair", type=int, help=argparse.SUPPRESS)
    return p


def time_planning(layers: int, budget: float, repeat: int) -> dict[str, Any]:
    """Median times of ``plan_saved_set`` and of one predicted peak for a Llama."""
    import torch._functorch.config as functorch_config

    from torch_overlay._functorch._activation_checkpointing import (
        joint_peak,
        save_by_peak,
    )

    plain = save_by_peak.plan_saved_set
    found: dict[str, Any] = {"layers": layers, "budget": budget}

    def median_seconds(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            result = function(*args)
            times.append(time.perf_counter() - start)
        return statistics.median(times), result

    def timed(
        choose: Any, joint_graph: Any, node_info: Any, memory_budget: float, *args: Any
    ) -> Any:
        chosen = {b: choose(b) for b in (memory_budget, 1)}  # not part of the time
        joint_graph.owning_module.meta[save_by_peak.GENERATED_MARK] = True
        seconds, planned = median_seconds(
            plain, chosen.get, joint_graph, node_info, memory_budget, *args
        )
        schedule, plan = planned
        found.update(plan_seconds=seconds, nodes=len(joint_graph.nodes))
        found.update(looks=plan.looks, saved=len(plan.saved))
        found["peak_seconds"], _ = median_seconds(
            joint_peak.peak_bytes, schedule, schedule.values_of(plan.saved)
        )
        return planned

    with (
        functorch_config.patch(save_by_peak=True),
        mock.patch.object(save_by_peak, "plan_saved_set", timed),
    ):
        _, found["partition_seconds"] = partitioned_llama(layers, budget)
    return found


def compile_pair(layers: int, budget: float, device: str, number: int) -> None:
    """Print the seconds of one compiled step without and with the feature."""
    import torch
    import torch._functorch.config as functorch_config
    from curve import models

    def step(layers: int, save: bool) -> float:
        sizes = models.sizes_for("llama", layers=layers)
        model, inputs = models.build("llama", sizes, torch.float32)
        model = model.to(device)
        inputs = {k: v.to(device) for k, v in inputs.items()}
        torch._dynamo.reset()
        start = time.perf_counter()
        with functorch_config.patch(activation_memory_budget=budget, save_by_peak=save):
            torch.compile(model)(**inputs).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step(1, True)
    order = (False, True) if number % 2 else (True, False)
    seconds = {save: step(layers, save) for save in order}
    print("PAIR " + json.dumps([seconds[False], seconds[True]]))


def time_compiling(
    layers: int, budget: float, device: str, pairs: int
) -> dict[str, Any]:
    """Medians over ``pairs`` processes; raises RuntimeError if one of them fails."""
    common = ("--layers", str(layers), "--budget", str(budget), "--device", device)
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, *common, "--pair", str(i)],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for i in range(pairs)
        ]
        lines = [w.communicate()[0].splitlines() for w in workers]
    found = [json.loads(t[5:]) for out in lines for t in out if t.startswith("PAIR ")]
    if len(found) < pairs:
        raise RuntimeError(f"{pairs - len(found)} of {pairs} processes failed")
    return {
        "layers": layers,
        "budget": budget,
        "pairs": pairs,
        "compile_seconds_off": statistics.median(off for off, _ in found),
        "compile_seconds_on": statistics.median(on for _, on in found),
        "ratio": statistics.median(on / off for off, on in found),
    }


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import torch
    from budget_curve import machine_kind
    from tabulate import tabulate

    import torch_overlay

    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: this torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    torch_overlay.apply("peak")
    depths = [int(n) for n in args.layers.split(",")]
    if args.pair is not None:
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch._inductor.config.force_disable_caches = True
        compile_pair(depths[0], args.budget, args.device, args.pair)
        return 0
    about = {"torch": torch.__version__, "machine": machine_kind(args.device)}
    about["command"] = shlex.join(["python", *sys.argv]) if argv is None else None
    rows = []
    if args.out.exists():
        rows = json.loads(args.out.read_text(encoding="utf-8"))
    for layers in depths:
        torch._dynamo.reset()
        if args.compile:
            row = time_compiling(layers, args.budget, args.device, args.compile)
        else:
            row = time_planning(layers, args.budget, args.repeat)
        rows.append({**row, **about})
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    print(f"rows: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
