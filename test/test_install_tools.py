# Owner(s): ["oncall: pt2"]
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import torch
from torch.testing._internal.common_utils import run_tests, TestCase

from torch_overlay import _manifest, _pins
from torch_overlay._overrides import DECLARED, Override


sys.path.insert(0, str(Path(__file__).resolve().parent))

from patched_env import PatchedEnv, ROOT, run_script, SITE, temporary_folder


_manifest.load()
# Two features may change one function.
TARGETS = list(
    dict.fromkeys(c.target for c in DECLARED.values() if isinstance(c, Override))
)
VERSION = "2.99.0.dev20261201"


class ToolCase(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = temporary_folder(self)

    def tree(self, edit=False, name="tree"):
        """A tree of an unknown version with the installed sources, maybe edited."""
        root = self.folder / name
        for target in TARGETS:
            path = target.split(":")[0].replace(".", "/") + ".py"
            to = root / path
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SITE / path, to)
        (root / "torch" / "version.py").write_text(f"__version__ = '{VERSION}'\n")
        if edit:
            name = TARGETS[0].split(":")[1]
            path = root / (TARGETS[0].split(":")[0].replace(".", "/") + ".py")
            text = path.read_text()
            path.write_text(text.replace(f"def {name}(", f"def {name}(\n    ", 1))
        return root

    def wheel(self, tree):
        """A wheel of the tree in a folder that pip takes as an index."""
        folder = self.folder / "index" / "torch"
        folder.mkdir(parents=True)
        path = folder / f"torch-{VERSION}-py3-none-any.whl"
        info = f"torch-{VERSION}.dist-info"
        head = f"Metadata-Version: 2.1\nName: torch\nVersion: {VERSION}\n"
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(tree.rglob("*.py")):
                archive.write(file, file.relative_to(tree))
            archive.writestr(f"{info}/METADATA", head)
            archive.writestr(f"{info}/WHEEL", kind)
            archive.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(f"<a href='{path.name}'>{path.name}</a>")
        return path


