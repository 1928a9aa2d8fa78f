#!/usr/bin/env python3
"""Does a recompute under an activation-memory budget draw random numbers again?

    python scripts/repro_190758.py [--overlay] [--json] [--device cuda] [--backend NAME]

Runs on any torch and needs nothing else; --overlay turns torch_overlay's "rng" feature
on first.  Every cell is the number of elements whose gradient does not belong to the
random numbers of the forward, out of 4096; 0 is right.  See pytorch/pytorch#190758 and
pytorch/pytorch#190717.

Exit code: 0 nothing is wrong, 1 something is, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

SIZE = 64
BACKENDS = ("aot_eager", "inductor")
BUDGETS = (0, 0.005, 0.1, 0.5, 0.9, 1.0)
FEW_BUDGETS = (0, 0.5, 1.0)


def programs() -> dict[str, tuple[Callable[..., Any], tuple[float, ...], bool]]:
    """Name -> (function of x, budgets, whether ``fallback_random`` is on)."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5)

    def in_checkpoint(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(dropout, x, use_reentrant=False)

    def times(noise: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        return lambda x: x * noise(x)

    found: dict[str, Any] = {
        "dropout": (dropout, BUDGETS, False),
        "dropout, fallback_random": (dropout, FEW_BUDGETS, True),
        "dropout in a checkpoint": (in_checkpoint, FEW_BUDGETS, False),
        "dropout in a checkpoint, fallback_random": (in_checkpoint, FEW_BUDGETS, True),
    }
    noises = {
        "rand_like": torch.rand_like,
        "randn_like": torch.randn_like,
        "randint": lambda x: torch.randint(1, 9, x.shape, device=x.device),
        "uniform_": lambda x: torch.empty_like(x).uniform_(1, 2),
        "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
        "randperm": lambda x: torch.randperm(x.numel(), device=x.device).view(x.shape),
        "dropout1d": lambda x: F.dropout1d(torch.ones_like(x)[None], 0.5)[0],
        "alpha_dropout": lambda x: F.alpha_dropout(torch.ones_like(x), 0.5, True),
        "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
        "poisson": lambda x: torch.poisson(torch.full_like(x, 3.0)),
    }
    for name, noise in noises.items():
        found[f"x * {name}"] = (times(noise), FEW_BUDGETS, False)
    return found


def wrong_elements(
    fn: Callable[..., Any], backend: str, budget: float, fallback: bool, device: str
) -> int:
    """Elements whose gradient does not fit the forward's numbers."""
    import torch
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    torch._dynamo.reset()
    torch.manual_seed(0)
    x = (torch.rand(SIZE, SIZE, device=device) + 0.5).requires_grad_()
    with (
        functorch_config.patch(activation_memory_budget=budget),
        inductor_config.patch(fallback_random=fallback),
    ):
        out = torch.compile(fn, backend=backend, fullgraph=True)(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    if "dropout" in getattr(fn, "__name__", "") or "checkpoint" in fn.__name__:
        return int(((out != 0) != (grad != 0)).sum())
    return int((~torch.isclose(grad, out / x)).sum())


def run(device: str, backends: list[str]) -> list[dict[str, Any]]:
    """One row per cell of the matrix."""
    return [
        {
            "program": name,
            "backend": backend,
            "budget": budget,
            "wrong": wrong_elements(fn, backend, budget, fallback, device),
        }
        for name, (fn, budgets, fallback) in programs().items()
        for backend in backends
        for budget in budgets
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = [f"{budget:g}" for budget in BUDGETS]
    print(f"{'program':<41} {'backend':<10}" + "".join(f"{h:>7}" for h in heads))
    lines: dict[tuple[str, str], dict[float, int]] = {}
    for row in rows:
        line = lines.setdefault((row["program"], row["backend"]), {})
        line[row["budget"]] = row["wrong"]
    for (name, backend), line in lines.items():
        cells = "".join(f"{line.get(b, '-'):>7}" for b in BUDGETS)
        print(f"{name:<41} {backend:<10}{cells}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overlay", action="store_true", help="with torch_overlay")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    try:
        import torch

        with contextlib.ExitStack() as stack:
            if args.overlay:
                import torch_overlay

                stack.enter_context(torch_overlay.applied("rng"))
            rows = run(args.device, args.backend or list(BACKENDS))
    except Exception as error:
        print(f"repro_190758: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    wrong = sum(row["wrong"] > 0 for row in rows)
    if args.json:
        about = {"torch": torch.__version__, "overlay": args.overlay, "cells": rows}
        print(json.dumps({**about, "device": args.device}, indent=1))
    else:
        print_table(rows)
        print(f"torch {torch.__version__}: {wrong} of {len(rows)} cells are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
