#!/usr/bin/env python3
"""Hold the planned saved sets against plain torch and against checkpointing by hand.

    python scripts/peak_sweep.py --jobs 2
    python scripts/peak_sweep.py --tables

For every model: dry runs of 21 budgets of plain torch and of feature peak, of every
manual policy, and of plans for the peaks of all of these.  --tables prints what the
rows say, as tables of Markdown: which points no plan is as good as, how far the model
of the peak is from the dry run, and how much a peak rises as the budget falls.
Rows are kept, those of other models too.
Exit code 0, 1 if some row carries an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence

CURVE = Path(__file__).resolve().with_name("budget_curve.py")
MANUAL = ("ac1", "ac2", "sac-attn", "sac-mm")
MB, GF = 1e6, 1e9

# Options of the models; the smaller ones in float32 and bfloat16, with and without
# dropout, under each of plain torch's ways to run into memory.
MODELS = {
    "lm": "--model lm --dtype bfloat16",
    "lm-float32": "--model lm --layers 4",
    "lm-dropout": "--model lm --layers 4 --dtype bfloat16 --dropout 0.1",
    "tied": "--model tied --layers 4 --dtype bfloat16",
    "twice": "--model twice --layers 4 --dtype bfloat16",
    "values": "--model values --dtype bfloat16",
    "encdec": "--model encdec --dtype bfloat16",
    "encdec-dropout": "--model encdec --layers 8 --dropout 0.1",
    "llama-32": "--model llama",
    "llama-12": "--model llama --layers 12 --dtype bfloat16",
    "bert-12": "--model bert --layers 12",
    "bert-8": "--model bert --layers 8 --dtype bfloat16 --dropout 0",
    "gpt2-12": "--model gpt2 --layers 12 --dtype bfloat16",
    "vit-12": "--model vit --layers 12",
    "mlp": "--model mlp",
    "moe": "--model moe --layers 6",
    "unet": "--model unet",
    "resnet": "--model resnet --dtype bfloat16",
}
KEPT = (
    *("method", "budget", "target_bytes", "saved_bytes", "model_peak_bytes"),
    *("predicted_peak_bytes", "lowest_peak_bytes", "recompute_flops"),
    *("recompute_seconds", "plan_seconds", "error"),
)
SHARED = (
    *("model", "layers", "hidden", "inter", "heads", "kv_heads", "vocab", "seq"),
    *("batch", "dtype", "dropout", "device", "backend", "torch", "triton", "machine"),
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--models", default=",".join(MODELS), help="comma list")
    p.add_argument("--budgets", default="0:1:0.05")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--tables", action="store_true", help="only print what rows say")
    p.add_argument("--out", type=Path, default=Path("out/peak-predicted.json"))
    return p


def predicted(options: str, more: Sequence[str], jobs: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, str(CURVE), "--predict", "--device", "cuda"]
        command += [*shlex.split(options), *more, "--jobs", str(jobs)]
        child = subprocess.Popen(
            [*command, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)  # its workers too
            raise
        return json.loads(out.read_text(encoding="utf-8"))


def lost(
    rows: Sequence[dict[str, Any]], work: str = "recompute_flops"
) -> list[dict[str, Any]]:
    """Rows of plain torch and of manual policies that no plan is as good as.

    A plan is as good with no higher peak and no more ``work``.
    """
    rows = [r for r in rows if r["error"] is None]
    plans = [r for r in rows if r["method"] == "peak"]
    others = [r for r in rows if r["method"] != "peak"]
    keys = ("predicted_peak_bytes", work)
    return [
        other
        for other in others
        if not any(all(plan[k] <= other[k] for k in keys) for plan in plans)
    ]


def sweep(name: str, budgets: str, jobs: int) -> dict[str, Any]:
    """All rows of one model, and what they share."""
    options = MODELS[name]
    methods = ",".join(("stock", "peak", *MANUAL))
    rows = predicted(options, ["--methods", methods, "--budgets", budgets], jobs)
    targets = sorted({r["predicted_peak_bytes"] for r in lost(rows)})
    if targets:
        aims = ["--budgets", "1", "--methods", "peak"]
        aims += ["--targets", ",".join(map(str, targets))]
        found = predicted(options, aims, jobs)
        rows += [r for r in found if r["target_bytes"] is not None]
    shared = {k: rows[0][k] for k in SHARED if k in rows[0]}
    command = ["python", "scripts/peak_sweep.py", "--models", name]
    command += ["--budgets", budgets]
    return {
        "run": name,
        **shared,
        "command": shlex.join(command),
        "rows": [{k: r[k] for k in KEPT} for r in rows],
    }


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    """One line a row; what a run's rows share stands before them."""
    parts = []
    for run in runs:
        head = json.dumps({k: v for k, v in run.items() if k != "rows"}, indent=1)
        lines = ",\n".join("  " + json.dumps(r) for r in run["rows"])
        parts.append(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}')
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(parts) + "\n]\n", encoding="utf-8")
    temporary.replace(path)


