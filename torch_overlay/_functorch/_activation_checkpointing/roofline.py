"""Seconds of running a node again on the device at hand, by its roofline.

A node takes as long as its FLOPs at the device's rate for the dtype or its bytes at the
device's bandwidth, whichever is longer (Williams, Waterman, Patterson 2009).  Rates are
functions of what kind of device it is, so all ranks of a job on equal devices agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .recompute_cost import FLOPS_PER_BYTE, moved_bytes, node_flops


if TYPE_CHECKING:
    import torch.fx as fx


# Dense FLOPs of a multiprocessor in a cycle by compute capability, with half-precision
# operands on tensor cores and in float32 without them: CUDA programming guide, table of
# arithmetic throughput, and the data sheets of A100, L40, H100 and B200.
_HALF_FLOPS = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}
_SINGLE_FLOPS = {(8, 0): 128, (8, 6): 256, (8, 9): 256, (9, 0): 256, (10, 0): 256}

# Without a known device: the bandwidth of an H100's data sheet, and the ratio by which
# recompute candidates are compared elsewhere.
_BYTES_PER_SECOND = 3.35e12


@dataclass(frozen=True)
class Roofline:
    """What a device does in a second.

    Attributes:
        bytes_per_second: of its memory.
        half: FLOPs with operands of two bytes.
        single: FLOPs with operands in float32.
    """

    bytes_per_second: float = _BYTES_PER_SECOND
    half: float = FLOPS_PER_BYTE * _BYTES_PER_SECOND
    single: float = FLOPS_PER_BYTE * _BYTES_PER_SECOND

    def flops_per_second(self, dtype: torch.dtype) -> float:
        if dtype.itemsize <= 2:
            return self.half
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return self.half / 2 if tf32 else self.single

    def move_seconds(self, size_bytes: int) -> float:
        """Seconds to write or read some bytes."""
        return size_bytes / self.bytes_per_second

    def seconds(self, node: fx.Node) -> float:
        """Seconds of an operator that reads and writes memory."""
        flops = node_flops(node)
        dtypes = [
            value.dtype
            for value in (n.meta.get("val") for n in node.all_input_nodes)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        rate = self.flops_per_second(dtypes[0] if dtypes else torch.float32)
        return max(flops / rate, self.move_seconds(moved_bytes(node)))


def roofline_of(device: torch.device | None) -> Roofline:
    """The roofline of a CUDA device; a fixed one for what is not known."""
    if device is None or not torch.cuda.is_available():
        return Roofline()
    found = torch.cuda.get_device_properties(device)
    kind = (found.major, found.minor)
    if kind not in _HALF_FLOPS or torch.version.hip is not None:
        return Roofline()
    # Clocks are in kHz, some drivers hide them; memory moves data twice in a cycle.
    cycles = 1e3 * found.clock_rate * found.multi_processor_count
    bandwidth = 2e3 * found.memory_clock_rate * found.memory_bus_width / 8
    if not cycles or not bandwidth:
        return Roofline()
    return Roofline(
        bytes_per_second=bandwidth,
        half=cycles * _HALF_FLOPS[kind],
        single=cycles * _SINGLE_FLOPS[kind],
    )
