#!/usr/bin/env python3
"""Time Inductor's random kernels on a CUDA device, draw by draw.

    python scripts/bench_rand.py --out docs/results/h200-bench-rand.json

Every kernel is the one that torch.compile makes of a small function of bfloat16 tensors
with 2**28 elements (--log2-elements).  Draws: "copy" does not draw, "scalar" calls
Philox for each element (what torch 2.15 does), "rand4x" is the path of torch 2.13 and
2.14 that pytorch/pytorch#198333 reports, "words" and "quads" are torch_overlay's.
Times are medians of 20 runs by CUDA events, in which the draws take turns; GB/s counts
what a kernel has to read and to write.  The plot goes beside the rows as PNG.

Exit code: 0 done, 1 a kernel failed (its row carries the error), 2 it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import types
import warnings
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch_overlay


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWS = ("copy", "scalar", "rand4x", "words", "quads")
RUNS, WARM_UPS = 20, 5


def kernels(size: int) -> dict[str, tuple[Callable, Callable, tuple[int, int]]]:
    """Name -> (function that draws, the same without the draw, shape)."""
    rows = 2 ** (size // 2)
    even, odd = (rows, 2**size // rows), (rows - 1, 2**size // rows + 1)
    rate = 0.5

    def layer_norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:])

    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, rate)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous()

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    short = (2**size // 1024, 1024)
    return {
        "1-D": (drop, twice, even),
        "1-D, odd sizes": (drop, twice, odd),
        "tiled": (lambda x: drop(turn(x)), turn, even),
        "tiled, odd sizes": (lambda x: drop(turn(x)), turn, odd),
        "softmax": (lambda x: drop(softmax(x)), softmax, short),
        "layer norm": (lambda x: drop(layer_norm(x)), layer_norm, short),
        "randn": (lambda x: x + torch.randn_like(x), twice, even),
    }


def has_rand4x() -> bool:
    """Whether this torch has the faulty path and uses it."""
    from torch._inductor.codegen.triton import TritonOverrides

    return hasattr(TritonOverrides, "_can_use_4x_random") and getattr(
        inductor_config, "use_rand4x", True
    )


@contextlib.contextmanager
def drawing(draw: str) -> Iterator[None]:
    """Compile with one of DRAWS."""
    from torch._inductor.codegen.triton import TritonOverrides

    if draw == "scalar" and has_rand4x():
        never = staticmethod(lambda: False)
        with mock.patch.object(TritonOverrides, "_can_use_4x_random", never):
            yield
    elif draw in ("words", "quads"):
        # Not applied(), which would drop what was compiled for the other draws.
        torch_overlay.apply(f"rand4x={draw}")
        try:
            yield
        finally:
            torch_overlay.revert("rand4x")
    else:
        yield


def twin(fn: Callable, draw: str) -> Callable:
    """``fn`` with a code object of its own: torch.compile keeps one cache for each."""
    code = fn.__code__.replace(co_name=f"{fn.__name__}_{draw}")
    return types.FunctionType(code, fn.__globals__, draw, None, fn.__closure__)


def compile_all(
    draws: dict[str, Callable], x: torch.Tensor, dynamic: bool, autotune: bool
) -> dict[str, Callable | str]:
    """Compiled function, or the error, by draw."""
    found: dict[str, Callable | str] = {}
    options = {"force_disable_caches": True, "max_autotune_pointwise": autotune}
    torch._dynamo.reset()
    for draw, fn in draws.items():
        compiled = torch.compile(twin(fn, draw), fullgraph=True, dynamic=dynamic)
        try:
            with drawing(draw), inductor_config.patch(options):
                for _ in range(WARM_UPS):
                    compiled(x)
            found[draw] = compiled
        except Exception as error:
            found[draw] = f"{type(error).__name__}: {error}"[:300]
    return found


def one_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(
    draws: dict[str, Callable], shape: tuple[int, int], dynamic: bool, autotune: bool
) -> Iterator[dict[str, Any]]:
    """A row for each draw; runs of the draws take turns."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = compile_all(draws, x, dynamic, autotune)
        times: dict[str, list[float]] = {draw: [] for draw in draws}
        for _ in range(RUNS):
            for draw, fn in compiled.items():
                if not isinstance(fn, str):
                    fn(x)
                    times[draw].append(one_ms(lambda f=fn: f(x)))
    medians = {d: statistics.median(t) if t else None for d, t in times.items()}
    for draw, ms in medians.items():
        error = compiled[draw] if isinstance(compiled[draw], str) else None
        copy = medians["copy"]
        yield {
            "draw": draw,
            "ms": ms,
            "gbps": 2 * x.nbytes / ms / 1e6 if ms else None,
            "ratio_to_copy": ms / copy if ms and copy else None,
            "error": error,
        }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((r["kernel"], r["shapes"]) for r in rows))
    figure, axes = pyplot.subplots(figsize=(12, 5))
    shown = [d for d in DRAWS if d != "copy"]
    for i, draw in enumerate(shown):
        at = {(r["kernel"], r["shapes"]): r for r in rows if r["draw"] == draw}
        places = [k + (i - 1.5) * 0.2 for k, kind in enumerate(kinds) if kind in at]
        heights = [at[kind]["ratio_to_copy"] or 0 for kind in kinds if kind in at]
        axes.bar(places, heights, 0.2, label=draw)
    axes.axhline(1, color="gray", linewidth=1)
    labels = [f"{kernel}\n{shapes}" for kernel, shapes in kinds]
    axes.set_xticks(range(len(kinds)), labels, fontsize=7)
    axes.set_ylabel("time, as a multiple of the kernel without a draw")
    axes.legend()
    axes.set_title(f"{rows[0]['machine']}, torch {rows[0]['torch']}, bfloat16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench-rand.json"))
    parser.add_argument("--log2-elements", type=int, default=28)
    parser.add_argument(
        "--autotune", action="store_true", help="let Inductor try block sizes"
    )
    parser.add_argument("--kernel", action="append", help="only these kernels")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_rand: this torch sees no CUDA device", file=sys.stderr)
        return 2
    wanted = kernels(args.log2_elements)
    unknown = [k for k in args.kernel or () if k not in wanted]
    if unknown:
        parser.error(f"unknown kernel {unknown[0]!r}; accepted are {list(wanted)}")
    import triton

    about = {
        "elements": 2**args.log2_elements,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "autotuned": args.autotune,
        "machine": torch.cuda.get_device_name(),
        "command": shlex.join(["python", "scripts/bench_rand.py", *sys.argv[1:]]),
    }
    rows: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.kernel or wanted:
        draws, copies, shape = wanted[name]
        used = [d for d in DRAWS if d != "rand4x" or has_rand4x()]
        by_draw = {d: copies if d == "copy" else draws for d in used}
        for dynamic in (False, True):
            shapes = "dynamic" if dynamic else "static"
            for found in measure(by_draw, shape, dynamic, args.autotune):
                rows.append({"kernel": name, "shapes": shapes, **found, **about})
                numbers = [found[k] or 0 for k in ("ms", "gbps", "ratio_to_copy")]
                print(
                    f"{name:<18} {shapes:<8} {found['draw']:<7}"
                    + "{:9.3f} ms {:7.0f} GB/s {:6.2f}x copy".format(*numbers)
                    + f" {found['error'] or ''}",
                    flush=True,
                )
            args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    plot(rows, args.out.with_suffix(".png"))
    return 1 if any(r["error"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
