"""Measure one point on a CUDA device: peak, step time, gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from filelock import FileLock

from . import models
from .methods import BUDGET_METHODS, use_checkpointing
from .observe import ObservingPartitioner, Prediction


if TYPE_CHECKING:
    from collections.abc import Callable

    from .methods import PlanPoint


PEAK_REPEATS = 3
TIMED_STEPS = 20
WARM_UP_STEPS = 3
SEED = 197838


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def relative_l2(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Relative L2 distance of all gradients together, in double precision."""
    pairs = zip(got, want, strict=True)
    off = sum((g.double() - w.double()).square().sum().item() for g, w in pairs)
    norm = sum(w.double().square().sum().item() for w in want)
    return (off / norm) ** 0.5


def _step(run: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    run(**inputs).backward()


def _reference(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    dropout: bool,
    backend: str,
    path: str,
) -> list[torch.Tensor]:
    """Gradients of eager, or of budget 1.0 where a seed draws other masks compiled.

    The first worker of a run leaves them at ``path`` for the others.
    """
    with FileLock(f"{path}.lock"):
        if Path(path).exists():
            return torch.load(path)
        run = torch.compile(model, backend=backend) if dropout else model
        torch.manual_seed(SEED)
        with functorch_config.patch(activation_memory_budget=1.0):
            _step(run, inputs)
        found = [g.cpu() for g in _gradients(model)]
        torch.save(found, path)
    model.zero_grad(set_to_none=False)
    torch._dynamo.reset()
    return found


def _peak_bytes(run: Callable[[], None], model: torch.nn.Module) -> tuple[int, int]:
    """Median peaks of a step: without what is resident before it, and all of it."""
    peaks, totals = [], []
    for _ in range(PEAK_REPEATS):
        model.zero_grad(set_to_none=False)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        totals.append(torch.cuda.max_memory_allocated())
        peaks.append(totals[-1] - resident)
    return int(statistics.median(peaks)), int(statistics.median(totals))


def _step_ms(run: Callable[[], None]) -> tuple[float, float]:
    times = []
    for _ in range(TIMED_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), min(times)


def measure(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    point: PlanPoint,
    backend: str,
    lock: str,
    reference_path: str,
    optimizer: str | None = None,
) -> dict[str, Any]:
    """Train a step on CUDA and return the measured fields of a row.

    Parameters, gradients and inputs are resident before a step and are not part of the
    peak.  With an optimizer a step is a whole one: gradients are made anew, and the
    optimizer's state is resident, also when the step is compiled.  The lock is held
    while anything is timed or measured.
    """
    device, method = torch.device("cuda"), point.method
    model, inputs = model.to(device), {k: v.to(device) for k, v in inputs.items()}
    # Some machines carry a cuDNN older than this torch was built for.
    torch.backends.cuda.enable_cudnn_sdp(False)
    dropout = models.has_dropout(model)
    reference = _reference(model, inputs, dropout, backend, reference_path)
    if method not in (*BUDGET_METHODS, "eager"):
        use_checkpointing(model, method)
    compiled = model if method == "eager" else torch.compile(model, backend=backend)
    seen = Prediction()
    settings = contextlib.ExitStack()
    settings.enter_context(point.settings())
    if backend == "inductor":
        observer = ObservingPartitioner(seen)
        settings.enter_context(inductor_config.patch(custom_partitioner_fn=observer))

    update = None
    if optimizer is not None:
        update = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update.step()
        update.zero_grad(set_to_none=True)

    def run() -> None:
        _step(compiled, inputs)
        if update is not None and stepping:
            update.step()
            update.zero_grad(set_to_none=True)

    stepping = False
    with settings:
        start = time.perf_counter()
        torch.manual_seed(SEED)
        run()
        torch.cuda.synchronize()
        compile_seconds = time.perf_counter() - start
        error = relative_l2([g.cpu() for g in _gradients(model)], reference)
        stepping = True
        with FileLock(lock):
            for _ in range(WARM_UP_STEPS):
                run()
            peak, total = _peak_bytes(run, model)
            median, fastest = _step_ms(run)
    plan = {k: v for k, v in dataclasses.asdict(seen).items() if v is not None}
    observed = plan if seen.liveness_peak_bytes else {}
    return {
        **observed,
        "measured_peak_bytes": peak,
        "total_peak_bytes": total,
        "step_ms": median,
        "step_ms_min": fastest,
        "compile_seconds": compile_seconds,
        "grad_rel_err": error,
    }
