"""Sources of functions in a torch tree, read without importing it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import textwrap
from pathlib import Path

from ._errors import OverlayError


def function_source(text: str, name: str) -> str | None:
    """Source lines of a function or ``Class.method``, decorators included."""
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in name.split("."):
        named = [
            n
            for n in body
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part
        ]
        found = named[-1] if named else None
        body = found.body if found is not None else []
    if not isinstance(found, ast.FunctionDef):
        return None
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : found.end_lineno])


def fingerprint(source: str) -> str:
    """sha256 of a function's source text."""
    return hashlib.sha256(source.encode()).hexdigest()


def target_file(target: str, root: Path) -> Path:
    """File of the target's module under ``root``, a folder that holds ``torch``."""
    base = root.joinpath(*target.split(":")[0].split("."))
    package = base / "__init__.py"
    return package if package.exists() else base.with_suffix(".py")


def source_in_tree(target: str, root: Path) -> str | None:
    """Source of ``target`` in a torch tree, without importing it; None if absent."""
    path = target_file(target, root)
    if not path.exists():
        return None
    return function_source(path.read_text(encoding="utf-8"), target.split(":")[1])


def torch_root() -> Path:
    """The folder that holds the torch package of this process."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise OverlayError("torch is not installed; install a supported release first")
    return Path(spec.origin).parent.parent


def parameters(source: str) -> list[tuple[str, str]]:
    """Names and kinds of the parameters of a function's source."""
    (function,) = ast.parse(textwrap.dedent(source)).body
    a = function.args
    kind = inspect.Parameter
    groups = (
        (kind.POSITIONAL_ONLY, a.posonlyargs),
        (kind.POSITIONAL_OR_KEYWORD, a.args),
        (kind.VAR_POSITIONAL, [a.vararg] if a.vararg else []),
        (kind.KEYWORD_ONLY, a.kwonlyargs),
        (kind.VAR_KEYWORD, [a.kwarg] if a.kwarg else []),
    )
    return [(arg.arg, k.name) for k, args in groups for arg in args]
