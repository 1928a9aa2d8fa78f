#!/usr/bin/env python3
"""Do the memory-budget knapsack solvers keep to their budget?

    python scripts/repro_197871.py [--overlay] [--json]

Runs on any torch; --overlay turns torch_overlay's "knapsack" feature on first.  See
pytorch/pytorch#197871, pytorch/pytorch#196914.

Exit code: 0 nothing is wrong, 1 something is, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import sys
import warnings
from typing import Any


UNIT = 1e-4
INSTANCES = 1000
SOLVERS = ("dp_knapsack", "dp_knapsack_sliding_hirschberg", "greedy_knapsack")


def row(what: str, found: object, right: object) -> dict[str, Any]:
    return {"what": what, "found": found, "right": right, "bad": found != right}


def exceeded(solver: Any) -> int:
    """Random instances of which more is saved than the capacity."""
    rng = random.Random(0)
    wrong = 0
    for _ in range(INSTANCES):
        weights = [rng.randint(1, 10) for _ in range(rng.randint(2, 8))]
        runtimes = [float(rng.randint(1, 9)) for _ in weights]
        capacity = rng.randint(1, 20)
        _, saved, _ = solver([w * UNIT for w in weights], runtimes, capacity * UNIT)
        wrong += sum(weights[i] for i in saved) > capacity
    return wrong


def told(call: Any) -> str:
    """What a call that must not be accepted does."""
    try:
        call()
    except ValueError:
        return "refused"
    except Exception as error:
        return type(error).__name__
    return "accepted"


def solver_rows() -> list[dict[str, Any]]:
    from torch._functorch._activation_checkpointing import knapsack

    rows = []
    small = [4e-5] * 20000, [1.0] * 20000, 0.001
    for name in SOLVERS:
        solver = getattr(knapsack, name)
        rows.append(
            row(f"{name}: of {INSTANCES} instances too large", exceeded(solver), 0)
        )
        _, saved, _ = solver(*small)
        fits = math.fsum(small[0][i] for i in saved) <= small[2]
        rows.append(row(f"{name}: 20000 items of 4e-5 within .001", fits, True))
        memoryless = told(lambda s=solver: s([0.0, 0.5], [1.0, 1.0], 1.0))
        rows.append(row(f"{name}: an item without memory", memoryless, "accepted"))
        nan = told(lambda s=solver: s([0.5], [1.0], math.nan))
        rows.append(row(f"{name}: a budget of nan", nan, "refused"))
    return rows


def evaluator_rows() -> list[dict[str, Any]]:
    from torch._functorch._activation_checkpointing.graph_info_provider import (
        GraphInfoProvider,
    )
    from torch._functorch._activation_checkpointing.knapsack_evaluator import (
        KnapsackEvaluator,
    )

    names = [f"node{i}" for i in range(1, 6)]
    info = GraphInfoProvider(
        names,
        list(itertools.pairwise(names)),
        names,
        all_node_runtimes=dict.fromkeys(names, 1.0),
        all_node_memories=dict.fromkeys(names, 0.2),
    )
    rows = []
    for saved, right in (((4,), 0.6), ((2, 4), 0.6), ((1, 3, 5), 0.6), ((), 1.0)):
        indices = [i - 1 for i in saved]
        rest = [i for i in range(5) if i not in indices]
        found = KnapsackEvaluator(info).evaluate_knapsack_output(indices, rest, True)
        peak = round(found["peak_memory"], 9)
        rows.append(
            row(f"KnapsackEvaluator: peak with {set(saved) or {}}", peak, right)
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overlay", action="store_true", help="with torch_overlay")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    try:
        import torch

        with contextlib.ExitStack() as stack:
            if args.overlay:
                import torch_overlay

                stack.enter_context(torch_overlay.applied("knapsack"))
            rows = solver_rows() + evaluator_rows()
    except Exception as error:
        print(f"repro_197871: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    wrong = sum(r["bad"] for r in rows)
    if args.json:
        about = {"torch": torch.__version__, "overlay": args.overlay}
        print(json.dumps({**about, "results": rows}, indent=1))
    else:
        width = max(len(r["what"]) for r in rows)
        for r in rows:
            mark = "  WRONG" if r["bad"] else ""
            print(f"{r['what']:{width}}  {r['found']!s:>18}  right: {r['right']}{mark}")
        print(f"torch {torch.__version__}: {wrong} of {len(rows)} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