class TestRefingerprint(ToolCase):
    def setUp(self):
        super().setUp()
        # The tool writes pins.json, so it runs in a copy of the project.
        self.project = self.folder / "project"
        skip = shutil.ignore_patterns("__pycache__")
        for name in ("torch_overlay", "scripts", "patches"):
            shutil.copytree(ROOT / name, self.project / name, ignore=skip)
        self.pins = self.project / "torch_overlay" / "pins.json"

    def refingerprint(self, *args):
        script = self.project / "scripts" / "refingerprint.py"
        done = subprocess.run(
            [sys.executable, str(script), *map(str, args)],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    def test_known_sources(self):
        before = self.pins.read_text()
        code, out, err = self.refingerprint("--torch", self.tree())
        self.assertEqual(code, 0, err)
        changes = sum(isinstance(c, Override) for c in DECLARED.values())
        self.assertEqual(out.count("known"), changes)
        self.assertEqual(self.pins.read_text(), before)
        code, out, _ = self.refingerprint("--torch", self.tree(), "--accept", "known")
        self.assertEqual(code, 0)
        written = json.loads(self.pins.read_text())["releases"][VERSION]
        self.assertEqual(sorted(written["fingerprints"]), sorted(TARGETS))

    def test_changed_source(self):
        before = self.pins.read_text()
        tree = self.tree(edit=True)
        code, out, err = self.refingerprint("--torch", tree, "--since", SITE)
        self.assertEqual(code, 1)
        self.assertIn(f"--accept {TARGETS[0]}", err)
        self.assertRegex(out, r"(?m)^-def .*\n\+def ")
        self.assertEqual(self.pins.read_text(), before)
        code, out, err = self.refingerprint(
            "--torch", tree, "--since", SITE, "--accept", TARGETS[0]
        )
        self.assertEqual(code, 0, err)
        written = json.loads(self.pins.read_text())["releases"][VERSION]
        self.assertEqual(list(written["fingerprints"]), [TARGETS[0]])
        code, _, err = self.refingerprint("--torch", tree)
        self.assertEqual(code, 0, err)

    def test_bad_input(self):
        for args, message in [
            (("--torch", "no such thing"), "neither a path nor a release"),
            (("--torch", self.tree(), "--accept", "a:b"), "'a:b' is no target"),
            (("--torch", self.folder), "holds no torch"),
        ]:
            code, _, err = self.refingerprint(*args)
            self.assertEqual(code, 2)
            self.assertIn(message, err)


class TestApplyOverlay(ToolCase):
    def overlay(self, *args):
        return run_script("apply_overlay.py", *args)

    def overlay_from(self, index, *args):
        """With pip reading only ``index``, whatever the machine's settings are."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        args = (*args, "--index-url", index)
        return run_script(
            "apply_overlay.py", *args, env={**env, "PIP_CONFIG_FILE": os.devnull}
        )

    def test_pre_check(self):
        for what in (SITE, self.tree(), self.wheel(self.tree())):
            code, out, err = self.overlay("--pre-check", what)
            self.assertEqual(code, 0, err)
            self.assertIn("every source is known", out)
        code, _, err = self.overlay("--pre-check", self.tree(edit=True, name="other"))
        self.assertEqual(code, 1)
        self.assertIn(f"{TARGETS[0]} is changed", err)
        self.assertIn("refingerprint.py --torch", err)

    def test_nightly_that_does_not_fit_is_not_installed(self):
        index = self.wheel(self.tree(edit=True)).parent.parent.as_uri()
        env = self.folder / "env"
        options = (index, "--venv", env)
        code, _, err = self.overlay_from(*options, "--nightly", "20261201")
        self.assertEqual(code, 1, err)
        self.assertIn("nothing was installed", err)
        site = next(env.glob("lib/python3*/site-packages"))
        self.assertFalse((site / "torch").exists())
        code, _, err = self.overlay_from(*options, "--nightly", "20200101")
        self.assertEqual(code, 2)
        self.assertIn("no torch of 20200101", err)

    def test_nightly_that_fits_is_installed(self):
        index = self.wheel(self.tree()).parent.parent.as_uri()
        env = self.folder / "env"
        # The tree is no working torch and the index has no build tools, so it stops
        # after torch.
        code, out, err = self.overlay_from(index, "--venv", env, "--nightly", VERSION)
        self.assertEqual(code, 2, err)
        self.assertIn("every source is known", out)
        self.assertIn("the overlay", err)
        site = next(env.glob("lib/python3*/site-packages"))
        self.assertTrue((site / f"torch-{VERSION}.dist-info").exists())

    def test_bad_input(self):
        (self.folder / "full").mkdir()
        (self.folder / "full" / "file").touch()
        for args, message in [
            ((), "say where"),
            (("--python", self.folder / "none"), "is no file"),
            (("--venv", self.folder / "full"), "neither empty nor"),
            (("--venv", self.folder / "new"), "without torch"),
            (("--python", sys.executable, "--enable", "x"), "unknown feature 'x'"),
        ]:
            code, _, err = self.overlay(*args)
            self.assertEqual(code, 2)
            self.assertIn(message, err)

    def test_install_enable_disable_uninstall(self):
        env = PatchedEnv(self.folder / "env", with_pip=True)
        show = (
            "import torch, torch_overlay as t; "
            "print([r.state for r in t.status()][0], t.__file__)"
        )

        def state(**variables):
            code, said = env.run("-c", show, **variables)
            self.assertEqual(code, 0, said)
            self.assertIn(str(env.site), said)
            return said.split()[0]

        with mock.patch.dict(os.environ):
            os.environ.pop("TORCH_OVERLAY", None)
            code, out, err = self.overlay("--python", env.python, "--enable", "remat")
            self.assertEqual(code, 0, err)
            self.assertIn("on at every import of torch there: remat", out)
            self.assertEqual(state(TORCH_OVERLAY=None), "applied")
            self.assertEqual(state(TORCH_OVERLAY="0"), "verified")
            self.assertEqual(self.overlay("--python", env.python, "--disable")[0], 0)
            self.assertEqual(state(TORCH_OVERLAY=None), "verified")
            code, _, err = self.overlay("--python", env.python, "--uninstall")
            self.assertEqual(code, 0, err)
        code, said = env.run("-c", "import torch_overlay")
        self.assertIn("No module named 'torch_overlay'", said)


class TestPins(TestCase):
    def test_this_torch_is_pinned(self):
        pins = _pins.load_pins()
        self.assertIn(pins["main"], pins["releases"])
        self.assertIn(torch.__version__.split("+")[0], pins["releases"])

    def test_readme_has_what_was_run(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        for version, pin in _pins.load_pins()["releases"].items():
            for ran in pin["ran"]:
                row = f"| {version} | {ran['what']} | {ran['where']} |"
                self.assertIn(row, text)


if __name__ == "__main__":
    run_tests()
