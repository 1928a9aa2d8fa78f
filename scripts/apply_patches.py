#!/usr/bin/env python3
"""Apply the patch series to a torch tree, check how it fits, or take it back.

    python scripts/apply_patches.py --check --target TREE [--target TREE ...]
    python scripts/apply_patches.py --target SITE_PACKAGES [--tests FOLDER]
    python scripts/apply_patches.py --target SITE_PACKAGES --revert

TREE is the site-packages folder of an installed torch, a copy of one, or a checkout of
pytorch; --check also takes a wheel or a release.  All patches apply or none does, and
only where every hunk matches exactly.  What stood there is kept in
TREE/.torch_overlay_patches until --revert puts it back byte for byte.

Exit code: 0 done (--check: every patch applies or is applied), 1 a patch does not fit,
2 it could not be tried.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from patch_queue import transaction
from patch_queue.fit import APPLIED, APPLIES, fit_series, HALF, wanted_patches
from patch_queue.hunks import DiffError
from patch_queue.series import SeriesError
from patch_queue.targets import find_targets
from patch_queue.trees import open_tree, resolve_tree, TreeError

from torch_overlay._table import text_table


if TYPE_CHECKING:
    from patch_queue.fit import PatchFit
    from patch_queue.trees import Tree


class ApplyError(RuntimeError):
    """The series cannot be applied; nothing was changed."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="TREE",
        help="site-packages folder or checkout; several with --check",
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--tests",
        type=Path,
        metavar="FOLDER",
        help="also put the patches' tests under FOLDER (a checkout gets them anyway)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="change nothing")
    action.add_argument("--revert", action="store_true", help="put torch's files back")
    return parser


def source_state(patch: str, tree: Tree) -> str:
    """Whether the functions that a patch is about have known sources in a tree."""
    unknown = [
        finding.change.target.split(":")[1]
        for finding in find_targets(tree)
        if finding.change.patch == patch and finding.state != "known"
    ]
    return f"changed: {', '.join(unknown)}" if unknown else "known"


def check(targets: list[str], names: list[str], tests: Path | None) -> int:
    """Print the table patch x tree; 1 if a patch does not fit a tree."""
    rows = [("patch", "tree", "result", "hunks", "sources")]
    problems: list[str] = []
    for target in targets:
        tree = resolve_tree(target)
        for fit in fit_series(tree, names, tests):
            good = sum(h.placed.state in ("applies", "there") for h in fit.hunks)
            known = "-" if fit.state == APPLIED else source_state(fit.name, tree)
            where = f"torch {tree.version}" + (" source" if tree.is_checkout else "")
            count = f"{good}/{len(fit.hunks)}"
            rows.append((fit.name, where, fit.state, count, known))
            problems += [f"{where}: {fit.name}: {line}" for line in fit.problems()]
        stopped = transaction.read_journal(tree.root)
        if stopped is not None and stopped.state != "applied":
            problems.append(
                f"{target}: a run was stopped in the middle; --revert undoes it"
            )
    print(text_table(rows))
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def _refuse(fits: list[PatchFit], tree: Tree) -> None:
    bad = [fit for fit in fits if fit.state != APPLIES]
    if not bad:
        return
    lines = [f"torch {tree.version} in {tree.root} does not match; nothing was changed"]
    for fit in bad:
        if fit.state == APPLIED:
            lines.append(f"  {fit.name} is in this tree already, not put there by us")
        else:
            lines.append(f"  {fit.name}: {fit.state}")
        lines += [f"    {line}" for line in fit.problems()]
        if fit.state == HALF:
            lines.append(
                "    the tree is half patched; reinstall torch, or restore it with git"
            )
    lines.append(
        "Give a tree of a supported release (see README.md), or leave a patch out by "
        "naming the others with --only"
    )
    raise ApplyError("\n".join(lines))


def apply_series(tree: Tree, names: list[str], tests: Path | None) -> str:
    """Apply and say what was done.

    Raises:
        ApplyError: a patch does not match, or another selection is applied.
        TransactionError: files could not be written.
    """
    journal = transaction.read_journal(tree.root)
    if journal is not None:
        applied = journal.note["patches"]
        fits = fit_series(tree, names, tests)
        if applied == " ".join(names) and all(f.state == APPLIED for f in fits):
            return f"already applied: {applied}"
        raise ApplyError(
            f"{tree.root} has {applied} applied, of this or an earlier version or with "
            "other tests; put torch's files back first with --revert"
        )
    fits = fit_series(tree, names, tests)
    _refuse(fits, tree)
    files = {path: text for fit in fits for path, text in fit.files.items()}
    note = {"patches": " ".join(names), "torch": tree.version}
    transaction.apply_files(tree.root, files, note)
    return (
        f"applied {', '.join(names)} to torch {tree.version}: {len(files)} files; take "
        f"it back with: python scripts/apply_patches.py --target {tree.root} --revert"
    )


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if len(args.target) > 1 and not args.check:
        parser.error("several --target are for --check; apply to one tree at a time")
    try:
        names = wanted_patches(args.only)
        if args.check:
            return check(args.target, names, args.tests)
        tree = open_tree(Path(args.target[0]))
        with transaction.locked(tree.root):
            done = transaction.recover(tree.root)
            if done:
                print(f"note: {done}")
            if args.revert and not done:
                journal = transaction.revert_files(tree.root)
                print(f"reverted {journal.note['patches']} in {tree.root}")
            elif not args.revert:
                print(apply_series(tree, names, args.tests))
        return 0
    except ApplyError as error:
        print(f"apply_patches: {error}", file=sys.stderr)
        return 1
    except (
        SeriesError,
        TreeError,
        DiffError,
        transaction.TransactionError,
        OSError,
    ) as error:
        print(f"apply_patches: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("apply_patches: stopped; the tree is as it was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
