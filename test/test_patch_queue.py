# Owner(s): ["oncall: pt2"]
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

from torch.testing._internal.common_utils import run_tests, TestCase


sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import apply_patches
import export_patches
from patch_queue import fit, hunks, series, transaction, trees
from patched_env import PatchedEnv, ROOT, run_script, SITE, temporary_folder


NAMES = series.read_series()
DIFFS = [d for name in NAMES for d in hunks.parse_diff(fit.patch_text(name))]
# A patch may change what an earlier one creates.
CREATED = {diff.path for diff in DIFFS if diff.creates}
TOUCHED = sorted({diff.path for diff in DIFFS} - CREATED)


def sha256(path):
    return transaction.sha256(path.read_bytes())


def digests(root):
    """Content, mode and time of every file and link under ``root``."""
    found = {}
    for path in sorted(root.rglob("*")):
        at = path.lstat()
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = (sha256(path), at.st_mode, at.st_mtime_ns)
    return found


def apply(*args):
    """(exit code, stdout, stderr) of apply_patches in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = apply_patches.main([str(a) for a in args])
    return code, out.getvalue(), err.getvalue()


class TestHunks(TestCase):
    TEXT = "".join(f"{c}\n" for c in "abcdefgh")

    def hunk(self, text, start=1):
        """A hunk from its lines: " a|+x| b"."""
        lines = tuple((part[0], part[1:] + "\n") for part in text.split("|"))
        return hunks.Hunk(start, lines)

    def place(self, text, start=1, shift=0, into=None):
        lines = (self.TEXT if into is None else into).splitlines(keepends=True)
        return hunks.place(self.hunk(text, start), lines, shift)

    def test_exact_offset_and_there(self):
        self.assertEqual(self.place(" c|+x| d", 3), hunks.Placed("applies", 2))
        self.assertEqual(self.place(" c|+x| d", 9), hunks.Placed("applies", 2))
        self.assertEqual(self.place(" c|+x| d", into="c\nx\nd\n").state, "there")
        self.assertEqual(self.place("-c|+x", into="a\nx\n").state, "there")
        self.assertEqual(self.place("+x| c", into="a\nx\nc\n").state, "there")
        self.assertEqual(self.place(" c|+x", into="c\nx\nc\n").line, 2)
        self.assertEqual(self.place(" c|-d", 3), hunks.Placed("applies", 2))

    def test_ambiguous_lines_are_refused_away_from_their_place(self):
        twice = self.TEXT * 2
        self.assertEqual(self.place(" c|+x| d", 11, into=twice).line, 10)
        found = self.place(" c|+x| d", 5, into=twice)
        self.assertEqual(found.state, "conflict")
        self.assertIn("several places: 3, 11", found.why)

    def test_fuzz_and_conflict(self):
        self.assertEqual(self.place(" ?| c|+x| d").state, "fuzz")
        found = self.place(" c|-?|+x| d")
        self.assertEqual(found.state, "conflict")
        self.assertIn("'?'", found.why)
        found = self.place(" c|+x| e")
        self.assertEqual(found.state, "conflict")
        self.assertIn("do not stand together", found.why)

    def test_written_diff_reads_back(self):
        placed = [(6, self.hunk("-g|+y|+z")), (2, self.hunk("+x| c"))]
        text = hunks.file_diff_text("f.py", self.TEXT, placed)
        self.assertExpectedInline(
            text,
            """\
diff --git a/f.py b/f.py
--- a/f.py
+++ b/f.py
@@ -3 +3,2 @@
+x
 c
@@ -7,2 +8,3 @@
-g
+y
+z
 h
