"""``python -m torch_overlay {status,run,verify}``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path


def _fail(message: str) -> int:
    print(f"torch_overlay: {message}", file=sys.stderr)
    return 2


def _status(args: argparse.Namespace) -> int:
    import torch

    import torch_overlay
    from torch_overlay._manifest import RELEASES
    from torch_overlay._overrides import mismatch_message
    from torch_overlay._table import text_table

    rows = torch_overlay.status()
    bad = [r for r in rows if r.state == "mismatch"]
    if args.json:
        print(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "overrides": [dataclasses.asdict(r) for r in rows],
                },
                indent=2,
            )
        )
    else:
        print(f"torch {torch.__version__}")
        heads = ("target", "feature", "patch", "issue", "state")
        table = [heads] + [
            (r.target, r.feature, r.patch, r.issue, r.state) for r in rows
        ]
        print(text_table(table))
    if bad:
        text = mismatch_message(bad, torch.__version__, ", ".join(RELEASES))
        print(text, file=sys.stderr)
    return 1 if bad else 0


def _verify(args: argparse.Namespace) -> int:
    from torch_overlay import _manifest, _overrides, _sources

    _manifest.load()
    here = _sources.torch_root()
    if args.diff is None:
        return _status(argparse.Namespace(json=False))
    if args.diff not in _overrides.DECLARED:
        return _fail(
            f"{args.diff} is not overridden; targets are "
            + ", ".join(sorted(_overrides.DECLARED))
        )
    if args.against is None:
        return _fail(
            "--diff needs --against FOLDER, a site-packages folder with a supported "
            "torch; make one with: pip install --no-deps --target FOLDER torch==2.14.1"
        )
    sources = []
    for root in (Path(args.against), here):
        source = _sources.source_in_tree(args.diff, root)
        if source is None:
            return _fail(f"{args.diff} is not a function in the torch under {root}")
        sources.append(source.splitlines(keepends=True))
    lines = list(difflib.unified_diff(*sources, args.against, str(here)))
    sys.stdout.writelines(lines)
    return 1 if lines else 0


def _is_autoloaded() -> bool:
    found = entry_points(group="torch.backends")
    return any(e.value.startswith("torch_overlay.") for e in found)


def _run(args: argparse.Namespace) -> int:
    import torch_overlay

    spec = args.features
    features = torch_overlay.parse_features(spec)
    if not _is_autoloaded():
        return _fail(
            "the package is importable but not installed, so compile workers and "
            "spawned processes would run without it; install it with: pip install ."
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return _fail(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps the overlay out of compile workers; "
            "unset it"
        )
    os.environ["TORCH_OVERLAY"] = spec
    import torch  # noqa: F401

    torch_overlay.apply(*features)
    if args.module:
        sys.argv = [args.target, *args.args]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args.target, run_name="__main__", alter_sys=True)
    else:
        script = Path(args.target)
        if not script.is_file():
            return _fail(f"{script} is not a file")
        sys.argv = [str(script), *args.args]
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch_overlay", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="state of every override")
    status.add_argument("--json", action="store_true")
    status.set_defaults(main=_status)
    verify = commands.add_parser("verify", help="check sources, or show a difference")
    verify.add_argument("--diff", metavar="TARGET")
    verify.add_argument("--against", metavar="FOLDER")
    verify.set_defaults(main=_verify)
    run = commands.add_parser(
        "run", help="run a script with the overlay on; argv and exit code pass through"
    )
    run.add_argument(
        "--features",
        default=os.environ.get("TORCH_OVERLAY") or "1",
        help="as in TORCH_OVERLAY: 1, or a comma list such as remat=all",
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module")
    run.add_argument("target", metavar="SCRIPT|MODULE")
    run.add_argument("args", nargs=argparse.REMAINDER)
    run.set_defaults(main=_run)
    return parser


def main(argv: list[str] | None = None) -> int:
    from torch_overlay import OverlayError

    args = _parser().parse_args(argv)
    try:
        return args.main(args)
    except OverlayError as error:
        return _fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
