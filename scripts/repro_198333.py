#!/usr/bin/env python3
"""Do Triton kernels of different shapes draw the same random numbers?

    python scripts/repro_198333.py [--overlay] [--json] [--interpreter]

Runs on any torch with Triton; --overlay turns torch_overlay's "rand4x" and "rng"
features on first.  On a CUDA device the programs are trained end to end.  Without one
(or with --interpreter) the kernels that Inductor generates for one are run in Triton's
interpreter.  See pytorch/pytorch#198333.

"neighbours equal" is the share of elements that equal the next one of the logical
order; 0 is right up to chance.  "masks agree" is the share of elements on which forward
and backward drop the same; 1 is right, and p * p + (1 - p) * (1 - p) is what masks that
have nothing to do with each other give.

Exit code: 0 nothing is wrong, 1 something is, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

RATES = (0.1, 0.25, 0.5, 0.75, 0.9)
CHANCE = 1e-3


def row(
    what: str, measured: str, value: float, right: float, wrong: float
) -> dict[str, Any]:
    """A result; ``wrong`` is the value that unrelated numbers would give."""
    bad = abs(value - right) > CHANCE
    return {
        "what": what,
        "measured": measured,
        "value": value,
        "right": right,
        "independent": wrong,
        "bad": bad,
    }


def unrelated(p: float) -> float:
    return p * p + (1 - p) * (1 - p)


# ---- without a GPU ---------------------------------------------------------------


def interpret() -> list[dict[str, Any]]:
    """Both symptoms on generated kernels, in Triton's interpreter."""
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here.parent / "test" / "inductor"))
    import torch
    from pretend_cuda import interpreted, layout, triton_code

    def run(fn: Callable[..., Any], *likes: Any, **options: Any) -> torch.Tensor:
        code = triton_code(fn, *likes, **options)
        blocks = {"XBLOCK": 16, "YBLOCK": 8, "ZBLOCK": 2, "R0_BLOCK": 64}
        zeros = [torch.empty_strided(t.shape, t.stride()).zero_() for t in likes]
        torch.manual_seed(0)
        return interpreted(code, **blocks)(zeros)[0]

    def add(*tensors: torch.Tensor) -> torch.Tensor:
        # The output has the layout of the first tensor.
        total = tensors[0] + torch.rand(32, 64, device=tensors[0].device)
        return total + tensors[1] if len(tensors) > 1 else total

    plain = layout(32, 64)
    turned = layout(32, 64, stride=(1, 32))
    options = {"triton.max_tiles": 1}
    strided = run(lambda x: add(x), turned, **options)
    equal = float((strided[:, :-1] == strided[:, 1:]).float().mean())
    rows = [row("strided 1-D kernel", "neighbours equal", equal, 0.0, 0.0)]
    values = run(lambda x: add(x), plain)
    for name, other in (
        ("1-D and tiled kernel", run(lambda x, y: add(x, y), plain, turned)),
        ("1-D and strided kernel", strided),
    ):
        for p in RATES:
            agree = float(((values > p) == (other > p)).float().mean())
            rows.append(row(f"{name}, p={p}", "masks agree", agree, 1, unrelated(p)))
    most = run(lambda x: add(x).amax(-1), plain)
    same = float((most == values.amax(-1)).float().mean())
    rows.append(row("1-D kernel and reduction", "row maxima agree", same, 1, 0))
    return rows


# ---- on a GPU --------------------------------------------------------------------


@contextlib.contextmanager
def compiled_afresh() -> Iterator[None]:
    import torch

    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def mask_agreement(
    fn: Callable[..., torch.Tensor], x: torch.Tensor, budget: float = 1.0
) -> float:
    """Share of elements that forward and backward treat the same; x is positive."""
    import torch
    import torch._functorch.config as functorch_config

    x = x.detach().requires_grad_()
    with compiled_afresh(), functorch_config.patch(activation_memory_budget=budget):
        out = torch.compile(fn, fullgraph=True)(x)
        (grad,) = torch.autograd.grad(out.float().sum(), x)
    back = grad if out.shape == grad.shape else grad.transpose(1, 2)
    return float(((out != 0) == (back != 0)).float().mean())


