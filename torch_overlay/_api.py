from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING

from . import _cache_tag, _overrides
from ._errors import MismatchError, OverlayError
from ._manifest import FEATURES, load, RELEASES
from ._overrides import DECLARED, mismatch_message, Status


if TYPE_CHECKING:
    from collections.abc import Iterator


# Features that are on, with their value; how many `applied` blocks hold each one, and
# which were turned on by `apply`.
_active: dict[str, str] = {}
_held: dict[str, int] = {}
_kept: dict[str, str] = {}


_TIERS = {"1": "correctness", "memory": "memory"}


def parse_features(spec: str) -> tuple[str, ...]:
    """Features named by a ``TORCH_OVERLAY`` text: a list with commas.

    "1" stands for all correctness features, "memory" for all memory features; what is
    also named by itself has the value given there.

    Raises:
        OverlayError: an unknown feature or value; says what is accepted.
    """
    names = [part.strip() for part in spec.split(",") if part.strip()]
    if names == ["0"]:
        return ()
    named = [name for name in names if name not in _TIERS]
    given = [_split(name)[0] for name in named]
    tiers = [_TIERS[name] for name in names if name in _TIERS]
    whole = [f.name for f in FEATURES.values() if f.tier in tiers]
    return (*(name for name in whole if name not in given), *named)


def _split(feature: str) -> tuple[str, str]:
    name, _, value = feature.partition("=")
    if name not in FEATURES:
        raise OverlayError(
            f"unknown feature {name!r}; accepted are "
            + ", ".join(sorted(FEATURES))
            + ", or, in TORCH_OVERLAY, 1 for all correctness and memory for all memory "
            "features"
        )
    values = FEATURES[name].values
    if value and value not in values:
        raise OverlayError(
            f"feature {name!r} does not take {value!r}; "
            + (f"accepted are {', '.join(values)}" if values else "it takes no value")
        )
    return name, value or (values[0] if values else "")


def _torch_release() -> tuple[str, str]:
    import torch

    return torch.__version__, torch.__version__.split("+")[0]


def status() -> list[Status]:
    """State of every declared change in this process.

    ``state`` is "verified" (fits this torch), "applied", "mismatch" (``expected`` and
    ``found`` hold the sha256 of the function's source, ``detail`` the reason) or "not
    in this release".
    """
    with _overrides.LOCK:
        load()
        _, release = _torch_release()
        return [_overrides.verify_one(c, release) for c in DECLARED.values()]


def apply(*features: str) -> None:
    """Turn features on in this process; without arguments, all correctness features.

    Everything is verified first; on any error nothing is applied.  Features that are on
    stay on, and applying one again changes nothing.  Functions that were compiled
    before keep their code until ``torch._dynamo.reset()``; a warning says so.

    Raises:
        OverlayError: an unknown feature or value, or a feature that is on with
            another value.
        MismatchError: this torch has other sources than those known.
    """
    wanted = dict(map(_split, features or parse_features("1")))
    with _overrides.LOCK:
        before = dict(_kept)
        try:
            _kept.update(wanted)
            _switch_on(wanted, warn=True)
        except BaseException:
            _kept.clear()
            _kept.update(before)
            raise


def revert(*features: str) -> None:
    """Turn features off again, all of them without arguments; exact and idempotent.

    Features that an open ``applied`` block holds stay on until it ends.

    Raises:
        OverlayError: an unknown feature.
    """
    with _overrides.LOCK:
        names = [_split(f)[0] for f in features] or list(_active)
        for name in names:
            _kept.pop(name, None)
        _switch_off([n for n in names if not _held.get(n)])


@contextlib.contextmanager
def applied(*features: str) -> Iterator[None]:
    """Features on inside the block, as before after it; for tests and A/B runs.

    Compiled functions are dropped at both ends (``torch._dynamo.reset()``), so that
    each side runs its own code.  The switch is for the process, not for the thread;
    blocks may nest and overlap.

    Raises:
        OverlayError, MismatchError: as ``apply``.
    """
    wanted = dict(map(_split, features or parse_features("1")))
    held = False
    try:
        with _overrides.LOCK:
            _held.update({n: _held.get(n, 0) + 1 for n in wanted})
            held = True
            _switch_on(wanted, warn=False)
        _reset_compiled()
        yield
    finally:
        with _overrides.LOCK:
            if held:
                _held.update({n: _held[n] - 1 for n in wanted})
            _switch_off([n for n in wanted if not _held.get(n) and n not in _kept])
        _reset_compiled()


def _compiled_anything() -> bool:
    convert = sys.modules.get("torch._dynamo.convert_frame")
    return convert is not None and len(convert.output_codes.seen) > 0


def _reset_compiled() -> None:
    if _compiled_anything():
        sys.modules["torch._dynamo"].reset()


def _switch_on(wanted: dict[str, str], warn: bool) -> None:
    for name, value in wanted.items():
        if _active.get(name, value) != value:
            raise OverlayError(
                f"feature {name!r} is on with {_active[name]!r}; revert it before "
                f"applying it with {value!r}, or set {FEATURES[name].config}"
            )
    new = {n: v for n, v in wanted.items() if n not in _active}
    if not new:
        return
    load()
    version, release = _torch_release()
    changes = [c for c in DECLARED.values() if c.feature in new]
    rows = [_overrides.verify_one(c, release) for c in changes]
    bad = [r for r in rows if r.state == "mismatch"]
    if bad:
        raise MismatchError(mismatch_message(bad, version, ", ".join(RELEASES)))
    if warn and _compiled_anything():
        warnings.warn(
            "torch_overlay: functions compiled before apply() keep plain torch's code; "
            "call torch._dynamo.reset() to compile them again with the overlay",
            stacklevel=3,
        )
    here = {r.target for r in rows if r.state != "not in this release"}
    todo = [c for c in changes if c.target in here]
    try:
        for change in todo:
            chosen = FEATURES[change.feature].config == change.target
            _overrides.bind(change, new[change.feature] if chosen else None)
        _cache_tag.set_tag(_tag_names({**_active, **new}))
        _active.update(new)
    except BaseException:
        for change in reversed(todo):
            _overrides.unbind(change)
        for name in new:
            _active.pop(name, None)
        _cache_tag.set_tag(_tag_names(_active))
        raise


def _switch_off(names: list[str]) -> None:
    off = [n for n in names if n in _active]
    if not off:
        return
    for change in reversed(DECLARED.values()):
        if change.feature in off:
            _overrides.unbind(change)
    for name in off:
        del _active[name]
    _cache_tag.set_tag(_tag_names(_active))


def _tag_names(active: dict[str, str]) -> list[str]:
    return [f"{n}={v}" for n, v in active.items()]