""",
        )
        (diff,) = hunks.parse_diff(text)
        after, where = hunks.apply_hunks(self.TEXT, diff.hunks)
        self.assertEqual(after, "a\nb\nx\nc\nd\ne\nf\ny\nz\nh\n")
        self.assertEqual([p.line for p in where], [2, 7])

    def test_context_grows_until_unique(self):
        text = "p\nx\nq\nx\nr\n"
        written = hunks.file_diff_text("f", text, [(3, self.hunk(" x|+new"))])
        (diff,) = hunks.parse_diff(written)
        self.assertEqual(diff.hunks[0].old, ["x\n", "r\n"])

    def test_malformed(self):
        for text, message in [
            ("--- a/f\n+++ b/f\n", "has no hunks"),
            ("--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n", "ends too early"),
            ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n a\n", "changes nothing"),
        ]:
            with self.assertRaisesRegex(hunks.DiffError, message):
                hunks.parse_diff(text)


class TestExport(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = temporary_folder(self)

    def enter(self, context):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        return stack.enter_context(context)

    def project(self):
        """A copy of what the patches are made from."""
        copy = self.folder / "project"
        for name in ("torch_overlay", "patches", "scripts", "test"):
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=skip)
        shutil.copy2(ROOT / "pyproject.toml", copy)
        return copy

    def check(self, project):
        script = project / "scripts" / "export_patches.py"
        done = subprocess.run(
            [sys.executable, str(script), "--check", "--base", str(SITE)],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def test_up_to_date_and_after_edits(self):
        project = self.project()
        code, said = self.check(project)
        self.assertEqual(code, 0, said)
        package = project / "torch_overlay" / "_functorch"
        module = package / "_activation_checkpointing" / "liveness.py"
        text = module.read_text()
        module.write_text(text + "\n\nEDITED = True\n")
        code, said = self.check(project)
        self.assertEqual(code, 1)
        self.assertIn("use-site-remat: use-site-remat.patch is stale", said)
        module.write_text(text)
        (module.parent / "extra.py").write_text("EXTRA = True\n")
        code, said = self.check(project)
        self.assertEqual(code, 1)
        self.assertIn("extra.py is in no patch", said)

    def test_same_text_every_time_and_no_overlay_in_it(self):
        tree = trees.open_tree(SITE)
        made = series.Exporter(tree).export()
        self.assertEqual(list(made), NAMES)
        self.assertEqual(made, series.Exporter(tree).export())
        for name, text in made.items():
            changed = [line for line in text.splitlines() if line.startswith("+")]
            self.assertFalse([line for line in changed if "torch_overlay" in line])
            subject, body = series.subject_and_body(text)
            self.assertRegex(subject, r"^\[\w+\] [A-Z]")
            self.assertRegex(body, r"(?m)^Fixes #\d+", name)

    def test_what_only_this_project_needs_is_left_out(self):
        text = textwrap.dedent(
            """
            import os
            import torch_overlay  # overlay only
            from torch_overlay._functorch.x import y


            # overlay only: begin
            torch_overlay.z()
            # overlay only: end
            print(os, y)
            """
        )
        self.assertExpectedInline(
            series.upstream_text(text, "test/t.py"),
            """\
import os

from torch._functorch.x import y


