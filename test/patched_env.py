"""An environment with a copy of the installed torch, for tests that patch it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import torch


SITE = Path(torch.__file__).resolve().parent.parent
ROOT = Path(__file__).resolve().parent.parent


def temporary_folder(test):
    """A new folder that is deleted when ``test`` ends."""
    folder = tempfile.TemporaryDirectory()
    test.addCleanup(folder.cleanup)
    return Path(folder.name).resolve()


def copy_python_files(source, to):
    """Copy a package: Python and compiled files as they are, all else by link."""
    to.mkdir()
    for entry in source.iterdir():
        place = to / entry.name
        if entry.is_dir() and any(entry.rglob("*.py")):
            copy_python_files(entry, place)
        elif entry.suffix == ".py":
            shutil.copy2(entry, place)
        elif entry.name == "__pycache__":
            shutil.copytree(entry, place)
        else:
            place.symlink_to(entry)


class PatchedEnv:
    """``python`` sees the copied torch, the installed dependencies, no overlay."""

    def __init__(self, folder, with_pip=False):
        venv.create(folder, with_pip=with_pip)
        self.folder = folder
        self.python = folder / "bin" / "python"
        base = {"base": str(folder), "platbase": str(folder)}
        self.site = Path(sysconfig.get_path("purelib", "venv", vars=base))
        for entry in SITE.iterdir():
            if "torch_overlay" in entry.name or entry.suffix == ".pth":
                continue
            if entry.name == "torch":
                copy_python_files(entry, self.site / "torch")
            elif not (self.site / entry.name).exists():
                (self.site / entry.name).symlink_to(entry)

    def run(self, *args, **env):
        """(exit code, stdout and stderr) of the environment's Python.

        A variable that is None is unset.
        """
        variables = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "TORCH_OVERLAY": "",
            "CI": None,  # run_tests would write reports, with a package of its own
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **env,
        }
        done = subprocess.run(
            [str(self.python), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={k: v for k, v in variables.items() if v is not None},
        )
        return done.returncode, done.stdout


def run_script(name, *args, **options):
    """(exit code, stdout, stderr) of a script of this project."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, args)],
        capture_output=True,
        text=True,
        **options,
    )
    return done.returncode, done.stdout, done.stderr
