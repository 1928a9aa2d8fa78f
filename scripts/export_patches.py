#!/usr/bin/env python3
"""Write ``patches/*.patch`` from the overlay, or check that they are up to date.

    python scripts/export_patches.py
    python scripts/export_patches.py --check
    python scripts/export_patches.py --base 2.15.0 --out out/patches-2.15.0

Exit code: 0 done or up to date, 1 stale (``--check``), 2 the sources do not fit.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from patch_queue.coverage import coverage_problems
from patch_queue.series import Exporter, PATCHES, SeriesError
from patch_queue.trees import resolve_tree, TreeError

from torch_overlay._pins import load_pins


_HEAD = re.compile(r"^@@ -\d+(,\d+)? \+\d+(,\d+)? @@.*$", re.M)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    main = load_pins()["main"]
    parser.add_argument(
        "--check", action="store_true", help="write nothing; list what is stale"
    )
    parser.add_argument(
        "--base",
        default=main,
        help="release, wheel, site-packages folder or checkout to diff against "
        f"(default {main}); with another base --check ignores line numbers",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder to write to (default patches)"
    )
    return parser


def _stale(made: dict[str, str], folder: Path, same_base: bool) -> list[str]:
    """One line for each patch file that differs from what would be written."""
    lines = []
    for name, text in made.items():
        path = folder / f"{name}.patch"
        found = path.read_text(encoding="utf-8") if path.is_file() else None
        if found is not None and not same_base:
            found, text = _HEAD.sub("@@", found), _HEAD.sub("@@", text)
        if found != text:
            state = "is missing" if found is None else "is stale"
            lines.append(f"{name}: {path.name} {state}")
    known = {f"{name}.patch" for name in made}
    lines += [
        f"{path.stem}: {path.name} is not in the series"
        for path in sorted(folder.glob("*.patch"))
        if path.name not in known
    ]
    return lines


def _write(made: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        path = folder / f"{name}.patch"
        staged = path.with_suffix(".new")
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, path)
        print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    main_pin = load_pins()["main"]
    same_base = args.base == main_pin
    if not same_base and not args.check and args.out is None:
        parser.error(f"patches/ is kept for {main_pin}; with another --base give --out")
    try:
        tree = resolve_tree(args.base)
        made = Exporter(tree).export()
        problems = coverage_problems()
    except (SeriesError, TreeError) as error:
        print(f"export_patches: {error}", file=sys.stderr)
        return 2
    folder = args.out or PATCHES
    if not args.check:
        _write(made, folder)
    stale = _stale(made, folder, same_base) if args.check else []
    for line in [*stale, *problems]:
        print(line, file=sys.stderr)
    if stale:
        print("run: python scripts/export_patches.py", file=sys.stderr)
    if not (stale or problems) and args.check:
        print(f"{len(made)} patch(es) up to date with torch {tree.version}")
    return 1 if stale or problems else 0


if __name__ == "__main__":
    sys.exit(main())
