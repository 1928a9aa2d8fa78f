#!/usr/bin/env python3
"""Time and memory of the knapsack solvers, torch's and torch_overlay's, side by side.

    python scripts/bench_knapsack.py --out docs/results/knapsack.json

Random instances of 10 to 5000 items under a budget of a tenth of their weight.  Times
are medians; the two versions of a solver take turns.  Memory is the most that tensors
and Python objects held during one call, counted by a dispatch mode and by tracemalloc.
The plot goes beside the rows as PNG.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch_overlay


if TYPE_CHECKING:
    from collections.abc import Callable

SOLVERS = ("dp_knapsack", "dp_knapsack_sliding_hirschberg", "greedy_knapsack")
SIZES = (10, 100, 500, 1000, 2000, 5000)


class TensorBytes(TorchDispatchMode):
    """The most bytes that storages made under it held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.alive[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def instance(count: int) -> tuple[list[float], list[float], float]:
    rng = random.Random(count)
    weights = [rng.randint(1, 200) * 1e-4 for _ in range(count)]
    runtimes = [float(rng.randint(1, 10**6)) for _ in range(count)]
    return weights, runtimes, 1.0 if sum(weights) > 10 else sum(weights) / 10


def peak_bytes(solve: Callable[..., object], args: tuple[Any, ...]) -> int:
    tracemalloc.start()
    with TensorBytes() as counted:
        solve(*args)
    _, python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return counted.peak + python


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/knapsack.json"))
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args(argv)
    from torch._functorch._activation_checkpointing import knapsack

    torch.set_num_threads(1)
    plain = {name: getattr(knapsack, name) for name in SOLVERS}
    torch_overlay.apply("knapsack")
    ours = {name: getattr(knapsack, name) for name in SOLVERS}
    about = {
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} CPU cores, one thread",
        "command": shlex.join(["python", "scripts/bench_knapsack.py", *sys.argv[1:]]),
    }
    # What the counting itself imports is not a solver's.
    peak_bytes(plain["dp_knapsack"], instance(SIZES[0]))
    rows = []
    for count in SIZES:
        case = instance(count)
        for name in SOLVERS:
            versions = {"torch": plain[name], "overlay": ours[name]}
            times: dict[str, list[float]] = {v: [] for v in versions}
            for _ in range(args.repeat):
                for version, solve in versions.items():
                    start = time.perf_counter()
                    solve(*case)
                    times[version].append(time.perf_counter() - start)
            for version, solve in versions.items():
                rows.append(
                    {
                        "solver": name,
                        "version": version,
                        "items": count,
                        "seconds": statistics.median(times[version]),
                        "peak_bytes": peak_bytes(solve, case),
                        "runtime": solve(*case)[0],
                        **about,
                    }
                )
                r = rows[-1]
                print(
                    f"{name:<32} {version:<8} {count:>5} items {r['seconds']:9.4f} s "
                    f"{r['peak_bytes'] / 1e6:9.3f} MB",
                    flush=True,
                )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    plot(rows, args.out.with_suffix(".png"))
    return 0


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for index, name in enumerate(SOLVERS):
        for version, style in (("torch", "--"), ("overlay", "-")):
            mine = [r for r in rows if (r["solver"], r["version"]) == (name, version)]
            items = [r["items"] for r in mine]
            for axis, key, unit in (
                (axes[0], "seconds", 1),
                (axes[1], "peak_bytes", 1e6),
            ):
                label = f"{name}, {version}"
                values = [r[key] / unit for r in mine]
                axis.plot(items, values, style, color=f"C{index}", label=label)
    for axis, label in zip(axes, ("seconds", "peak, MB"), strict=True):
        axis.set(xlabel="items", ylabel=label, xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
