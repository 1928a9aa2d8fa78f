"""The patch queue's sources and its patches.

``patches/series`` names the patches in order.  Of each, ``patches/src/NAME.msg`` is
written by hand (a mail: headers, then the pull request's text), and so is
``patches/src/NAME.diff`` with the hook hunks, which carry only as much context as a
reader needs; ``@@ function`` or ``@@ Class.method`` says where they go.  Hunks that
only one release needs are in ``NAME.RELEASE.diff``.  Headers:

    Subject: [Component] Imperative
    Needs: patches of the series that it builds on, if any
    Modules: overlay modules that upstream gets as new files, one a line
    Tests: tests that go along, at the path that they have here
"""

from __future__ import annotations

import ast
import email
import email.policy
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .hunks import (
    apply_hunks,
    DiffError,
    file_diff_text,
    FileDiff,
    find_all,
    Hunk,
    new_file_diff,
    parse_diff,
)
from .trees import ROOT, TreeError


if TYPE_CHECKING:
    from .trees import Tree


PATCHES = ROOT / "patches"
AUTHOR = "torch_overlay <torch_overlay@users.noreply.invalid>"
# The line by which git and mail readers know the start of a mail; no date, no id.
MAIL_START = f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
ONLY_HERE = "# overlay only"


class SeriesError(ValueError):
    """The queue's sources contradict each other or the tree."""


@dataclass(frozen=True)
class Source:
    """What one patch is made from; modules and tests are paths in this project."""

    name: str
    subject: str
    body: str
    needs: tuple[str, ...]
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    hooks: tuple[FileDiff, ...]


