"""Declare, verify, apply and revert changes to an installed torch.

A change is a :class:`Override` (a function of torch is called through ours) or a
:class:`ConfigKey` (an entry is added to one of torch's config modules).  Declaring one
touches nothing.  Verification compares sources on disk with known fingerprints and the
live objects with those sources; applying verifies everything first and undoes itself
when it cannot finish.  A module of torch that is not imported yet is bound when it is,
so that applying early imports nothing of the compiler.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TYPE_CHECKING

from . import _pins
from ._errors import OverlayError
from ._import_watch import loaded, on_import, watch
from ._sources import (
    fingerprint,
    parameters,
    source_in_tree,
    target_file,
    torch_root,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Override:
    """A function of torch and what is called in its place.

    Attributes:
        target: ``"module:function"`` or ``"module:Class.method"``.
        replacement: called as ``replacement(original, *args, **kwargs)``; a method gets
            its instance or class first.
        feature: the feature that turns it on.
        patch: the upstream pull request candidate that it belongs to.
        issue: the report that it answers.
        fingerprints: release -> sha256 of the target's source, or None where the
            release needs no such change.
        key: name of the change; the target, and the feature if another one was first.
    """

    target: str
    replacement: Callable[..., Any]
    feature: str
    patch: str
    issue: str
    fingerprints: Mapping[str, str | None]
    key: str


@dataclass(frozen=True)
class ConfigKey:
    """An entry that a feature adds to one of torch's config modules."""

    target: str
    default: Any
    value_type: type
    feature: str
    patch: str
    issue: str

    @property
    def key(self) -> str:
        return self.target


@dataclass(frozen=True)
class Status:
    """State of one change in this process; see ``torch_overlay.status``."""

    target: str
    kind: str
    feature: str
    patch: str
    issue: str
    state: str
    expected: tuple[str, ...]
    found: str | None
    detail: str


@dataclass
class _Binding:
    """An applied override: where the wrapper was put, and the switch inside it."""

    original: Any
    wrapper: Any
    active: bool = True
    # (owner, name, what stood there, what was put there)
    holders: list[tuple[Any, str, Any, Any]] = field(default_factory=list)


DECLARED: dict[str, Override | ConfigKey] = {}
LOCK = threading.RLock()
# Attribute of a wrapper that leads to its binding.
_WRAPS = "_torch_overlay_binding"
# Held while wrappers are put in place or taken away; never across an import.
_PLACING = threading.RLock()
_bindings: dict[str, _Binding] = {}


