"""What a partition saves, recomputes and holds: fields of a row that need no run."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING
from unittest import mock

from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._ordered_set import OrderedSet

from torch_overlay._functorch._activation_checkpointing import (
    save_by_peak,
    use_site_remat,
)
from torch_overlay._functorch._activation_checkpointing.graph_storage import (
    graph_storages,
)
from torch_overlay._functorch._activation_checkpointing.joint_peak import peak_bytes
from torch_overlay._functorch._activation_checkpointing.joint_schedule import (
    joint_schedule,
)
from torch_overlay._functorch._activation_checkpointing.recompute_cost import (
    node_flops,
)
from torch_overlay._functorch._activation_checkpointing.region_inputs import (
    inputs_of_a_region,
)
from torch_overlay._functorch._activation_checkpointing.roofline import Roofline
from torch_overlay._functorch._activation_checkpointing.saved_set import (
    recompute_seconds,
)


if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.fx as fx


@dataclass
class Prediction:
    """Sums and maxima over the graphs of one program, in bytes, FLOPs and seconds."""

    saved_bytes: int = 0
    model_peak_bytes: int | None = None
    lowest_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    estimated_peak_bytes: int | None = None
    liveness_peak_bytes: int = 0
    recompute_flops: int = 0
    recompute_seconds: float = 0.0
    plan_seconds: float = 0.0
    compile_seconds: float | None = None


@contextlib.contextmanager
def watch_passes(into: Prediction) -> Iterator[None]:
    """Add the time of planning and of use-site remat, and what the plan says."""
    planned, remat = save_by_peak.plan_saved_set, use_site_remat.use_site_remat

    def plan_saved_set(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        schedule, plan = planned(*args, **options)
        into.plan_seconds += time.perf_counter() - start
        into.lowest_peak_bytes = max(into.lowest_peak_bytes or 0, plan.lowest_bytes)
        return schedule, plan

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = remat(*args, **options)
        into.plan_seconds += time.perf_counter() - start
        return result

    with (
        mock.patch.object(save_by_peak, "plan_saved_set", plan_saved_set),
        mock.patch.object(use_site_remat, "use_site_remat", timed),
    ):
        yield


@contextlib.contextmanager
def model_peaks(joint: fx.GraphModule, into: Prediction) -> Iterator[None]:
    """Add the model's peak and work of every saved set that is chosen, planned or not.

    Only of the outermost choice: a planner asks for plain torch's too.
    """
    choose, depth = partitioners.choose_saved_values_set, 0
    generated = save_by_peak.GENERATED_MARK in joint.meta

    def chosen(graph: fx.Graph, info: Any, *args: Any, **options: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            saved = choose(graph, info, *args, **options)
        finally:
            depth -= 1
        if not depth:
            dropped = OrderedSet(inputs_of_a_region(graph, info))
            s = joint_schedule(graph, info, dropped, generated)
            values = s.values_of(s.number[n] for n in saved)
            peak = peak_bytes(s, values)
            into.model_peak_bytes = max(into.model_peak_bytes or 0, peak)
            seconds = recompute_seconds(s, Roofline())
            into.recompute_seconds += sum(
                seconds[i] for i in s.emitted(s.backward, values)
            )
        return saved

    with mock.patch.object(partitioners, "choose_saved_values_set", chosen):
        yield


def _flops(graph: fx.Graph) -> int:
    return sum(node_flops(n) for n in graph.nodes if n.op == "call_function")


def _saved_bytes(backward: fx.Graph) -> int:
    """Bytes that the forward hands to the backward, parameters and tangents apart."""
    storages = graph_storages(backward)
    saved: dict[int, int] = {}
    for node in backward.find_nodes(op="placeholder"):
        if not node.name.startswith(("primals", "tangents")):
            saved.update((v, storages.size_bytes[v]) for v in storages.of_node[node])
    return sum(saved.values())


def observed_partition(
    joint: fx.GraphModule, inputs: Any, kwargs: dict[str, Any], into: Prediction
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition ``joint`` as configured and add what is seen to ``into``."""
    with watch_passes(into), model_peaks(joint, into):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    into.saved_bytes += _saved_bytes(backward.graph)
    into.recompute_flops += (
        _flops(forward.graph) + _flops(backward.graph) - _flops(joint.graph)
    )
    into.liveness_peak_bytes = max(
        into.liveness_peak_bytes,
        use_site_remat.live_peak_bytes(forward.graph),
        use_site_remat.live_peak_bytes(backward.graph),
    )
    return forward, backward


class ObservingPartitioner(CustomPartitionerFn):
    """Inductor's own partition, observed: graphs and results are the same."""

    def __init__(self, into: Prediction) -> None:
        self.into = into

    def uuid(self) -> str:
        return "the partition of min_cut_rematerialization_partition"

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return observed_partition(gm, inputs, kwargs, self.into)
