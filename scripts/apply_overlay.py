#!/usr/bin/env python3
"""Put the overlay into another Python environment, with a chosen torch if wanted.

    python scripts/apply_overlay.py --venv DIR --torch 2.14.1 --enable remat
    python scripts/apply_overlay.py --python PATH --enable 1
    python scripts/apply_overlay.py --venv DIR --nightly 20261201 --index-url URL
    python scripts/apply_overlay.py --pre-check WHEEL_OR_TREE_OR_RELEASE
    python scripts/apply_overlay.py --python PATH --disable
    python scripts/apply_overlay.py --python PATH --uninstall

The sources of the functions that the overlay changes are checked first: with --torch
or --nightly in the wheel, before it is installed, else in the environment's torch.  If
one is unknown, nothing is installed.

Exit code: 0 done, 1 this torch does not fit, 2 it could not be tried.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from patch_queue.targets import find_targets
from patch_queue.trees import open_tree, resolve_tree, ROOT, Tree, TreeError

from torch_overlay import OverlayError, parse_features
from torch_overlay._autoload import ENABLED_FILE


class InstallError(RuntimeError):
    """The environment could not be changed as asked."""


class DoesNotFit(RuntimeError):
    """A torch whose sources the overlay does not know."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--python", type=Path, metavar="PATH", help="its interpreter")
    where.add_argument(
        "--venv", type=Path, metavar="DIR", help="a virtual environment; made if absent"
    )
    torch = parser.add_mutually_exclusive_group()
    torch.add_argument("--torch", metavar="VERSION", help="install this release first")
    torch.add_argument(
        "--nightly", metavar="VERSION_OR_DATE", help="2.16.0.dev20261201, or 20261201"
    )
    parser.add_argument(
        "--index-url", metavar="URL", help="pip's index for torch (nightlies have one)"
    )
    parser.add_argument(
        "--pre-check",
        metavar="WHAT",
        help="only verify: a wheel, a site-packages folder, a checkout, or a release",
    )
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument(
        "--enable", metavar="FEATURES", help="on at every import of torch there"
    )
    switch.add_argument("--disable", action="store_true", help="installed but off")
    switch.add_argument("--uninstall", action="store_true")
    return parser


def verify(tree: Tree) -> None:
    """Compare the tree's sources with the known ones.

    Raises:
        DoesNotFit: some are unknown; lists them.
    """
    bad = [f for f in find_targets(tree) if f.state != "known"]
    if bad:
        lines = [f"torch {tree.version} does not fit; nothing was installed"]
        lines += [f"  {f.change.target} is {f.state}" for f in bad]
        lines.append(
            f"see the differences: python scripts/refingerprint.py --torch {tree.root}"
        )
        raise DoesNotFit("\n".join(lines))
    print(f"torch {tree.version}: every source is known")


def _run(command: list[str], doing: str) -> str:
    # Not from the project's folder, whose torch_overlay would hide the installed one.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise InstallError(f"{doing} failed:\n  " + "\n  ".join(said[-5:]))
    return done.stdout


def environment_python(args: argparse.Namespace) -> Path:
    """The interpreter of the environment, which is made if --venv names a new one."""
    if args.python is not None:
        if not args.python.is_file():
            raise InstallError(f"{args.python} is no file; give a Python interpreter")
        return args.python.absolute()
    folder = args.venv.absolute()
    python = folder / "bin" / "python"
    if not python.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise InstallError(
                f"{folder} is neither empty nor a virtual environment; give another"
            )
        if args.torch is None and args.nightly is None:
            raise InstallError(
                f"{folder} would be a new environment without torch; add --torch or "
                "--nightly"
            )
        _run([sys.executable, "-m", "venv", str(folder)], f"making {folder}")
    return python


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_run([str(python), "-c", code], f"running {python}").strip())


def torch_requirement(args: argparse.Namespace, python: Path) -> str:
    """The version that --torch or --nightly means, as pip writes it."""
    if args.torch is not None:
        return f"torch=={args.torch}"
    if not re.fullmatch(r"\d{8}", args.nightly):
        return f"torch=={args.nightly}"
    command = [str(python), "-m", "pip", "index", "versions", "torch", "--pre"]
    listed = _run([*command, *_index(args)], "listing the versions of torch")
    found = re.findall(rf"\d[\w.]*\.dev{args.nightly}(?:\+\w+)?", listed)
    if not found:
        raise InstallError(
            f"no torch of {args.nightly} in pip's index; give the index of PyTorch's "
            "nightlies with --index-url, or the whole version"
        )
    return f"torch=={found[0]}"


def _index(args: argparse.Namespace) -> list[str]:
    return ["--index-url", args.index_url] if args.index_url else []


def install_torch(args: argparse.Namespace, python: Path) -> None:
    """Download the wheel, verify it, and only then install it."""
    requirement = torch_requirement(args, python)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="torch-wheel-") as folder:
        options = ["--no-deps", "--pre", "--dest", folder, *_index(args)]
        _run([*pip, "download", *options, requirement], f"downloading {requirement}")
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            raise InstallError(f"pip has no wheel of {requirement} for this machine")
        verify(resolve_tree(str(wheels[0])))
        command = [*pip, "install", "--pre", str(wheels[0])]
        if args.index_url:
            command += ["--extra-index-url", args.index_url]
        _run(command, f"installing {requirement}")


def install_overlay(python: Path) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--no-deps", "--force-reinstall", str(ROOT)], "installing the overlay")
    _run([str(python), "-m", "torch_overlay", "status"], "the overlay's own check")


def uninstall(python: Path, enabled: Path) -> None:
    enabled.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "uninstall", "--yes", "torch_overlay"], "uninstalling")
    print(f"uninstalled from {python}")


def change_environment(args: argparse.Namespace) -> None:
    python = environment_python(args)
    site = site_packages(python)
    enabled = site / ENABLED_FILE
    if args.uninstall:
        uninstall(python, enabled)
        return
    if args.disable:
        was = enabled.is_file()
        enabled.unlink(missing_ok=True)
        print("the overlay is off unless TORCH_OVERLAY is set" if was else "it was off")
        return
    if args.torch is not None or args.nightly is not None:
        install_torch(args, python)
    else:
        if not (site / "torch").is_dir():
            raise InstallError(f"{python} has no torch; add --torch or --nightly")
        verify(open_tree(site))
    install_overlay(python)
    print(f"installed into {python}")
    if args.enable is not None:
        enabled.write_text(args.enable + "\n", encoding="utf-8")
        print(f"on at every import of torch there: {args.enable}")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.pre_check is None and args.python is None and args.venv is None:
        parser.error("say where: --python PATH or --venv DIR (or only --pre-check)")
    try:
        if args.enable is not None:
            parse_features(args.enable)
        if args.pre_check is not None:
            verify(resolve_tree(args.pre_check))
        else:
            change_environment(args)
    except DoesNotFit as error:
        print(f"apply_overlay: {error}", file=sys.stderr)
        return 1
    except (InstallError, TreeError, OverlayError, OSError) as error:
        print(f"apply_overlay: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
