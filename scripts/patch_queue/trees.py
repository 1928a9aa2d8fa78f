"""Torch trees: an installed torch or a copy, a checkout, a wheel, a release."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "out" / "torch-sources"
RELEASE = re.compile(r"^\d+\.\d+(\.\d+)?\S*$")
_PROBE = Path("torch", "_functorch", "partitioners.py")


class TreeError(ValueError):
    """Something that is not a torch tree, or cannot be had."""


@dataclass(frozen=True)
class Tree:
    """A folder that holds ``torch``.

    Attributes:
        root: the folder.
        version: as the tree itself says, or "unknown".
        is_checkout: whether it is a source tree, with upstream's tests beside torch.
    """

    root: Path
    version: str
    is_checkout: bool


def open_tree(path: Path) -> Tree:
    """The tree at ``path``.

    Raises:
        TreeError: there is none; says which folder is meant if one is near.
    """
    root = path.expanduser().resolve()
    if (root / _PROBE).is_file():
        is_checkout = (root / "test" / "functorch").is_dir() and (
            (root / "version.txt").exists() or (root / ".git").exists()
        )
        return Tree(root, _version(root), is_checkout)
    near = [root.parent] if root.name == "torch" else []
    near += sorted(root.glob("lib/python3*/site-packages"))
    hints = [str(p) for p in near if (p / _PROBE).is_file()]
    hint = f"; did you mean {hints[0]}?" if hints else ""
    raise TreeError(
        f"{path} holds no torch/_functorch/partitioners.py: give a site-packages "
        f"folder or a checkout of pytorch{hint}"
    )


def _version(root: Path) -> str:
    found = root / "torch" / "version.py"
    if found.is_file():
        match = re.search(
            r"^__version__ = ['\"]([^'\"]+)", found.read_text(encoding="utf-8"), re.M
        )
        if match:
            return match[1]
    plain = root / "version.txt"
    return plain.read_text(encoding="utf-8").strip() if plain.is_file() else "unknown"


def installed_tree() -> Tree | None:
    """The torch of this Python, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return open_tree(Path(spec.origin).parent.parent)


def resolve_tree(what: str) -> Tree:
    """The tree for a path, a wheel file, or a release such as "2.15.0".

    A release is this Python's torch if it is that one, else the Python sources of its
    wheel, downloaded by pip once and kept under ``out/torch-sources``.

    Raises:
        TreeError: neither; says what is accepted.
    """
    path = Path(what).expanduser()
    if path.is_file() and path.suffix == ".whl":
        return _unpacked(path, SOURCES / path.stem)
    if path.exists():
        return open_tree(path)
    if not RELEASE.match(what):
        raise TreeError(
            f"{what!r} is neither a path nor a release; give a site-packages folder, a "
            "checkout of pytorch, a torch wheel, or a release such as 2.14.1"
        )
    here = installed_tree()
    if here is not None and what in (here.version, here.version.split("+")[0]):
        return here
    kept = SOURCES / what
    if (kept / _PROBE).is_file():
        return open_tree(kept)
    with tempfile.TemporaryDirectory(prefix="torch-wheel-") as folder:
        wheel = download_wheel(f"torch=={what}", Path(folder))
        return _unpacked(wheel, kept)


def download_wheel(
    requirement: str, folder: Path, options: tuple[str, ...] = ()
) -> Path:
    """Download one torch wheel with this Python's pip.

    Raises:
        TreeError: pip failed; its last line is in the message.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", *options]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise TreeError(
            f"pip could not download {requirement} ({said[-1]}); check the version and "
            "pip's index settings, or give a path to a wheel or a tree"
        )
    return wheels[0]


def _unpacked(wheel: Path, folder: Path) -> Tree:
    """The Python sources of a wheel, in ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if re.match(r"torch/.*\.py$", n)]
            archive.extractall(staging, names)
        tree = open_tree(staging)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
    except zipfile.BadZipFile:
        raise TreeError(f"{wheel} is not a wheel; download it again") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Tree(folder.resolve(), tree.version, False)
