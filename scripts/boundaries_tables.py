#!/usr/bin/env python3
"""The tables of docs/boundaries.md and the README's picture, from docs/results.

    python scripts/boundaries_tables.py
    python scripts/boundaries_tables.py --plot docs/results/h200-boundaries.png

Prints the tables; --plot also draws plain torch and boundaries on the 32-layer Llama.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PREDICTED = ("llama", "bert", "gpt2", "vit", "moe", "unet")
MEASURED = {
    ("llama", "float32"): "Llama, 32 layers, float32",
    ("bert", "float32"): "BERT, 32 layers, dropout 0.1",
    ("llama", "bfloat16"): "Llama of 1B shape, 16 layers, bfloat16",
}
SHOWN = (0, 0.02, 0.05, 0.1, 0.13, 0.15, 0.2, 0.3, 0.5, 0.7, 0.95, 1)
Row = dict[str, Any]


def load(name: str) -> list[Row]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def largest_rise(rows: Iterable[Row], key: str) -> float:
    """How far, as a part, a peak is above that of a larger budget; 0 if never."""
    worst, lowest = 0.0, float("inf")
    for row in sorted(rows, key=lambda r: r["budget"], reverse=True):
        worst = max(worst, row[key] / lowest - 1)
        lowest = min(lowest, row[key])
    return worst


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def predicted() -> list[str]:
    lines = []
    for model in PREDICTED:
        rows = load(f"boundaries/predicted-{model}.json")
        for method, label in (("stock", "plain"), ("boundaries", "overlay")):
            mine = {r["budget"]: r for r in rows if r["method"] == method}
            key = "predicted_peak_bytes"
            peaks = [
                f"{mine[b][key] / 1e6:.0f}" for b in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
            ]
            rise = f"{100 * largest_rise(mine.values(), key):.1f} %"
            lines.append(_line(f"{model}, {label}", *peaks, rise))
    return lines


def measured() -> list[str]:
    lines = []
    for (model, dtype), label in MEASURED.items():
        for r in load("h200-boundaries.json"):
            if (r["model"], r["dtype"]) == (model, dtype) and r["budget"] in SHOWN:
                peak = f"{r['measured_peak_bytes'] / 1e6:.1f}"
                cells = (peak, f"{r['step_ms']:.1f}", f"{r['grad_rel_err']:.1e}")
                lines.append(_line(label, f"{r['budget']:g}", *cells))
    return lines


def _agreement(rows: Sequence[Row], key: str) -> tuple[str, str, str]:
    """Median and largest error of a prediction, and Spearman's rank correlation."""
    from scipy.stats import spearmanr

    pairs = [(r[key], r["measured_peak_bytes"]) for r in rows]
    errors = [abs(p / m - 1) for p, m in pairs]
    rank = spearmanr(*zip(*pairs, strict=True)).statistic
    return (
        f"{100 * statistics.median(errors):.1f} %",
        f"{100 * max(errors):.1f} %",
        f"{rank:.4f}",
    )


def predicted_against_measured() -> list[str]:
    rows = load("boundaries/predicted-measured.json")
    groups = {
        f"{m}, 12 layers": [r for r in rows if r["model"] == m]
        for m in ("llama", "gpt2", "vit", "bert")
    }
    return [
        _line(
            label,
            len(mine),
            *_agreement(mine, "predicted_peak_bytes"),
            *_agreement(mine, "estimated_peak_bytes"),
        )
        for label, mine in {**groups, "all": rows}.items()
    ]


def masks() -> list[str]:
    lines = []
    for name, key, label in (
        ("predicted-mask", "predicted_peak_bytes", "12 layers, predicted"),
        ("h200-mask", "measured_peak_bytes", "32 layers, measured"),
    ):
        rows = load(f"boundaries/{name}.json")
        peaks = {(r["method"], r["budget"]): r[key] / 1e6 for r in rows}
        for budget in sorted({r["budget"] for r in rows}):
            both = (peaks[m, budget] for m in ("boundaries", "mask-again"))
            lines.append(_line(label, f"{budget:g}", *(f"{p:.1f}" for p in both)))
    return lines


def planning() -> list[str]:
    return [
        _line(
            r["machine"].partition(",")[0],
            r["layers"],
            r["nodes"],
            f"{r['plan_seconds']:.3f}",
            f"{1e6 * r['plan_seconds'] / r['nodes']:.0f}",
            f"{1e3 * r['peak_seconds']:.1f}",
            f"{r['partition_seconds']:.1f}",
        )
        for r in load("boundaries-time.json")
    ]


TABLES = {
    "predicted": predicted,
    "predicted against measured": predicted_against_measured,
    "measured": measured,
    "mask": masks,
    "time": planning,
}


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stock = load("h200-llama32.json")
    ours = [
        r
        for r in load("h200-boundaries.json")
        if (r["model"], r["dtype"]) == ("llama", "float32")
    ]
    curves = {
        "plain torch": [r for r in stock if r["method"] == "stock"],
        "overlay, boundaries": ours,
    }
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for label, rows in curves.items():
        rows = sorted(rows, key=lambda r: r["budget"])
        peaks = [r["measured_peak_bytes"] / 1e6 for r in rows]
        axis.plot([r["budget"] for r in rows], peaks, "o-", label=label)
    (checkpointed,) = (r for r in stock if r["method"] == "ac1")
    level = checkpointed["measured_peak_bytes"] / 1e6
    axis.axhline(level, ls=":", c="gray", label="every layer checkpointed")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("activation_memory_budget")
    axis.set_ylabel("peak of a step, MB")
    axis.set_title("32-layer Llama, one NVIDIA H200, torch 2.14.1")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    for title, table in TABLES.items():
        print(f"{title}\n\n" + "\n".join(table()) + "\n")
    rows = load("h200-boundaries.json")
    for (model, dtype), label in MEASURED.items():
        mine = [r for r in rows if (r["model"], r["dtype"]) == (model, dtype)]
        rise = largest_rise(mine, "measured_peak_bytes")
        print(f"{label}: {len(mine)} budgets, largest rise {100 * rise:.1f} %")
    if args.plot:
        plot(args.plot)
        print(f"plot: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
