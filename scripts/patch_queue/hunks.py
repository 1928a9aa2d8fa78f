"""Unified diffs: parse, find in a file, apply, and write with the least context.

A hunk is safe where its old lines stand at the expected place, or exactly once in the
file.  Fuzz (context lines left off) is only reported, never applied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


DEV_NULL = "/dev/null"
MAX_FUZZ = 2
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


class DiffError(ValueError):
    """A text that is not a diff of the kind that the queue uses."""


@dataclass(frozen=True)
class Hunk:
    """One change of a file; lines keep their ends.

    Attributes:
        start: expected first line in the old file, from 1; 0 for a new file.
        lines: (mark, text) with mark " ", "-" or "+".
        scope: name of the function or class that the old lines stand in, or "".
    """

    start: int
    lines: tuple[tuple[str, str], ...]
    scope: str = ""

    @property
    def old(self) -> list[str]:
        return [text for mark, text in self.lines if mark != "+"]

    @property
    def new(self) -> list[str]:
        return [text for mark, text in self.lines if mark != "-"]


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file; ``creates`` if the file is new."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]

    def created_text(self) -> str:
        return "".join(line for hunk in self.hunks for line in hunk.new)


@dataclass(frozen=True)
class Placed:
    """Where a hunk goes: ``state`` is "applies", "fuzz", "there" or "conflict"."""

    state: str
    line: int = 0
    why: str = ""


def parse_diff(text: str) -> tuple[FileDiff, ...]:
    """The file diffs in ``text``; lines outside them (a mail's message) are skipped.

    Raises:
        DiffError: a hunk without a file, or a line that is none of a hunk's.
    """
    files: list[FileDiff] = []
    lines = text.splitlines(keepends=True)
    i = 0
    while i < len(lines):
        if not (lines[i].startswith("--- ") and lines[i + 1 : i + 2]):
            i += 1
            continue
        if not lines[i + 1].startswith("+++ "):
            i += 1
            continue
        old, new = (line[4:].split("\t")[0].strip() for line in lines[i : i + 2])
        i += 2
        hunks = []
        while i < len(lines) and lines[i].startswith("@@"):
            hunk, i = _parse_hunk(lines, i)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"{new} has no hunks")
        path = new.removeprefix("b/")
        files.append(FileDiff(path, old == DEV_NULL, tuple(hunks)))
    return tuple(files)


def _parse_hunk(lines: list[str], i: int) -> tuple[Hunk, int]:
    head = lines[i]
    match = _HUNK.match(head)
    counted = re.findall(r"[-+]\d+(?:,(\d+))?", head[: match.end()]) if match else []
    left = [int(n) if n else 1 for n in counted]
    start = int(match[1]) if match else 0
    scope = head.strip().strip("@ ") if match is None else ""
    body: list[tuple[str, str]] = []
    i += 1
    while i < len(lines):
        if left and left == [0, 0]:
            break
        mark, text = lines[i][:1], lines[i][1:]
        if mark == "\n":
            mark, text = " ", "\n"
        if mark not in (" ", "+", "-"):
            break
        if not left and lines[i].startswith(("--- ", "+++ ")):
            break
        if left:
            left[0] -= mark != "+"
            left[1] -= mark != "-"
        body.append((mark, text))
        i += 1
    if left and left != [0, 0]:
        raise DiffError(f"hunk {head.strip()} ends too early")
    if not any(mark != " " for mark, _ in body):
        raise DiffError(f"hunk {head.strip()} changes nothing")
    return Hunk(start, tuple(body), scope), i


def find_all(lines: list[str], block: list[str]) -> list[int]:
    """Indices at which ``block`` stands in ``lines``."""
    size = len(block)
    if not block:
        return []
    return [
        i
        for i in range(len(lines) - size + 1)
        if lines[i] == block[0] and lines[i : i + size] == block
    ]


def place(hunk: Hunk, lines: list[str], shift: int = 0) -> Placed:
    """Where ``hunk`` goes in ``lines``, expected ``shift`` lines below its number."""
    there = find_all(lines, hunk.new)
    # A hunk with context on one side matches again inside what it made.
    room = len(hunk.new) - len(hunk.old)
    made = {i + k for i in there for k in range(room + 1)}
    found = [i for i in find_all(lines, hunk.old) if i not in made]
    expected = hunk.start - 1 + shift
    if expected in found:
        return Placed("applies", expected)
    if len(found) == 1:
        return Placed("applies", found[0])
    if found:
        where = ", ".join(str(i + 1) for i in found)
        return Placed("conflict", 0, f"its lines stand at several places: {where}")
    if there:
        return Placed("there", there[0], "is in the file already")
    for drop in range(1, MAX_FUZZ + 1):
        block = _without_outer_context(hunk, drop)
        found = find_all(lines, block) if block else []
        if len(found) == 1:
            why = f"matches only without {drop} line(s) of outer context"
            return Placed("fuzz", found[0], why)
    return Placed("conflict", 0, _nearest(hunk, lines))


def _without_outer_context(hunk: Hunk, drop: int) -> list[str] | None:
    marks = [mark for mark, _ in hunk.lines]
    before = next(i for i, mark in enumerate(marks) if mark != " ")
    after = next(i for i, mark in enumerate(reversed(marks)) if mark != " ")
    first, last = min(drop, before), min(drop, after)
    kept = hunk.lines[first : len(hunk.lines) - last]
    return [text for mark, text in kept if mark != "+"] or None


def _nearest(hunk: Hunk, lines: list[str]) -> str:
    """What a reader needs to see why the old lines were not found."""
    missing = [text for text in hunk.old if text.strip() and text not in lines]
    if missing:
        return f"this line is not in the file: {missing[0].strip()!r}"
    return f"its {len(hunk.old)} old lines do not stand together"


def apply_hunks(text: str, hunks: tuple[Hunk, ...]) -> tuple[str, list[Placed]]:
    """``text`` with every hunk that applies exactly, and where each one went."""
    lines = text.splitlines(keepends=True)
    placed: list[Placed] = []
    shift = 0
    for hunk in hunks:
        found = place(hunk, lines, shift)
        placed.append(found)
        if found.state != "applies":
            continue
        lines[found.line : found.line + len(hunk.old)] = hunk.new
        shift = found.line - (hunk.start - 1) + len(hunk.new) - len(hunk.old)
    return "".join(lines), placed


def take_back_hunks(text: str, hunks: tuple[Hunk, ...]) -> str | None:
    """``text`` without the hunks, or None if they are not all in it."""
    flip = {" ": " ", "-": "+", "+": "-"}
    reversed_hunks = []
    shift = 0
    for hunk in hunks:
        lines = tuple((flip[mark], line) for mark, line in hunk.lines)
        reversed_hunks.append(Hunk(hunk.start + shift, lines, hunk.scope))
        shift += len(hunk.new) - len(hunk.old)
    before, placed = apply_hunks(text, tuple(reversed_hunks))
    return before if all(p.state == "applies" for p in placed) else None


def grow_until_unique(hunk: Hunk, line: int, lines: list[str]) -> tuple[Hunk, int]:
    """``hunk``, placed at index ``line``, with the context that it needs.

    That is one line after its last change (``git apply`` takes a hunk without as the
    end of the file), then lines on both sides until its old lines are unique.
    """
    body = list(hunk.lines)
    first, end = line, line + len(hunk.old)
    if body[-1][0] != " " and end < len(lines):
        body.append((" ", lines[end]))
        end += 1
    while len(find_all(lines, lines[first:end])) > 1:
        if first > 0:
            first -= 1
            body.insert(0, (" ", lines[first]))
        if end < len(lines):
            body.append((" ", lines[end]))
            end += 1
    return Hunk(first + 1, tuple(body), hunk.scope), first


def file_diff_text(path: str, before: str, placed: list[tuple[int, Hunk]]) -> str:
    """Diff of one file: ``placed`` are hunks with the index of their first old line.

    Raises:
        DiffError: two hunks touch the same lines.
    """
    lines = before.splitlines(keepends=True)
    text = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
    shift, end = 0, 0
    for line, hunk in sorted(placed, key=lambda p: p[0]):
        grown, first = grow_until_unique(hunk, line, lines)
        if first < end:
            raise DiffError(f"{path}: two hunks meet at line {first + 1}; join them")
        old, new = len(grown.old), len(grown.new)
        text += f"@@ -{_span(first, old)} +{_span(first + shift, new)} @@"
        text += f"{_enclosing(lines, first)}\n"
        text += "".join(mark + line for mark, line in grown.lines)
        shift += new - old
        end = first + old
    return text


def _span(first: int, count: int) -> str:
    return f"{first + 1}" if count == 1 else f"{first + 1},{count}"


def _enclosing(lines: list[str], first: int) -> str:
    """The class or function that a hunk stands in, as git prints it."""
    for line in reversed(lines[:first]):
        if re.match(r"(?:class|def|async def) ", line):
            return f" {line.strip()}"
    return ""


def new_file_diff(path: str, text: str) -> str:
    """Diff that creates a file."""
    lines = text.splitlines(keepends=True)
    if not lines or not text.endswith("\n"):
        raise DiffError(f"{path} must not be empty and must end with a newline")
    head = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
        f"--- {DEV_NULL}\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head + "".join("+" + line for line in lines)