def overrides(
    target: str,
    *,
    feature: str,
    patch: str,
    issue: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the replacement of ``target``.

    The sources that it was written against are in ``pins.json``.  Several features may
    change one target; the one that is applied last is called first.

    Raises:
        OverlayError: a feature declares ``target`` twice, or it is not
            ``"module:function"``.
    """

    def declare(replacement: Callable[..., Any]) -> Callable[..., Any]:
        known = _pins.fingerprints(target)
        taken = target in DECLARED and DECLARED[target].feature != feature
        key = f"{target} ({feature})" if taken else target
        _declare(Override(target, replacement, feature, patch, issue, known, key))
        return replacement

    return declare


def adds_config(
    target: str,
    *,
    default: Any,
    value_type: type,
    feature: str,
    patch: str,
    issue: str,
) -> None:
    """Declare a new key ``"config module:name"``; the feature gives its value."""
    _declare(ConfigKey(target, default, value_type, feature, patch, issue))


def _declare(change: Override | ConfigKey) -> None:
    if change.target.count(":") != 1:
        raise OverlayError(
            f"{change.target!r} is not a target: write it as 'module:name'"
        )
    if change.key in DECLARED:
        raise OverlayError(f"{change.key} is declared twice")
    DECLARED[change.key] = change


def _owner(target: str) -> tuple[Any, str]:
    """The module or class that holds the target, and the name it has there."""
    module, path = target.split(":")
    *classes, name = path.split(".")
    owner: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in classes:
        owner = inspect.getattr_static(owner, part)
    return owner, name


def _resolve(target: str) -> Any:
    """The target's function, without binding it; None if there is none."""
    owner, name = _owner(target)
    found = inspect.getattr_static(owner, name, None)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def _live_mismatch(change: Override, root: Path) -> str:
    """Why the live function is not the one in torch's file, or an empty string."""
    if loaded(change.target.split(":")[0]) is None:
        return ""
    found = _resolve(change.target)
    function = inspect.unwrap(found) if callable(found) else None
    code = getattr(function, "__code__", None)
    if code is None:
        return "is not a plain function in this process"
    path = target_file(change.target, root)
    if Path(code.co_filename).resolve() != path.resolve():
        return (
            f"was replaced by another library (its code is in {code.co_filename}); "
            "apply the overlay first, or leave that library's change out"
        )
    return ""


def _parameter_mismatch(change: Override, source: str) -> str:
    signature = inspect.signature(change.replacement)
    ours = [(p.name, p.kind.name) for p in signature.parameters.values()]
    theirs = parameters(source)
    if ours == [("original", "POSITIONAL_OR_KEYWORD"), *theirs]:
        return ""
    return f"takes other parameters: {', '.join(name for name, _ in theirs)}"


# ---- verify ----------------------------------------------------------------------


def verify_one(change: Override | ConfigKey, release: str) -> Status:
    """State of one change: verified, applied, mismatch or not in this release."""
    if isinstance(change, ConfigKey):
        return _verify_config(change)
    state, detail, found = "verified", "", None
    known = tuple(dict.fromkeys(h for h in change.fingerprints.values() if h))
    if change.key in _bindings:
        state = "applied"
        if _bindings[change.key].wrapper is None:
            detail = "takes its place when its module is imported"
    elif release in change.fingerprints and change.fingerprints[release] is None:
        state = "not in this release"
    else:
        root = torch_root()
        source = source_in_tree(change.target, root)
        if source is None:
            state, detail = "mismatch", "does not exist in this torch"
        else:
            found = fingerprint(source)
            detail = "" if found in known else "has another source than is known"
            detail = detail or _parameter_mismatch(change, source)
            detail = detail or _live_mismatch(change, root)
            state = "mismatch" if detail else "verified"
    return Status(
        change.target,
        "function",
        change.feature,
        change.patch,
        change.issue,
        state,
        known,
        found,
        detail,
    )


def _verify_config(change: ConfigKey) -> Status:
    module, name = change.target.split(":")
    entries = getattr(importlib.import_module(module), "_config", None)
    state, detail = "verified", ""
    if change.key in _bindings:
        state = "applied"
    elif entries is None:
        state, detail = "mismatch", f"{module} is not a config module"
    elif name in entries:
        state, detail = "mismatch", f"{module} has this key already"
    return Status(
        change.target,
        "config",
        change.feature,
        change.patch,
        change.issue,
        state,
        (),
        None,
        detail,
    )


def mismatch_message(rows: Sequence[Status], version: str, releases: str) -> str:
    """One error text for all mismatches: what, expected, found, what to do."""
    lines = [
        f"torch {version} does not match this overlay (written against {releases}). "
        "Nothing was applied."
    ]
    for row in rows:
        lines.append(f"  {row.target} {row.detail}")
        if row.found is not None:
            lines.append(f"    expected sha256 {' or '.join(row.expected)}")
            lines.append(f"    found    sha256 {row.found}")
            lines.append(
                "    see the difference: python -m torch_overlay verify --diff "
                f"{row.target} --against FOLDER_WITH_A_SUPPORTED_TORCH"
            )
    lines.append("Install one of these releases, or turn the overlay off.")
    return "\n".join(lines)


# ---- apply and revert ------------------------------------------------------------


def bind(change: Override | ConfigKey, default: Any = None) -> None:
    """Put one change in place.  A second call is a no-op."""
    if change.key in _bindings:
        return
    if isinstance(change, ConfigKey):
        _bind_config(change, default)
    else:
        _bind_function(change)


def unbind(change: Override | ConfigKey) -> None:
    """Take one change back.  A call without a binding is a no-op."""
    binding = _bindings.get(change.key)
    if binding is None:
        return
    if isinstance(change, ConfigKey):
        module, name = _config_entry_place(change.target)
        module._config.pop(name, None)
        forget_config_caches(module)
        del _bindings[change.key]
        return
    with _PLACING:
        binding.active = False
        for owner, name, before, put in reversed(binding.holders):
            if vars(owner).get(name) is put:
                # Another feature's wrapper may have been taken back meanwhile.
                setattr(owner, name, _below_wrappers(before, keep_active=True))
        del _bindings[change.key]


def is_bound(target: str) -> bool:
    return target in _bindings


def get_original(target: str) -> Any:
    """The function that an applied override calls; the live one if none is applied."""
    return _below_wrappers(_resolve(target), keep_active=False)


def _bind_function(change: Override) -> None:
    binding = _bindings[change.key] = _Binding(None, None)
    module = change.target.split(":")[0]
    if loaded(module) is not None:
        with _PLACING:
            _put_wrapper(change, binding)
        return
    if module in sys.modules and module not in watch.running:
        raise OverlayError(
            f"{module} is being imported by another thread; apply the overlay before "
            "or after that"
        )

    def imported() -> None:
        with _PLACING:
            if _bindings.get(change.key) is binding:
                _put_wrapper(change, binding)

    on_import(module, imported)


def _put_wrapper(change: Override, binding: _Binding) -> None:
    original = _resolve(change.target)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # A module imported while the overlay was on keeps this wrapper after revert.
        if not binding.active:
            return original(*args, **kwargs)
        return change.replacement(original, *args, **kwargs)

    binding.original, binding.wrapper = original, wrapper
    setattr(wrapper, _WRAPS, binding)
    for owner, name, before in _holders(change.target, original):
        put = wrapper
        if isinstance(before, (staticmethod, classmethod)):
            put = type(before)(wrapper)
        binding.holders.append((owner, name, before, put))
        setattr(owner, name, put)


def _below_wrappers(held: Any, keep_active: bool) -> Any:
    """What stands below wrappers of ours, or below those that were taken back."""
    while isinstance(held, FunctionType) and _WRAPS in vars(held):
        binding = vars(held)[_WRAPS]
        if keep_active and binding.active:
            break
        held = binding.original
    return held


def _holders(target: str, original: Any) -> list[tuple[Any, str, Any]]:
    """Where torch's modules hold a function: its own place and ``from`` imports."""
    owner, name = _owner(target)
    places = [(owner, name, vars(owner)[name])]
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        places += [
            (module, alias, value)
            for alias, value in list(vars(module).items())
            if value is original and (module, alias) != (owner, name)
        ]
    return places


def _config_entry_place(target: str) -> tuple[Any, str]:
    module, name = target.split(":")
    return importlib.import_module(module), name


def _bind_config(change: ConfigKey, default: Any) -> None:
    from torch.utils._config_module import _Config, _ConfigEntry

    module, name = _config_entry_place(change.target)
    entry = _ConfigEntry(
        _Config(
            default=change.default if default is None else default,
            value_type=change.value_type,
        ),
        name,
    )
    _bindings[change.key] = _Binding(None, None)
    module._config[name] = entry
    forget_config_caches(module)


def forget_config_caches(module: Any) -> None:
    """Drop what a config module remembers of its keys, in every thread.

    The caches are context variables, so they are replaced rather than set.
    """
    for name, fresh in (
        ("_hash_dirty_var", True),
        ("_hash_cache_var", None),
        ("_get_dict_dirty_keys_var", None),
        ("_get_dict_cache_var", None),
    ):
        if name in vars(module):
            setattr(module, name, ContextVar(f"{module.__name__}{name}", default=fresh))
