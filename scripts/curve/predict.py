"""Predict peaks without compiling a kernel.

Inductor lowers and schedules each graph up to the source of its wrapper, which is run
without a device.  Inductor's own estimate (``torch._inductor.memory``) is kept too.
"""

from __future__ import annotations

import contextlib
import copy
import time
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.memory as inductor_memory
import torch.utils._pytree as pytree
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode, tracing, TracingContext
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.symbolic_shapes import optimization_hint

from torch_overlay._functorch._activation_checkpointing.save_by_peak import (
    GENERATED_MARK,
)

from .dry_run import run_dry
from .observe import observed_partition, Prediction


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.fx as fx

    from .methods import PlanPoint


class _Emitted(BaseException):
    """Ends a lowering once its source is there; carries no error."""


@dataclass
class Lowered:
    """What Inductor makes of one graph.

    ``estimated_peak_bytes`` is its own estimate of the order that it would run;
    ``peak_bytes`` and ``results`` are what a dry run of the emitted wrapper takes and
    returns, with the names of the graph's results, and whether the caller holds each.
    """

    estimated_peak_bytes: int = 0
    peak_bytes: int = 0
    results: dict[str, tuple[Any, bool]] = field(default_factory=dict)


@contextlib.contextmanager
def _stop_after_codegen(estimates: list[int], sources: list[Any]) -> Iterator[None]:
    reorder = inductor_memory.reorder_for_peak_memory
    codegen = GraphLowering.codegen

    def estimate(
        nodes: Any,
        name_to_buf: Any,
        name_to_fused_node: Any,
        graph_inputs: Any,
        graph_outputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        order = reorder(
            nodes,
            name_to_buf,
            name_to_fused_node,
            graph_inputs,
            graph_outputs,
            *args,
            **kwargs,
        )
        freeable = inductor_memory.get_freeable_input_buf(nodes, graph_inputs)
        peak, _ = inductor_memory.estimate_peak_memory(order, freeable, graph_outputs)
        estimates.append(peak)
        return order

    def emit(graph: GraphLowering) -> Any:
        code, _ = codegen(graph)
        sources.append((code.value, {**graph.constants, **graph.torchbind_constants}))
        raise _Emitted

    with (
        mock.patch.object(inductor_memory, "reorder_for_peak_memory", estimate),
        mock.patch.object(GraphLowering, "codegen", emit),
        contextlib.suppress(_Emitted),
    ):
        yield


def _strided_as(value: object, result: object) -> object:
    """A backward's input as its forward returned it; Inductor chooses the strides."""
    if isinstance(value, torch.Tensor) and value.stride() != result.stride():
        return value.as_strided(value.shape, result.stride())
    return value


def lower(
    gm: fx.GraphModule, is_backward: bool, saved: dict[str, tuple[Any, bool]]
) -> Lowered:
    """Lower ``gm`` and run what is emitted; consumes ``gm``.

    A graph's inputs that the caller holds are not counted: those of a forward, and of a
    backward the ``saved`` ones, results of its forward, that say so.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    outputs = pytree.tree_leaves(gm.graph.output_node().args[0])
    names = [getattr(n, "name", "") for n in outputs]
    given = [saved.get(n.name, (n.meta["val"], not is_backward)) for n in placeholders]
    inputs = [n.meta["val"] for n in placeholders]
    mode = detect_fake_mode(inputs)
    with mode or contextlib.nullcontext():
        inputs = [_strided_as(v, g) for v, (g, _) in zip(inputs, given, strict=True)]
    estimates: list[int] = []
    sources: list[tuple[str, dict[str, Any]]] = []
    with (
        tracing(TracingContext(mode)),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        _stop_after_codegen(estimates, sources),
    ):
        compile_fx_inner(gm, inputs, is_backward=is_backward, static_input_idxs=[])
    if not sources:
        return Lowered()
    values, held = zip(*given, strict=True) if given else ((), ())
    peak, results, kept = run_dry(*sources[0], values, held)
    return Lowered(
        estimates[0] if estimates else 0,
        peak,
        dict(zip(names, zip(results, kept, strict=True), strict=True)),
    )


def _stand_in(value: object) -> object:
    """A real zero tensor with the layout of a fake one; sizes by their hints."""
    if isinstance(value, torch.SymInt):
        return optimization_hint(value, fallback=16)
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = (
        [optimization_hint(s, fallback=16) for s in sizes]
        for sizes in (value.shape, value.stride())
    )
    return torch.empty_strided(size, stride, dtype=value.dtype).zero_()


def _stub_compiler(gm: fx.GraphModule, _inputs: Any, **_kwargs: Any) -> Any:
    """Stands for a compiled graph: returns zeros, so that a traced program goes on."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [
        n.meta.get("val") if isinstance(n, torch.fx.Node) else n
        for n in pytree.tree_leaves(output.args[0])
    ]

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [_stand_in(v) for v in values]

    run._boxed_call = True
    return run


