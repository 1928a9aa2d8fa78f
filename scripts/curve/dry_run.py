"""Runs the code that Inductor emits for a graph without a device and counts bytes.

Every allocation, reuse and release of the wrapper happens, on tensors without memory;
kernels do nothing.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._inductor.async_compile
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class _Kernels:
    """Stands for ``AsyncCompile`` and for all that it compiles."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self if name == "run" else lambda *args, **kwargs: _Kernels()


def _scratch_bytes(func: Any, args: Sequence[Any]) -> int:
    """What a kernel allocates for itself: memory-efficient attention's backward.

    A sum per query, and for each block of 64 by 64 of the query's gradient the block
    and four words.
    """
    aten = torch.ops.aten
    if func is not aten._scaled_dot_product_efficient_attention_backward.default:
        return 0
    batch, heads, queries, size = args[1].shape
    blocks = batch * heads * -(-queries // 64) * -(-size // 64)
    return 4 * batch * heads * queries + blocks * (4 * 64 * 64 + 16)


class _LiveBytes(TorchDispatchMode):
    """Adds up storages from the operator that makes them to their last tensor's end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def count(self, value: object, size: int | None = None) -> None:
        """Count the storage of a tensor from now on, as ``size`` bytes if given."""
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if size is None else size
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key).atexit = False

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        pytree.tree_map(self.count, result)
        self.peak = max(self.peak, self.live + _scratch_bytes(func, args))
        return result


def _allocator(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _nothing(*args: Any) -> None:
    pass


# Names of a wrapper's module that need real memory or check it.
_REPLACED: dict[str, Any] = {
    "empty_strided_cpu": _allocator("cpu"),
    "empty_strided_cuda": _allocator("cuda"),
    "reinterpret_tensor": lambda t, size, stride, offset=0: torch.as_strided(
        t, size, stride, offset
    ),
    "copy_if_misaligned": lambda t: t,
    "get_raw_stream": lambda device: 0,
    "assert_size_stride": _nothing,
    "assert_size_stride_grouped": _nothing,
    "assert_alignment": _nothing,
}


@contextlib.contextmanager
def _without_device() -> Iterator[None]:
    with (
        mock.patch.object(torch._inductor.async_compile, "AsyncCompile", _Kernels),
        mock.patch.object(torch.cuda, "_DeviceGuard", mock.MagicMock()),
        mock.patch.object(torch.cuda, "set_device", _nothing),
    ):
        yield


def _twins(values: Sequence[Any]) -> list[Any]:
    """Values like these, tensors without memory; what shares a storage goes on to."""
    bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.SymInt):
            value = optimization_hint(value, fallback=16)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            kind = {"dtype": value.dtype, "device": value.device}
            if (storage._cdata, value.dtype) not in bases:
                length = optimization_hint(storage.nbytes(), fallback=16)
                base = torch.empty(length // value.dtype.itemsize, **kind)
                bases[storage._cdata, value.dtype] = base
            place = (value.shape, value.stride(), (value.storage_offset(),))
            size, stride, (offset,) = (
                [optimization_hint(n, fallback=16) for n in part] for part in place
            )
            value = bases[storage._cdata, value.dtype].as_strided(size, stride, offset)
        found.append(value)
    return found


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def run_dry(
    source: str,
    constants: dict[str, Any],
    inputs: Sequence[Any],
    held: Sequence[bool],
) -> tuple[int, list[Any], list[bool]]:
    """Run a wrapper and watch what is live.

    Args:
        source: Python source of the wrapper of one graph.
        constants: what it finds in its module besides.
        inputs: tensors, which may be fake, and numbers.
        held: which inputs the caller keeps.  They are not counted, the others are
            until the wrapper drops them.

    Returns:
        The peak in bytes, the results, and which results are inputs that are held.
    """
    module = types.ModuleType("emitted")
    with FakeTensorMode(allow_non_fake_inputs=True), _without_device():
        args = _twins(inputs)
        kept = [a for a, keep in zip(args, held, strict=True) if keep]
        with _LiveBytes() as seen:
            for value in kept:
                seen.count(value, 0)
            for value in args:
                seen.count(value)
            del value
            exec(compile(source, "<emitted>", "exec"), vars(module))
            vars(module).update(_REPLACED)
            vars(module).update(constants)
            results = list(module.call(args))
    of_caller = OrderedSet(_storage(value) for value in kept)
    return seen.peak, results, [_storage(value) in of_caller for value in results]