def train() -> list[dict[str, Any]]:
    """Both symptoms end to end on CUDA."""
    import torch
    import torch._inductor.config as inductor_config
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(8, 64, 4096, device="cuda", dtype=dtype)
        for p in RATES if dtype == torch.float32 else (0.5,):

            def turned(x: torch.Tensor, p: float = p) -> torch.Tensor:
                return F.dropout(x.transpose(1, 2).contiguous(), p)

            def in_checkpoint(x: torch.Tensor, p: float = p) -> torch.Tensor:
                return checkpoint(turned, x, p, use_reentrant=False)

            def deep(x: torch.Tensor, p: float = p) -> torch.Tensor:
                # cos is positive here, and gives the budget something to recompute
                return F.dropout((x.transpose(1, 2).contiguous() * 0.5).cos(), p)

            name = f"{str(dtype).removeprefix('torch.')}, p={p}"
            for what, fn, budget in (
                ("plain", turned, 1.0),
                ("checkpointed", in_checkpoint, 1.0),
                ("budget 0.5", deep, 0.5),
                ("budget 0", deep, 0.0),
            ):
                agree = mask_agreement(fn, x, budget)
                what = f"dropout of a transpose, {what}, {name}"
                rows.append(row(what, "masks agree", agree, 1, unrelated(p)))

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, device=x.device)

    for dynamic in (False, True):
        x = torch.empty_strided((4096, 4096), (1, 4096), device="cuda").zero_()
        one = {"triton.max_tiles": 1}
        with compiled_afresh(), inductor_config.patch(one):
            y = torch.compile(strided, fullgraph=True, dynamic=dynamic)(x)
        equal = float((y[:, :-1] == y[:, 1:]).float().mean())
        what = "strided 1-D kernel" + (", dynamic sizes" if dynamic else "")
        rows.append(row(what, "neighbours equal", equal, 0.0, 0.0))

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def row_maxima(x: torch.Tensor) -> torch.Tensor:
        return drawn(x).amax(-1)

    x = torch.zeros(4096, 4096, device="cuda")
    found = []
    for fn in (row_maxima, drawn):
        with compiled_afresh():
            torch.manual_seed(0)
            found.append(torch.compile(fn, fullgraph=True)(x))
    same = float((found[0] == found[1].amax(-1)).float().mean())
    rows.append(row("1-D kernel and reduction", "row maxima agree", same, 1, 0))
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(r["what"]) for r in rows)
    print(f"{'':{width}}  {'measured':<17} {'value':>7} {'right':>6} {'unrelated':>9}")
    for r in rows:
        mark = "  WRONG" if r["bad"] else ""
        print(
            f"{r['what']:{width}}  {r['measured']:<17} {r['value']:7.4f} "
            f"{r['right']:6.1f} {r['independent']:9.4f}{mark}"
        )


def main(argv: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overlay", action="store_true", help="with torch_overlay")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--interpreter", action="store_true", help="leave a GPU alone")
    args = parser.parse_args(given)
    warnings.simplefilter("ignore")
    try:
        import torch
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            raise RuntimeError("this torch has no Triton; install a CUDA build")
        on_gpu = torch.cuda.is_available() and not args.interpreter
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            # Triton asks for it when it is imported.
            env = {**os.environ, "TRITON_INTERPRET": "1"}
            return subprocess.call([sys.executable, __file__, *given], env=env)
        with contextlib.ExitStack() as stack:
            if args.overlay:
                import torch_overlay

                stack.enter_context(torch_overlay.applied("rand4x", "rng"))
            rows = train() if on_gpu else interpret()
    except Exception as error:
        print(f"repro_198333: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    wrong = sum(r["bad"] for r in rows)
    where = torch.cuda.get_device_name() if on_gpu else "Triton's interpreter"
    if args.json:
        about = {"torch": torch.__version__, "overlay": args.overlay, "where": where}
        print(json.dumps({**about, "results": rows}, indent=1))
    else:
        print_table(rows)
        print(f"torch {torch.__version__}, {where}: {wrong} of {len(rows)} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