def read_series(folder: Path = PATCHES) -> list[str]:
    """Names of the patches in order; comments and blank lines are skipped."""
    path = folder / "series"
    if not path.is_file():
        raise SeriesError(f"{path} is missing; restore it from the repository")
    lines = [
        line.split("#")[0].strip()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [line.removesuffix(".patch") for line in lines if line]


def read_source(
    name: str, folder: Path = PATCHES, release: str | None = None
) -> Source:
    """A patch's source, with the hunks that only ``release`` needs."""
    path = folder / "src" / f"{name}.msg"
    if not path.is_file():
        raise SeriesError(f"{name} is in patches/series but {path} is missing")
    mail = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
    subject = str(mail.get("Subject", "")).strip()
    body = str(mail.get_payload()).strip()
    if not re.match(r"\[[^]]+\] \S", subject):
        raise SeriesError(f"{path}: the subject must read '[Component] imperative'")
    if not re.search(r"^Fixes #\d+", body, re.M):
        raise SeriesError(f"{path}: the text must say 'Fixes #N'")
    hooks: dict[str, FileDiff] = {}
    for file in (f"{name}.diff", f"{name}.{release}.diff"):
        if (folder / "src" / file).is_file():
            text = (folder / "src" / file).read_text(encoding="utf-8")
            for diff in parse_diff(text):
                known = hooks.get(diff.path)
                hunks = (*(known.hunks if known else ()), *diff.hunks)
                hooks[diff.path] = FileDiff(diff.path, diff.creates, hunks)
    return Source(
        name,
        subject,
        body,
        tuple(str(mail.get("Needs", "")).split()),
        tuple(str(mail.get("Modules", "")).split()),
        tuple(str(mail.get("Tests", "")).split()),
        tuple(hooks.values()),
    )


def upstream_path(path: str) -> str:
    """Where a module or test of this project goes in pytorch."""
    return re.sub(r"^torch_overlay/", "torch/", path)


def upstream_text(text: str, path: str) -> str:
    """A module or test as upstream gets it.

    Lines marked as this project's own are left out, imports of overlay modules become
    imports of torch, and imports are sorted again.

    Raises:
        SeriesError: the text still depends on the overlay.
    """
    kept, skipping = [], False
    for line in text.splitlines(keepends=True):
        mark = line.rstrip().partition(ONLY_HERE)[2] if ONLY_HERE in line else None
        if mark == ": begin":
            skipping = True
        elif mark == ": end":
            skipping = False
        elif mark is None and not skipping:
            kept.append(line)
    if skipping:
        raise SeriesError(f"{path}: '{ONLY_HERE}: begin' has no end")
    own = r"\btorch_overlay\._(functorch|inductor)\b"
    text = re.sub(own, r"torch._\1", "".join(kept))
    # Upstream's linter for long lines is another one.
    text = text.replace("# noqa: E501", "# noqa: B950")
    joined = "lint.isort.split-on-trailing-comma = false"
    sort = ("check", "--select", "I", "--fix-only", "--config", joined)
    text = _ruff(text, path, *sort)
    text = _ruff(text, path, "format")
    for number, line in enumerate(text.splitlines(), 1):
        if "torch_overlay" in line:
            raise SeriesError(
                f"{path}: line {number} of what upstream would get names the overlay: "
                f"{line.strip()!r}; end the line with '{ONLY_HERE}' or rewrite it"
            )
    return text


def _ruff(text: str, path: str, *command: str) -> str:
    found = shutil.which("ruff", path=str(Path(sys.executable).parent))
    found = found or shutil.which("ruff")
    if found is None:
        raise SeriesError("ruff is not installed; run: pip install '.[test]'")
    done = subprocess.run(
        [found, *command, "--quiet", "--stdin-filename", str(ROOT / path), "-"],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise SeriesError(f"ruff refuses {path}: {done.stderr.strip()}")
    return done.stdout


def _scope_lines(text: str, scope: str) -> tuple[int, int]:
    """First index and end index of a function or class in a file."""
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for part in scope.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [n for n in body if isinstance(n, kinds) and n.name == part]
        if not named:
            raise SeriesError(f"there is no {scope}")
        found = named[-1]
        body = found.body
    if found is None or found.end_lineno is None:
        raise SeriesError(f"there is no {scope}")
    return found.lineno - 1, found.end_lineno


def place_hooks(text: str, diff: FileDiff) -> list[tuple[int, Hunk]]:
    """Index of the first old line of each hand-written hunk of one file.

    Raises:
        SeriesError: a hunk's old lines do not stand exactly once in its scope.
    """
    lines = text.splitlines(keepends=True)
    return [(_place_hook(text, lines, hunk, diff.path), hunk) for hunk in diff.hunks]


def _place_hook(text: str, lines: list[str], hunk: Hunk, path: str) -> int:
    where = hunk.scope or "the file"
    try:
        first, end = _scope_lines(text, hunk.scope) if hunk.scope else (0, len(lines))
    except SeriesError as error:
        raise SeriesError(f"{path}: {error} in this tree") from None
    size = len(hunk.old)
    found = [i for i in find_all(lines, hunk.old) if first <= i <= end - size]
    if len(found) != 1:
        raise SeriesError(
            f"{path}: the old lines of the hunk in {where} stand {len(found)} times "
            f"there, starting with {(hunk.old or [''])[0].strip()!r}"
        )
    return found[0]


class Exporter:
    """Makes the patches of a series on top of one torch tree."""

    def __init__(
        self, tree: Tree, folder: Path = PATCHES, project: Path = ROOT
    ) -> None:
        self.tree = tree
        self.folder = folder
        self.project = project
        # Files as the patches so far leave them.
        self.files: dict[str, str] = {}

    def read(self, path: str) -> str:
        if path in self.files:
            return self.files[path]
        file = self.tree.root / path
        if not file.is_file():
            raise SeriesError(f"{path} is not in the tree {self.tree.root}")
        return file.read_text(encoding="utf-8")

    def export(self) -> dict[str, str]:
        """Patch name -> text of its mail, in the series' order."""
        names = read_series(self.folder)
        self.files.clear()
        release = self.tree.version.split("+")[0]
        return {n: self.mail(read_source(n, self.folder, release)) for n in names}

    def mail(self, source: Source) -> str:
        try:
            diffs = self._diffs(source)
        except (SeriesError, DiffError, TreeError) as error:
            raise SeriesError(f"{source.name}: {error}") from None
        return (
            f"{MAIL_START}\nFrom: {AUTHOR}\nSubject: [PATCH] {source.subject}\n\n"
            f"{source.body}\n---\n\n{''.join(diffs)}-- \ntorch_overlay\n"
        )

    def _diffs(self, source: Source) -> list[str]:
        made: dict[str, str] = {}
        for hook in source.hooks:
            before = self.read(hook.path)
            placed = place_hooks(before, hook)
            made[hook.path] = file_diff_text(hook.path, before, placed)
            (final,) = parse_diff(made[hook.path])
            self.files[hook.path], _ = apply_hunks(before, final.hunks)
        for path in (*source.modules, *source.tests):
            file = self.project / path
            if not file.is_file():
                raise SeriesError(f"{path} does not exist in this project")
            to = upstream_path(path)
            text = upstream_text(file.read_text(encoding="utf-8"), path)
            if to in self.files or (self.tree.root / to).exists():
                raise SeriesError(f"{to} exists already; a module is a new file")
            made[to] = new_file_diff(to, text)
            self.files[to] = text
        return [made[path] for path in sorted(made)]


def subject_and_body(mail_text: str) -> tuple[str, str]:
    """Subject (without "[PATCH]") and message of an exported patch."""
    head, _, rest = mail_text.partition("\n\n")
    match = re.search(r"^Subject: (?:\[PATCH\] )?(.*)$", head, re.M)
    return (match[1] if match else ""), rest.partition("\n---\n")[0]