def least_work(
    rows: Sequence[dict[str, Any]], other: dict[str, Any] | None
) -> float | None:
    """GF of the plan with least work among those with no higher peak."""
    if other is None:
        return None
    within = [
        r["recompute_flops"]
        for r in rows
        if r["method"] == "peak"
        and r["predicted_peak_bytes"] <= other["predicted_peak_bytes"]
    ]
    return min(within) / GF if within else None


def dominance_table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    table = []
    for run in runs:
        rows = [r for r in run["rows"] if r["error"] is None]
        peaks = [r for r in rows if r["method"] == "peak"]
        stock = [r for r in rows if r["method"] == "stock"]
        by_hand = {r["method"]: r for r in rows if r["method"] in MANUAL}
        line = {"model": run["run"]}
        if peaks and stock:
            line["lowest, MB"] = min(r["predicted_peak_bytes"] for r in peaks) / MB
            line["plain's lowest"] = min(r["predicted_peak_bytes"] for r in stock) / MB
        for method in ("ac1", "sac-attn"):
            row = by_hand.get(method)
            ours = least_work(peaks, row)
            text = "none"
            if row is not None:
                work = f"{ours:.1f}" if ours is not None else "no plan"
                text = (
                    f"{row['predicted_peak_bytes'] / MB:.1f} MB: "
                    f"{row['recompute_flops'] / GF:.1f} / {work}"
                )
            line[f"{method}: GF by hand / planned"] = text
        line["points"] = len(stock) + len(by_hand)
        line["not reached in FLOPs"] = len(lost(rows))
        line["in seconds"] = len(lost(rows, "recompute_seconds"))
        table.append(line)
    return table


def model_table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    table = []
    for run in runs:
        rows = [r for r in run["rows"] if r["model_peak_bytes"] and not r["error"]]
        plans = {(r["model_peak_bytes"], r["recompute_flops"]): r for r in rows}
        off = sorted(
            abs(r["model_peak_bytes"] / r["predicted_peak_bytes"] - 1)
            for r in plans.values()
        )
        if not off:
            continue
        table.append(
            {
                "model": run["run"],
                "dtype": run["dtype"],
                "dropout": run.get("dropout"),
                "plans": len(off),
                "not the planner's": sum(r["method"] != "peak" for r in plans.values()),
                "median, %": 100 * statistics.median(off),
                "95 % within, %": 100 * off[max(-(-95 * len(off) // 100) - 1, 0)],
                "largest, %": 100 * off[-1],
            }
        )
    return table


def largest_rise(rows: Sequence[dict[str, Any]], method: str) -> float:
    """By how much a peak is above the lowest one of any larger budget, at most."""
    found = [r for r in rows if r["method"] == method and r["budget"] is not None]
    lowest, rise = float("inf"), 0.0
    for row in sorted(found, key=lambda r: -r["budget"]):
        rise = max(rise, row["predicted_peak_bytes"] / lowest - 1)
        lowest = min(lowest, row["predicted_peak_bytes"])
    return rise


def rise_table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "model": run["run"],
            "plain torch, %": 100 * largest_rise(good, "stock"),
            "peak, %": 100 * largest_rise(good, "peak"),
            "planning at most, s": max(
                (r["plan_seconds"] for r in good if r["method"] == "peak"), default=0.0
            ),
        }
        for run in runs
        for good in [[r for r in run["rows"] if r["error"] is None]]
    ]


def print_tables(runs: Sequence[dict[str, Any]]) -> None:
    from tabulate import tabulate

    for title, table in (
        ("No higher peak with no more recompute", dominance_table(runs)),
        ("The model of the peak against the dry run", model_table(runs)),
        ("Largest rise of the peak as the budget falls", rise_table(runs)),
    ):
        text = tabulate(table, headers="keys", tablefmt="github", floatfmt=".2f")
        print(f"{title}\n\n{text}\n")
    for run in runs:
        for row in lost(run["rows"]):
            print(
                f"{run['run']}: no plan as good as {row['method']} {row['budget']}: "
                f"{row['predicted_peak_bytes'] / MB:.2f} MB, "
                f"{row['recompute_flops'] / GF:.2f} GF; with its peak "
                f"{least_work(run['rows'], row)} GF"
            )


def main(argv: list[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = [name.strip() for name in args.models.split(",") if name.strip()]
    unknown = [name for name in names if name not in MODELS]
    if unknown or not names:
        p.error(f"unknown model {', '.join(unknown)}; accepted are {', '.join(MODELS)}")
    runs: list[dict[str, Any]] = []
    if args.out.exists():
        runs = json.loads(args.out.read_text(encoding="utf-8"))
    for name in [] if args.tables else names:
        print(name, file=sys.stderr)
        run = sweep(name, args.budgets, args.jobs)
        runs = [r for r in runs if r["run"] != name] + [run]
        runs.sort(key=lambda r: list(MODELS).index(r["run"]))
        write(args.out, runs)
    if not runs:
        p.error(f"{args.out} has no rows; run without --tables first")
    print_tables(runs)
    return int(any(r["error"] for run in runs for r in run["rows"]))


if __name__ == "__main__":
    sys.exit(main())
