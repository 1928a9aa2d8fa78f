"""How the patches of the series fit a tree, without changing it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .hunks import apply_hunks, FileDiff, parse_diff, Placed, take_back_hunks
from .series import PATCHES, read_series, read_source, SeriesError


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trees import Tree

    # The files of a patch, each with its place in the tree.
    PlacedDiffs = list[tuple[str, FileDiff]]

# What is told of a patch, worst first; the words of the drift table.
CONFLICTS, HALF, FUZZ, APPLIED, APPLIES = (
    "conflicts",
    "half applied",
    "fuzz",
    "applied",
    "applies",
)


@dataclass(frozen=True)
class HunkFit:
    path: str
    number: int
    count: int
    line: int
    placed: Placed

    def describe(self) -> str:
        where = f"{self.path}, hunk {self.number} of {self.count}"
        where += f" (line {self.line})" if self.line else ""
        return f"{where}: {self.placed.why or self.placed.state}"


@dataclass(frozen=True)
class PatchFit:
    """One patch on one tree; ``files`` holds the text of changed files by place."""

    name: str
    hunks: tuple[HunkFit, ...]
    files: dict[str, str] = field(repr=False)

    @property
    def state(self) -> str:
        states = {h.placed.state for h in self.hunks}
        if "conflict" in states:
            return CONFLICTS
        if "there" in states:
            return APPLIED if states == {"there"} else HALF
        return FUZZ if "fuzz" in states else APPLIES

    def problems(self) -> list[str]:
        """The hunks that keep the patch from applying, one line each."""
        if self.state in (APPLIES, APPLIED):
            return []
        half = self.state == HALF
        return [
            h.describe() if h.placed.why else f"{h.describe()} (not in the file yet)"
            for h in self.hunks
            if half or h.placed.state in ("conflict", "fuzz")
        ]


def wanted_patches(only: Sequence[str], folder: Path = PATCHES) -> list[str]:
    """Names of the series, or those of ``only`` in the series' order.

    Raises:
        SeriesError: a name that is not in the series, or one without the patches
            that it builds on.
    """
    names = read_series(folder)
    for name in only:
        if name not in names:
            raise SeriesError(
                f"{name!r} is not in the series; patches are {', '.join(names)}"
            )
    for name in only:
        missing = [n for n in read_source(name, folder).needs if n not in only]
        if missing:
            raise SeriesError(
                f"{name} builds on {', '.join(missing)}: select it too, with "
                + " ".join(f"--only {n}" for n in missing)
            )
    return [n for n in names if n in only] if only else names


def patch_text(name: str, folder: Path = PATCHES) -> str:
    path = folder / f"{name}.patch"
    if not path.is_file():
        raise SeriesError(
            f"{path} is missing; write it with: python scripts/export_patches.py"
        )
    return path.read_text(encoding="utf-8")


def place_of(path: str, tree: Tree, tests: Path | None) -> str | None:
    """Where a file of a patch goes; None for tests that have no place.

    A checkout takes everything.  Beside an installed torch only ``torch/`` has a place;
    tests go to the folder that the user names.
    """
    if tree.is_checkout or path.startswith("torch/"):
        return path
    return None if tests is None else str(tests.resolve() / path)


def _can_be_taken_back(patches: Sequence[PlacedDiffs], tree: Tree) -> bool:
    texts: dict[str, str | None] = {}
    for place, diff in [d for patch in reversed(patches) for d in patch]:
        text = texts[place] if place in texts else _read(tree.root / place)
        if text is None:
            return False
        if diff.creates:
            texts[place] = None
            if text != diff.created_text():
                return False
        else:
            texts[place] = take_back_hunks(text, diff.hunks)
            if texts[place] is None:
                return False
    return True


def applied_count(series: Sequence[PlacedDiffs], tree: Tree) -> int:
    """How many patches, from the first on, are in the tree.

    A patch that was applied later may have changed lines around an earlier one's, so
    they are taken back from the last to the first.
    """
    counts = range(len(series), 0, -1)
    return next((n for n in counts if _can_be_taken_back(series[:n], tree)), 0)


def fit_series(
    tree: Tree, names: Sequence[str], tests: Path | None, folder: Path = PATCHES
) -> list[PatchFit]:
    """Each patch on top of those before it."""
    texts: dict[str, str | None] = {}
    fits = []
    series: list[PlacedDiffs] = []
    for name in names:
        diffs = parse_diff(patch_text(name, folder))
        placed_diffs = [(place_of(d.path, tree, tests), d) for d in diffs]
        series.append([(p, d) for p, d in placed_diffs if p is not None])
    there = applied_count(series, tree)
    for index, (name, diffs) in enumerate(zip(names, series, strict=True)):
        hunks: list[HunkFit] = []
        files: dict[str, str] = {}
        for place, diff in diffs:
            before = texts[place] if place in texts else _read(tree.root / place)
            if index < there:
                why = Placed("there", 0, "is in the tree already")
                after, placed = before, [why for _ in diff.hunks]
            else:
                after, placed = _fit_file(diff, before)
            hunks += [
                HunkFit(diff.path, i, len(placed), hunk.start, p)
                for i, (hunk, p) in enumerate(zip(diff.hunks, placed, strict=True), 1)
            ]
            if after != before and after is not None:
                files[place] = after
                texts[place] = after
        fits.append(PatchFit(name, tuple(hunks), files))
    return fits


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _fit_file(diff: FileDiff, before: str | None) -> tuple[str | None, list[Placed]]:
    if diff.creates:
        text = diff.created_text()
        if before is None:
            return text, [Placed("applies")]
        if before == text:
            return before, [Placed("there", 0, "is there already")]
        return before, [Placed("conflict", 0, "exists with other content")]
    if before is None:
        return None, [Placed("conflict", 0, "is not in this tree") for _ in diff.hunks]
    return apply_hunks(before, diff.hunks)