class _Predictor:
    """Partitions each joint graph at every point and records what it would take."""

    def __init__(
        self,
        points: Sequence[PlanPoint],
        lower: bool,
        done: Callable[[PlanPoint, Prediction | str], None],
        device: str,
    ) -> None:
        self.points = points
        self.lower = lower
        self.done = done
        self.device = device
        # By the text of a partitioned graph; equal names mean equal values.
        self.lowered: dict[str, Lowered] = {}
        self.found: dict[PlanPoint, Prediction] = {p: Prediction() for p in points}
        self.errors: dict[PlanPoint, str] = {}

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        gm.graph.eliminate_dead_code()
        if self.lower:
            gm.meta[GENERATED_MARK] = True
        lowered, settings = gm, contextlib.ExitStack()
        with settings:
            if self.device == "cuda":
                from . import pretend

                settings.enter_context(pretend.pretend_cuda())
                lowered = copy.deepcopy(gm)
                pretend.move_to_cuda(lowered)
            self.lowered.clear()
            for point in self.points:
                self._predict(lowered, inputs, kwargs, point)
        with functorch_config.patch(activation_memory_budget=1.0):
            return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def _predict(
        self, gm: fx.GraphModule, inputs: Any, kwargs: Any, point: PlanPoint
    ) -> None:
        if point in self.errors:
            return
        into = self.found[point]
        try:
            with point.settings():
                forward, backward = observed_partition(
                    copy.deepcopy(gm), inputs, kwargs, into
                )
            if self.lower:
                start = time.perf_counter()
                graphs = self._lower(forward, backward)
                spent = time.perf_counter() - start
                into.compile_seconds = (into.compile_seconds or 0.0) + spent
                into.predicted_peak_bytes = max(
                    into.predicted_peak_bytes or 0, *(g.peak_bytes for g in graphs)
                )
                into.estimated_peak_bytes = max(
                    into.estimated_peak_bytes or 0,
                    *(g.estimated_peak_bytes for g in graphs),
                )
        except Exception as error:
            self.errors[point] = f"{type(error).__name__}: {error}"
        self.done(point, self.errors.get(point, into))

    def _lower(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[Lowered, Lowered]:
        first = str(forward.graph)
        both = first + str(backward.graph)
        if first not in self.lowered:
            self.lowered[first] = lower(forward, False, {})
        saved = self.lowered[first].results
        if both not in self.lowered:
            self.lowered[both] = lower(backward, True, saved)
        return self.lowered[first], self.lowered[both]


class _Partitioner(CustomPartitionerFn):
    """Hands Inductor's joint graphs to a function."""

    def __init__(self, partition: Callable[..., Any]) -> None:
        self.partition = partition

    def uuid(self) -> None:
        return None

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return self.partition(gm, inputs, **kwargs)


def trace_joint(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    partition: Callable[..., Any],
    backend: str,
) -> None:
    """Call ``partition`` on every joint graph of ``model``; nothing is compiled.

    It gets what ``min_cut_rematerialization_partition`` gets and returns the same.
    """

    def compiler(gm: fx.GraphModule, example_inputs: Any) -> Any:
        if backend == "inductor":
            return compile_fx(gm, example_inputs, inner_compile=_stub_compiler)
        return aot_autograd(
            fw_compiler=_stub_compiler,
            bw_compiler=_stub_compiler,
            partition_fn=partition,
        )(gm, example_inputs)

    with torch._inductor.config.patch(
        custom_partitioner_fn=_Partitioner(partition),
        fx_graph_cache=False,
    ):
        torch.compile(model, backend=compiler)(**inputs)


def predict(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    points: Sequence[PlanPoint],
    backend: str,
    done: Callable[[PlanPoint, Prediction | str], None],
    device: str = "cpu",
) -> None:
    """Trace ``model`` once and predict every point; one error does not stop the rest.

    Args:
        model: returns a scalar loss from keyword ``inputs``; called once, on zeros.
        points: points with budgets; checkpointed models go with method names of their
            own at budget 1.0.
        backend: "inductor" (a dry run, its memory estimate and liveness) or "aot_eager"
            (liveness alone).
        done: called with a point and its prediction so far, or its error, as soon as
            one graph of the program is through; a program with several graphs reports
            a point once for each.
        device: "cuda" lowers for a pretend CUDA device, which need not be there.
    """
    predictor = _Predictor(points, backend == "inductor", done, device)
    with contextlib.ExitStack() as settings:
        if device == "cuda":
            from . import pretend

            settings.enter_context(pretend.traced_for_cuda())
        trace_joint(model, inputs, predictor, backend)
