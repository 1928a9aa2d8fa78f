"""Every overlay change and every new module belongs to exactly one patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay import _manifest
from torch_overlay._overrides import DECLARED

from .series import PATCHES, read_series, read_source
from .trees import ROOT


if TYPE_CHECKING:
    from pathlib import Path


MIRRORS = ("torch_overlay/_functorch", "torch_overlay/_inductor")


def new_modules(project: Path = ROOT) -> list[str]:
    """Modules that go upstream as files: all but packages and override modules."""
    overrides = {name.replace(".", "/") + ".py" for name in _manifest.OVERLAY_MODULES}
    found = [
        path.relative_to(project).as_posix()
        for mirror in MIRRORS
        for path in sorted((project / mirror).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    return [path for path in found if path not in overrides]


def coverage_problems(folder: Path = PATCHES, project: Path = ROOT) -> list[str]:
    """One line for each change or module that is in no patch, or in two."""
    names = read_series(folder)
    owner: dict[str, str] = {}
    problems = []
    for name in names:
        for path in read_source(name, folder).modules:
            if path in owner:
                problems.append(f"{path} is in both {owner[path]} and {name}")
            owner[path] = name
    problems += [
        f"{path} is in no patch: add it to the Modules of one in patches/src"
        for path in new_modules(project)
        if path not in owner
    ]
    _manifest.load()
    problems += [
        f"{change.target} belongs to the patch {change.patch!r}, which is not in "
        "patches/series"
        for change in DECLARED.values()
        if change.patch not in names
    ]
    return problems
