#!/usr/bin/env python3
"""Look at a new torch, and write its fingerprints into ``torch_overlay/pins.json``.

    python scripts/refingerprint.py --torch 2.16.0
    python scripts/refingerprint.py --torch TREE --accept TARGET [--accept TARGET ...]

For every function that the overlay changes this prints whether its source is a known
one, and if not, the difference from the last known version.  Nothing is written until
targets are named with --accept ("known" stands for all whose source is known already).

--torch and --since take a site-packages folder, a checkout of pytorch, a wheel, or a
release, which pip downloads.

Exit code: 0 every source is known or accepted, 1 some are not, 2 it could not be tried.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from patch_queue.targets import find_targets
from patch_queue.trees import installed_tree, resolve_tree, TreeError

from torch_overlay._pins import load_pins, PINS_FILE
from torch_overlay._sources import fingerprint, source_in_tree
from torch_overlay._table import text_table


if TYPE_CHECKING:
    from patch_queue.targets import Finding
    from patch_queue.trees import Tree


def last_known_tree(version: str, since: str | None) -> Tree:
    """The tree to compare with: ``since``, this Python's torch, or the last pin."""
    pinned = [v for v in load_pins()["releases"] if v != version]
    if since is not None:
        return resolve_tree(since)
    here = installed_tree()
    if here is not None and here.version.split("+")[0] in pinned:
        return here
    return resolve_tree(pinned[-1])


def difference(finding: Finding, old: Tree, new: Tree) -> str:
    """What changed in a target since the last known version, as a diff."""
    before = source_in_tree(finding.change.target, old.root)
    if before is None:
        return f"{finding.change.target} is not in torch {old.version} either\n"
    if finding.source is None:
        return f"{finding.change.target} is not in torch {new.version}\n"
    sources = [s.splitlines(keepends=True) for s in (before, finding.source)]
    name = finding.change.target
    lines = difflib.unified_diff(*sources, f"{old.version} {name}", new.version)
    return "".join(lines)


def accept(found: list[Finding], names: list[str], version: str) -> list[str]:
    """Write the hashes of the named targets; returns the targets written.

    Raises:
        TreeError: a name that is not a target, or whose source is not in the tree.
    """
    by_name = {f.change.target: f for f in found}
    wanted = [n for n in names if n != "known"]
    for name in wanted:
        if name not in by_name:
            raise TreeError(f"{name!r} is no target; they are {', '.join(by_name)}")
        if by_name[name].source is None:
            raise TreeError(
                f"{name} is not in torch {version}: there is nothing to accept; write "
                "null for it in pins.json if that version needs no such change"
            )
    if "known" in names:
        wanted += [f.change.target for f in found if f.state == "known"]
    pins: dict[str, Any] = json.loads(PINS_FILE.read_text(encoding="utf-8"))
    pin = pins["releases"].setdefault(version, {"fingerprints": {}, "ran": []})
    for name in wanted:
        pin["fingerprints"][name] = fingerprint(by_name[name].source or "")
    pin["fingerprints"] = dict(sorted(pin["fingerprints"].items()))
    staged = PINS_FILE.with_suffix(".new")
    staged.write_text(json.dumps(pins, indent=2) + "\n", encoding="utf-8")
    os.replace(staged, PINS_FILE)
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", required=True, metavar="PATH_OR_VERSION")
    parser.add_argument("--since", metavar="PATH_OR_VERSION")
    parser.add_argument("--accept", action="append", default=[], metavar="TARGET")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        tree = resolve_tree(args.torch)
        version = tree.version.split("+")[0]
        found = find_targets(tree)
        rows = [("target", "patch", f"source in torch {version}")]
        rows += [(f.change.target, f.change.patch, f.state) for f in found]
        print(text_table(rows))
        open_ones = [f for f in found if f.state != "known"]
        if open_ones:
            old = last_known_tree(version, args.since)
            for finding in open_ones:
                print()
                print(difference(finding, old, tree), end="")
        done = accept(found, args.accept, version) if args.accept else []
    except TreeError as error:
        print(f"refingerprint: {error}", file=sys.stderr)
        return 2
    for name in done:
        print(f"accepted {name} for {version}")
    left = [f.change.target for f in open_ones if f.change.target not in done]
    if left:
        print(
            "refingerprint: read each difference, adapt the override if it matters, "
            "then accept with: " + " ".join(f"--accept {name}" for name in left),
            file=sys.stderr,
        )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
