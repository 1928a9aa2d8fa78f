"""Table and plot of curve rows."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from .methods import METHODS


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


MB = 1e6
COLUMNS = (
    ("method", "method", None),
    ("rng", "rng", None),
    ("budget", "budget", None),
    ("saved_bytes", "saved MB", MB),
    ("predicted_peak_bytes", "predicted MB", MB),
    ("estimated_peak_bytes", "estimated MB", MB),
    ("liveness_peak_bytes", "liveness MB", MB),
    ("measured_peak_bytes", "measured MB", MB),
    ("step_ms", "step ms", 1),
    ("recompute_flops", "recompute GF", 1e9),
    ("plan_seconds", "plan s", 1),
    ("compile_seconds", "compile s", 1),
    ("grad_rel_err", "grad error", None),
    ("error", "error", None),
)


def peak_of(row: dict[str, Any]) -> int | None:
    """Best known peak of a row: measured, else predicted, else liveness."""
    for key in ("measured_peak_bytes", "predicted_peak_bytes", "liveness_peak_bytes"):
        if row.get(key) is not None:
            return row[key]
    return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, without the columns that all of them leave empty."""
    from tabulate import tabulate

    used = [c for c in COLUMNS if any(r.get(c[0]) is not None for r in rows)]
    if all((r.get("rng") or "off") == "off" for r in rows):
        used = [c for c in used if c[0] != "rng"]

    def cell(row: dict[str, Any], key: str, unit: float | None) -> Any:
        value = row.get(key)
        if value is None:
            return None
        if key == "error":
            return str(value).splitlines()[0][:60]
        if key == "grad_rel_err":
            return f"{value:.1e}"
        return value if unit is None else f"{value / unit:.1f}"

    return tabulate(
        [[cell(r, key, unit) for key, _, unit in used] for r in rows],
        headers=[title for _, title, _ in used],
        disable_numparse=True,
        colalign=["right" if unit else "left" for _, _, unit in used],
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: peak over budget, and peak over step time or recomputed work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [r for r in rows if peak_of(r) is not None]
    timed = any(r.get("step_ms") is not None for r in good)
    work_key, unit, work = (
        ("step_ms", 1, "step time, ms")
        if timed
        else ("recompute_flops", 1e9, "recomputed work, GFLOP")
    )
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for index, (label, mine) in enumerate(_curves(good).items()):
        color = f"C{index}"
        swept = sorted((r for r in mine if r["budget"] is not None), key=_budget)
        peaks = [peak_of(r) / MB for r in swept]
        if swept:
            budgets = [_budget(r) for r in swept]
            left.plot(budgets, peaks, "o-", label=label, color=color)
        else:
            level = peak_of(mine[0]) / MB
            left.axhline(level, linestyle="--", label=label, color=color)
        seen = [r for r in mine if r.get(work_key) is not None]
        right.scatter(
            [r[work_key] / unit for r in seen],
            [peak_of(r) / MB for r in seen],
            color=color,
            label=label,
        )
    left.set_xlim(-0.02, 1.02)
    left.set_xlabel("activation_memory_budget")
    right.set_xlabel(work)
    for axis in (left, right):
        axis.set_ylabel("peak, MB")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(_title(good))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by method, and by the policy for random numbers where there is one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: _place(r["method"])):
        rng = row.get("rng") or "off"
        label = row["method"] if rng == "off" else f"{row['method']}, rng {rng}"
        found.setdefault(label, []).append(row)
    return found


def _place(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)


def _budget(row: dict[str, Any]) -> float:
    return row["budget"]


def _title(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "no result"
    row = rows[0]
    how = "measured" if row.get("measured_peak_bytes") is not None else "predicted"
    return (
        f"{row['model']}, {row['layers']} layers, {row['batch']} x {row['seq']}, "
        f"{row['dtype']}, {row['backend']}, {how} on {row['device']}, "
        f"torch {row['torch']}"
    )