print(os, y)
""",
        )
        with self.assertRaisesRegex(series.SeriesError, "names the overlay"):
            series.upstream_text("import torch_overlay\n", "test/t.py")
        with self.assertRaisesRegex(series.SeriesError, "has no end"):
            series.upstream_text("# overlay only: begin\n", "test/t.py")

    def test_hook_that_does_not_fit(self):
        for old, scope, message in [
            ("nothing like it", "default_partition", "stand 0 times"),
            ("x", "no_such_function", "there is no no_such_function in this tree"),
        ]:
            text = f"--- a/f\n+++ b/f\n@@ {scope}\n {old}\n+new\n"
            (diff,) = hunks.parse_diff(text)
            body = "def default_partition():\n    pass\n"
            with self.assertRaisesRegex(series.SeriesError, message):
                series.place_hooks(body, diff)

    def test_message_rules(self):
        (self.folder / "src").mkdir()
        path = self.folder / "src" / "p.msg"
        for text, message in [
            ("Subject: no component\n\nFixes #1\n", "subject must read"),
            ("Subject: [A] Do it\n\ntext\n", "must say 'Fixes #N'"),
        ]:
            path.write_text(text)
            with self.assertRaisesRegex(series.SeriesError, message):
                series.read_source("p", self.folder)

    def test_hunks_of_one_release(self):
        path = "torch/_inductor/config.py"
        forms = [
            {d.path for d in series.read_source("one-random-stream", release=r).hooks}
            for r in (None, "2.14.1", "2.15.0")
        ]
        self.assertEqual([path in form for form in forms], [False, False, True])

    def test_other_base_needs_a_folder(self):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            with self.assertRaises(SystemExit):
                export_patches.main(["--base", "/somewhere"])
        self.assertIn("give --out", err.getvalue())
        out = self.folder / "out"
        with contextlib.redirect_stdout(io.StringIO()):
            code = export_patches.main(["--base", str(SITE), "--out", str(out)])
        self.assertEqual(code, 0)
        self.assertEqual(
            (out / f"{NAMES[0]}.patch").read_text(), fit.patch_text(NAMES[0])
        )


class TestApply(TestCase):
    """On a small tree with the files of the installed torch that patches touch."""

    def setUp(self):
        super().setUp()
        self.root = temporary_folder(self)
        for path in [*TOUCHED, "torch/version.py"]:
            to = self.root / path
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SITE / path, to)
            compiled = to.parent / "__pycache__" / f"{to.stem}.cpython-399.pyc"
            compiled.parent.mkdir(exist_ok=True)
            compiled.write_bytes(b"compiled " + path.encode())
        self.before = digests(self.root)

    def assertUnchanged(self):
        self.assertTrue(digests(self.root) == self.before)

    def test_apply_and_revert(self):
        tests = self.root / "tests"
        code, out, err = apply("--target", self.root, "--tests", tests)
        self.assertEqual(code, 0, err)
        self.assertIn("--revert", out)
        changed = self.root / TOUCHED[0]
        self.assertNotEqual(sha256(changed), self.before[str(changed)][0])
        self.assertEqual(list((changed.parent / "__pycache__").glob("config.*")), [])
        self.assertTrue(list(tests.rglob("test_*.py")))
        # Python compiles what it imports.
        for path in (changed, self.root / "tests/test/functorch/test_liveness.py"):
            compiled = path.parent / "__pycache__" / f"{path.stem}.cpython-399.pyc"
            compiled.parent.mkdir(exist_ok=True)
            compiled.write_bytes(b"new")
        code, out, _ = apply("--target", self.root, "--tests", tests)
        self.assertEqual((code, out.split(":")[0]), (0, "already applied"))
        code, out, err = apply("--check", "--target", self.root)
        self.assertEqual(code, 0, err)
        self.assertRegex(out, rf"{NAMES[0]} .* applied ")
        code, _, err = apply("--target", self.root, "--revert")
        self.assertEqual(code, 0, err)
        self.assertUnchanged()
        code, _, err = apply("--target", self.root, "--revert")
        self.assertEqual(code, 2)
        self.assertIn("no patch is applied", err)

    def test_links_stay_links(self):
        path = self.root / TOUCHED[0]
        kept = self.root / "cache.py"
        os.replace(path, kept)
        path.symlink_to(kept)
        self.before = digests(self.root)
        self.assertEqual(apply("--target", self.root)[0], 0)
        self.assertEqual(sha256(kept), self.before[str(kept)][0])
        self.assertEqual(apply("--target", self.root, "--revert")[0], 0)
        self.assertUnchanged()

    def test_only(self):
        code, _, err = apply("--target", self.root, "--only", "no-such-patch")
        self.assertEqual(code, 2)
        self.assertIn(f"patches are {', '.join(NAMES)}", err)
        code, out, _ = apply("--target", self.root, "--only", NAMES[0])
        self.assertEqual(code, 0)
        self.assertIn(f"applied {NAMES[0]} to", out)
        code, out, _ = apply("--check", "--target", self.root)
        self.assertEqual(code, 0)
        self.assertRegex(out, rf"{NAMES[0]} .* applied ")
        self.assertRegex(out, r"use-site-remat .* applies ")

    def test_only_without_what_it_builds_on(self):
        code, _, err = apply("--target", self.root, "--only", "use-site-remat")
        self.assertEqual(code, 2)
        self.assertIn("builds on rng-under-budget: select it too", err)
        self.assertUnchanged()

    def test_wrong_tree(self):
        for target, message in [
            (self.root / "nowhere", "holds no torch"),
            (self.root / "torch", f"did you mean {self.root}?"),
        ]:
            code, _, err = apply("--target", target)
            self.assertEqual(code, 2)
            self.assertIn(message, err)
        path = self.root / "torch/_inductor/choices.py"
        path.write_text(path.read_text().replace("can_fuse", "may_fuse"))
        (self.root / "torch/_functorch/config.py").unlink()
        self.before = digests(self.root)
        code, _, err = apply("--target", self.root)
        self.assertEqual(code, 1)
        self.assertIn("config.py, hunk 1 of 1", err)
        self.assertIn("is not in this tree", err)
        self.assertIn("nothing was changed", err)
        self.assertUnchanged()
        code, out, _ = apply("--check", "--target", self.root)
        self.assertEqual(code, 1)
        self.assertIn("conflicts", out)
        self.assertIn("changed: InductorChoices.can_fuse", out)

    def test_hunk_that_does_not_match_is_named(self):
        path = self.root / "torch/_functorch/partitioners.py"
        line = "    bw_module = reordering_to_mimic_autograd_engine(bw_module)\n"
        text = path.read_text()
        path.write_text(text.replace("\n" + line, "\n" + line.replace("(bw", "(gm")))
        code, _, err = apply("--target", self.root)
        self.assertEqual(code, 1)
        self.assertRegex(
            err, r"partitioners.py, hunk 3 of 3 \(line \d+\): this line is"
        )
        self.assertIn("reordering_to_mimic_autograd_engine(bw_module)", err)

    def test_half_patched_tree(self):
        self.assertEqual(apply("--target", self.root)[0], 0)
        shutil.rmtree(self.root / transaction.FOLDER)
        path = self.root / "torch/_functorch/config.py"
        path.write_bytes((SITE / "torch/_functorch/config.py").read_bytes())
        half = digests(self.root)
        code, _, err = apply("--target", self.root)
        self.assertEqual(code, 1)
        self.assertIn("half patched", err)
        self.assertIn("hunk 1 of 1 (line", err)
        self.assertTrue(digests(self.root) == half)
        self.assertIn("half applied", apply("--check", "--target", self.root)[1])

    def test_edits_of_the_user_are_kept(self):
        self.assertEqual(apply("--target", self.root)[0], 0)
        path = self.root / TOUCHED[0]
        path.write_text(path.read_text() + "# mine\n")
        code, _, err = apply("--target", self.root, "--revert")
        self.assertEqual(code, 2)
        self.assertIn(TOUCHED[0], err)
        self.assertTrue(path.read_text().endswith("# mine\n"))

    def test_read_only_tree(self):
        for place in (self.root / TOUCHED[0], (self.root / TOUCHED[0]).parent):
            mode = place.stat().st_mode
            place.chmod(mode & ~0o222)
            self.before = digests(self.root)
            code, _, err = apply("--target", self.root)
            place.chmod(mode)
            self.assertEqual(code, 2)
            self.assertIn("write-protected", err)
            self.assertIn(str(place), err)
            place.chmod(mode & ~0o222)
            self.assertUnchanged()
            place.chmod(mode)

    STEPS = ("write_file", "replace_file", "remove_file", "copy_file")

    def failing(self, error, at, after):
        """Every primitive counts; number ``at`` raises, before or after its work."""
        stack = contextlib.ExitStack()
        count = [0]
        for name in self.STEPS:
            plain = getattr(transaction, name)

            def step(*args, plain=plain):
                count[0] += 1
                mine = count[0] == at
                if mine and not after:
                    raise error
                plain(*args)
                if mine:
                    raise error

            stack.enter_context(mock.patch.object(transaction, name, step))
        return stack, count

    def test_full_disk_and_interrupt_at_every_step(self):
        full = OSError(28, "No space left on device")
        for error, code in ((full, 2), (KeyboardInterrupt(), 130)):
            for after in (False, True):
                at, stopped = 0, True
                while stopped:
                    at += 1
                    stack, count = self.failing(error, at, after)
                    with stack:
                        found, _, err = apply("--target", self.root)
                    stopped = count[0] >= at
                    if stopped:
                        self.assertEqual(found, code, err)
                        self.assertIn("as it was", err)
                        self.assertUnchanged()
                self.assertEqual(found, 0)
                self.assertGreater(at, 30)
                self.assertEqual(apply("--target", self.root, "--revert")[0], 0)
                self.assertUnchanged()

    def test_killed_run_is_undone_by_the_next(self):
        program = """
            import os, sys
            sys.path.insert(0, sys.argv[1])
            import apply_patches
            from patch_queue import transaction

            left, plain = [int(sys.argv[3])], transaction.replace_file

            def step(source, to):
                plain(source, to)
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), 9)

            transaction.replace_file = step
            apply_patches.main(["--target", sys.argv[2], *sys.argv[4:]])
        """
        kill = [sys.executable, "-c", textwrap.dedent(program)]
        kill += [str(ROOT / "scripts"), str(self.root)]
        done = subprocess.run([*kill, "5"])
        self.assertEqual(done.returncode, -signal.SIGKILL)
        self.assertFalse(digests(self.root) == self.before)
        code, _, err = apply("--check", "--target", self.root)
        self.assertEqual(code, 1)
        self.assertIn("stopped in the middle", err)
        code, out, _ = apply("--target", self.root, "--revert")
        self.assertEqual(code, 0)
        self.assertIn("stopped while applying", out)
        self.assertUnchanged()
        self.assertEqual(apply("--target", self.root)[0], 0)
        subprocess.run([*kill, "4", "--revert"])
        code, out, err = apply("--target", self.root)
        self.assertEqual(code, 0, err)
        self.assertIn("stopped while reverting", out)
        self.assertEqual(apply("--target", self.root, "--revert")[0], 0)
        self.assertUnchanged()

    def test_real_interrupt_while_putting_back(self):
        plain = transaction.replace_file

        def step(source, to):
            os.kill(os.getpid(), signal.SIGINT)
            plain(source, to)

        self.assertEqual(apply("--target", self.root)[0], 0)
        with mock.patch.object(transaction, "replace_file", step):
            code, _, _ = apply("--target", self.root, "--revert")
        self.assertEqual(code, 130)
        self.assertUnchanged()

    def test_one_run_at_a_time(self):
        with transaction.locked(self.root):
            code, _, err = apply("--target", self.root)
        self.assertEqual(code, 2)
        self.assertIn("another run is working", err)
        self.assertUnchanged()

    def test_damaged_journal(self):
        self.assertEqual(apply("--target", self.root)[0], 0)
        journal = self.root / transaction.FOLDER / "journal.json"
        journal.write_text("{")
        code, _, err = apply("--target", self.root, "--revert")
        self.assertEqual(code, 2)
        self.assertIn("is damaged", err)

    def test_checkout_by_git_am_and_by_apply(self):
        (self.root / "version.txt").write_text("2.16.0a0\n")
        for folder in ("functorch", "inductor"):
            (self.root / "test" / folder).mkdir(parents=True)
            (self.root / "test" / folder / "README").write_text("\n")
        for compiled in self.root.rglob("*.pyc"):
            compiled.unlink()
        git = ["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=b"]

        def run(*args):
            done = subprocess.run([*git, *args], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        run("init", "-q")
        run("add", ".")
        run("commit", "-qm", "base")
        code, _, err = apply("--target", self.root)
        self.assertEqual(code, 0, err)
        self.assertIn("test/functorch/test_liveness.py", run("status", "-s", "-uall"))
        self.assertNotIn(transaction.FOLDER, run("status", "-s", "-uall"))
        by_apply = {p: sha256(self.root / p) for p in run("ls-files").split()}
        self.assertEqual(apply("--target", self.root, "--revert")[0], 0)
        self.assertEqual(run("status", "-s"), "")
        for name in NAMES:
            run("am", "--keep-non-patch", str(series.PATCHES / f"{name}.patch"))
            subject, body = series.subject_and_body(fit.patch_text(name))
            self.assertEqual(run("log", "-1", "--format=%s").strip(), subject)
            self.assertEqual(run("log", "-1", "--format=%b").strip(), body)
        for path, content in by_apply.items():
            self.assertEqual(sha256(self.root / path), content)
        code, out, _ = apply("--check", "--target", self.root)
        self.assertEqual(code, 0)
        self.assertRegex(out, rf"{NAMES[0]} +torch \S+ source +applied")
        code, _, err = apply("--target", self.root)
        self.assertEqual(code, 1)
        self.assertIn("in this tree already", err)


class TestPatchedTorch(TestCase):
    """A copy of the installed torch, patched, in an environment without the overlay."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.env = PatchedEnv(Path(cls.folder.name).resolve() / "env")
        cls.before = digests(cls.env.site / "torch")
        code, out, err = run_script(
            "apply_patches.py", "--target", cls.env.site, "--tests", cls.env.folder
        )
        if code:
            raise AssertionError(out + err)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        super().tearDownClass()

    def test_overlay_is_not_importable(self):
        code, said = self.env.run("-c", "import torch_overlay")
        self.assertEqual(code, 1)
        self.assertIn("No module named 'torch_overlay'", said)
        code, said = self.env.run("-c", "import torch; print(torch.__file__)")
        self.assertEqual(said.strip(), str(self.env.site / "torch" / "__init__.py"))

    def test_tests_of_the_patches(self):
        for name in NAMES:
            for path in series.read_source(name).tests:
                if not Path(path).name.startswith("test_"):
                    continue
                code, said = self.env.run(self.env.folder / path)
                self.assertEqual(code, 0, f"{path}\n{said[-3000:]}")
                self.assertIn("\nOK", said)

    def test_same_graphs_as_the_overlay(self):
        made = []
        script = Path("patch_queue", "emitted_graphs.py")
        options = ["--budgets", "0", "--out"]
        out = self.env.folder / "overlay.json"
        code, _, err = run_script(script, *options, out, "--overlay", "rng,remat=off")
        self.assertEqual(code, 0, err)
        made.append(out.read_text())
        out = self.env.folder / "patched.json"
        code, said = self.env.run(ROOT / "scripts" / script, *options, out)
        self.assertEqual(code, 0, said)
        made.append(out.read_text())
        graphs = json.loads(made[0])
        copied = [key for key in graphs if "_remat" in str(graphs[key])]
        self.assertEqual(len({key.split()[0] for key in copied}), 12)
        self.assertEqual(made[0], made[1])

    def test_zz_revert(self):
        code, _, err = run_script(
            "apply_patches.py", "--target", self.env.site, "--revert"
        )
        self.assertEqual(code, 0, err)
        self.assertTrue(digests(self.env.site / "torch") == self.before)


if __name__ == "__main__":
    run_tests()
