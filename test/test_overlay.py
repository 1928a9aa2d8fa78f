# Owner(s): ["oncall: pt2"]
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import warnings
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay
from torch_overlay import _api, _manifest, _overrides, _sources
from torch_overlay.__main__ import _is_autoloaded
from torch_overlay._overrides import ConfigKey, DECLARED, Override, verify_one


TARGET = "torch._functorch.partitioners:reordering_to_mimic_autograd_engine"
_manifest.load()


def run_python(code, *args, **env):
    """Run a program in its own process; returns (exit code, stdout, stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w") as f:
            f.write(textwrap.dedent(code))
        prefix = [a.replace("PROGRAM", path) for a in args] or [path]
        done = subprocess.run(
            [sys.executable, *prefix],
            env={**os.environ, "TORCH_OVERLAY": "", **env},
            capture_output=True,
            text=True,
        )
    return done.returncode, done.stdout, done.stderr


def tag():
    return torch.compiler.config.cache_key_tag


class OverlayCase(TestCase):
    def setUp(self):
        super().setUp()
        self.plain = partitioners.reordering_to_mimic_autograd_engine
        self.assertEqual(tag(), "")

    def tearDown(self):
        torch_overlay.revert()
        self.assertPlain()
        # A runner keeps finished tests alive; TestAliases looks for holders.
        del self.plain
        super().tearDown()

    def assertPlain(self):
        self.assertIs(partitioners.reordering_to_mimic_autograd_engine, self.plain)
        self.assertFalse(hasattr(functorch_config, "use_site_remat"))
        self.assertNotIn("use_site_remat", functorch_config.save_config_portable())
        self.assertEqual(tag(), "")


class TestApply(OverlayCase):
    def test_import_changes_nothing(self):
        code, out, err = run_python(
            """
            import sys
            import torch_overlay
            print("torch" in sys.modules)
            import torch._functorch.config
            print(hasattr(torch._functorch.config, "use_site_remat"))
            """
        )
        self.assertEqual((code, out), (0, "False\nFalse\n"), err)

    def test_apply_twice_and_revert(self):
        torch_overlay.apply("remat")
        once = partitioners.reordering_to_mimic_autograd_engine
        self.assertIsNot(once, self.plain)
        self.assertIs(_overrides.get_original(TARGET), self.plain)
        first_tag = tag()
        torch_overlay.apply("remat")
        self.assertIs(partitioners.reordering_to_mimic_autograd_engine, once)
        self.assertEqual(tag(), first_tag)
        torch_overlay.revert()
        self.assertPlain()
        torch_overlay.revert()
        self.assertPlain()

    def test_value_sets_the_config(self):
        for feature, value in [
            ("remat", "light"),
            ("remat=light", "light"),
            ("remat=all", "all"),
            ("remat=off", "off"),
        ]:
            with torch_overlay.applied(feature):
                self.assertEqual(functorch_config.use_site_remat, value)

    def test_two_features_on_one_function(self):
        plain = partitioners.choose_saved_values_set
        for first, second in (("rng", "peak"), ("peak", "rng")):
            with torch_overlay.applied(first):
                once = partitioners.choose_saved_values_set
                with torch_overlay.applied(second):
                    self.assertIsNot(partitioners.choose_saved_values_set, once)
                self.assertIs(partitioners.choose_saved_values_set, once)
            self.assertIs(partitioners.choose_saved_values_set, plain)
            torch_overlay.apply(first)
            torch_overlay.apply(second)
            torch_overlay.revert(first)
            self.assertIsNot(partitioners.choose_saved_values_set, plain)
            torch_overlay.revert(second)
            self.assertIs(partitioners.choose_saved_values_set, plain)

    def test_tiers(self):
        parse = torch_overlay.parse_features
        self.assertEqual(parse("memory"), ("remat", "peak"))
        self.assertEqual(parse("1,memory")[-2:], ("remat", "peak"))
        self.assertIn("rng", parse("1,memory"))
        self.assertEqual(parse("memory,remat=all"), ("peak", "remat=all"))

    def test_value_sets_no_other_key(self):
        with torch_overlay.applied("rng=save"):
            self.assertEqual(functorch_config.rng_recompute, "save")
            self.assertEqual(functorch_config.recomputable_custom_ops, [])

    def test_config_key_is_a_real_entry(self):
        with torch_overlay.applied("remat"):
            before = functorch_config.get_hash()
            with functorch_config.patch(use_site_remat="all"):
                self.assertEqual(functorch_config.use_site_remat, "all")
                self.assertNotEqual(functorch_config.get_hash(), before)
            self.assertEqual(functorch_config.use_site_remat, "light")
            self.assertEqual(functorch_config.get_hash(), before)

    def test_nested_and_overlapping_blocks(self):
        with torch_overlay.applied("remat"):
            with torch_overlay.applied("remat"):
                pass
            self.assertTrue(_overrides.is_bound(TARGET))
            torch_overlay.revert()
            self.assertTrue(_overrides.is_bound(TARGET))
        self.assertPlain()
        torch_overlay.apply("remat")
        with torch_overlay.applied("remat"):
            pass
        self.assertTrue(_overrides.is_bound(TARGET))

    def test_unknown_feature_and_value(self):
        for feature, message in [
            ("rmat", "unknown feature 'rmat'; accepted are .*remat"),
            ("remat=heavy", "does not take 'heavy'; accepted are light, all, off"),
        ]:
            with self.assertRaisesRegex(torch_overlay.OverlayError, message):
                torch_overlay.apply(feature)
            self.assertPlain()

    def test_other_value_while_on(self):
        torch_overlay.apply("remat")
        with self.assertRaisesRegex(torch_overlay.OverlayError, "on with 'light'"):
            torch_overlay.apply("remat=all")
        self.assertEqual(functorch_config.use_site_remat, "light")

    def test_two_threads(self):
        start = threading.Barrier(8)
        errors = []

        def turn():
            start.wait()
            try:
                for _ in range(20):
                    torch_overlay.apply("remat")
                    with torch_overlay.applied("remat"):
                        if not _overrides.is_bound(TARGET):
                            errors.append("not bound inside a block")
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=turn) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        self.assertIs(_overrides.get_original(TARGET), self.plain)

    def test_interrupt_leaves_torch_as_it_was(self):
        bind = _overrides.bind
        for stop_at in range(3):
            calls = []

            def interrupted(*args, stop_at=stop_at, calls=calls):
                calls.append(args)
                if len(calls) > stop_at:
                    raise KeyboardInterrupt
                bind(*args)
                if len(calls) == 2:
                    raise KeyboardInterrupt

            with mock.patch.object(_overrides, "bind", interrupted):
                with self.assertRaises(KeyboardInterrupt):
                    torch_overlay.apply("remat")
            self.assertPlain()
        torch_overlay.apply("remat")

    def test_interrupt_while_entering_a_block(self):
        for name in ("_switch_on", "_reset_compiled"):
            with mock.patch.object(_api, name, side_effect=KeyboardInterrupt):
                with self.assertRaises(KeyboardInterrupt):
                    with torch_overlay.applied("remat"):
                        self.fail("the block must not run")
            self.assertPlain()

    def test_bare_revert_turns_everything_off(self):
        torch_overlay.apply("remat")
        _api._kept.clear()
        torch_overlay.revert()
        self.assertPlain()

    def test_apply_after_compiling_warns(self):
        torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
        with self.assertWarnsRegex(UserWarning, "torch._dynamo.reset"):
            torch_overlay.apply("remat")
        torch_overlay.revert()
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_overlay.apply("remat")

    def test_applied_drops_compiled_functions(self):
        compiles = []

        def backend(gm, inputs):
            compiles.append(_overrides.is_bound(TARGET))
            return gm.forward

        f = torch.compile(lambda x: x.sin() + 1, backend=backend)
        f(torch.ones(3))
        with torch_overlay.applied("remat"):
            f(torch.ones(3))
        f(torch.ones(3))
        self.assertEqual(compiles, [False, True, False])


class TestVerify(OverlayCase):
    def change(self, **fields):
        return mock.patch.dict(
            DECLARED, {TARGET: dataclasses.replace(DECLARED[TARGET], **fields)}
        )

    def test_every_change_fits_this_release(self):
        for row in torch_overlay.status():
            self.assertIn(row.state, ("verified", "not in this release"), row)
        with torch_overlay.applied(*torch_overlay.FEATURES):
            states = {row.state for row in torch_overlay.status()}
            self.assertLessEqual(states, {"applied", "not in this release"})

    def test_fingerprints_cover_the_releases(self):
        for change in DECLARED.values():
            self.assertIn(change.feature, torch_overlay.FEATURES)
            if isinstance(change, Override):
                self.assertEqual(tuple(change.fingerprints), _manifest.RELEASES)

    def test_mismatch_refuses_everything(self):
        with self.change(fingerprints={"2.14.1": "0" * 64}):
            with self.assertRaises(torch_overlay.MismatchError) as caught:
                torch_overlay.apply("remat")
        self.assertPlain()
        text = str(caught.exception)
        for part in (
            TARGET,
            "0" * 64,
            _sources.fingerprint(
                _sources.source_in_tree(TARGET, _sources.torch_root())
            ),
            f"python -m torch_overlay verify --diff {TARGET} --against",
            "Nothing was applied",
        ):
            self.assertIn(part, text)

    def test_known_source_in_an_unknown_release(self):
        change = DECLARED[TARGET]
        self.assertEqual(verify_one(change, "2.16.0.dev1").state, "verified")

    def test_not_in_this_release(self):
        with self.change(fingerprints={"2.99.0": None}):
            self.assertEqual(
                verify_one(DECLARED[TARGET], "2.99.0").state, "not in this release"
            )

    def test_other_parameters(self):
        with self.change(replacement=lambda original, graph: graph):
            with self.assertRaisesRegex(torch_overlay.MismatchError, "parameters"):
                torch_overlay.apply("remat")
        self.assertPlain()

    def test_function_patched_by_another_library(self):
        def theirs(gm):
            return gm

        with mock.patch.object(
            partitioners, "reordering_to_mimic_autograd_engine", theirs
        ):
            with self.assertRaisesRegex(
                torch_overlay.MismatchError, "replaced by another library"
            ):
                torch_overlay.apply("remat")
            self.assertIs(partitioners.reordering_to_mimic_autograd_engine, theirs)

    def test_key_that_torch_has_already(self):
        key = ConfigKey("torch._functorch.config:cse", True, bool, "remat", "p", "i")
        row = verify_one(key, "2.14.1")
        self.assertEqual(row.state, "mismatch")
        self.assertIn("has this key already", row.detail)

    def test_duplicate_and_malformed_declarations(self):
        with self.assertRaisesRegex(torch_overlay.OverlayError, "declared twice"):
            _overrides._declare(DECLARED[TARGET])
        with self.assertRaisesRegex(torch_overlay.OverlayError, "module:name"):
            _overrides._declare(dataclasses.replace(DECLARED[TARGET], target="a.b"))


class TestAliases(OverlayCase):
    def test_nothing_else_holds_an_original(self):
        # A name bound by `from x import f`, a default argument or a table would keep
        # calling plain torch.  Held by closures of ours only, or by nothing.
        for key, change in DECLARED.items():
            if not isinstance(change, Override):
                continue
            target = change.target
            original = _overrides._resolve(target)
            # What an earlier round found holds what that round looked for.
            binding = referrers = ours = others = None
            with torch_overlay.applied(change.feature):
                gc.collect()
                binding = _overrides._bindings[key]
                referrers = gc.get_referrers(original)
                ours = [binding, binding.__dict__, binding.wrapper.__dict__]
                ours += [self, self.__dict__, *binding.holders]
                ours += [before for _, _, before, _ in binding.holders]
                others = [
                    h
                    for h in referrers
                    if not any(h is o for o in ours)
                    and not isinstance(h, (types.FrameType, types.CellType))
                ]
                self.assertEqual(len(others), 0, f"{target} is held by {others[:3]}")

    def test_alias_in_another_torch_module(self):
        alias = types.ModuleType("torch._some_importer")
        alias.reorder = self.plain
        with mock.patch.dict(sys.modules, {"torch._some_importer": alias}):
            with torch_overlay.applied("remat"):
                self.assertIs(
                    alias.reorder, partitioners.reordering_to_mimic_autograd_engine
                )
            self.assertIs(alias.reorder, self.plain)

    def test_searching_for_a_module_does_not_lose_it(self):
        code, out, err = run_python(
            """
            import importlib.util, sys, torch
            import torch_overlay
            torch_overlay.apply("remat")
            importlib.util.find_spec("torch._inductor.choices")
            rows = {r.target: r for r in torch_overlay.status() if r.feature == "remat"}
            row = rows["torch._inductor.choices:InductorChoices.can_fuse_vertical"]
            print(row.state, "/", row.detail)
            from torch._inductor.choices import InductorChoices
            print(hasattr(InductorChoices.can_fuse_vertical, "__wrapped__"))
            """
        )
        shown = "applied / takes its place when its module is imported\nTrue\n"
        self.assertEqual((code, out), (0, shown), err)

    def test_early_apply_imports_nothing_and_binds_on_import(self):
        code, out, err = run_python(
            """
            import sys, torch
            import torch_overlay
            torch_overlay.apply("remat")
            print([m for m in ("torch._inductor.choices",
                   "torch._functorch.partitioners") if m in sys.modules])
            from torch._functorch import partitioners as p
            from torch._inductor.choices import InductorChoices as c
            print({hasattr(f, "__wrapped__") for f in (
                p.reordering_to_mimic_autograd_engine,
                c.can_fuse_vertical, c.can_fuse_horizontal)})
            torch_overlay.revert()
            print({hasattr(f, "__wrapped__") for f in (
                p.reordering_to_mimic_autograd_engine,
                c.can_fuse_vertical, c.can_fuse_horizontal)})
            torch_overlay.apply("remat"); torch_overlay.revert()
            """
        )
        self.assertEqual((code, out), (0, "[]\n{True}\n{False}\n"), err)

    def test_name_taken_while_on_is_plain_after_revert(self):
        calls = []

        def counted(original, gm):
            calls.append(gm)
            return original(gm)

        change = dataclasses.replace(DECLARED[TARGET], replacement=counted)
        gm = torch.fx.symbolic_trace(lambda x: x + 1)
        with mock.patch.dict(DECLARED, {TARGET: change}):
            with torch_overlay.applied("remat"):
                late = partitioners.reordering_to_mimic_autograd_engine
                late(gm)
            late(gm)
        self.assertEqual(len(calls), 1)


class TestCaches(OverlayCase):
    def test_tag_keeps_what_the_user_set(self):
        with torch.compiler.config.patch(cache_key_tag="mine"):
            torch_overlay.apply("remat")
            self.assertRegex(tag(), r"^mine\+torch_overlay-[0-9a-f]{16}$")
            torch_overlay.revert()
            self.assertEqual(tag(), "mine")

    def test_tag_keeps_what_the_user_sets_later(self):
        config = torch.compiler.config
        with torch_overlay.applied("remat"):
            with config.patch(cache_key_tag="mine"):
                self.assertRegex(tag(), r"^mine\+torch_overlay-")
            self.assertRegex(tag(), r"^torch_overlay-")
            seen = []

            def other_thread():
                config.cache_key_tag = "theirs"
                seen.append(tag())

            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
            self.assertRegex(seen[0], r"^theirs\+torch_overlay-")
        with config.patch(cache_key_tag="a"):
            torch_overlay.apply("remat")
        self.assertRegex(tag(), r"^torch_overlay-")
        torch_overlay.revert()
        self.assertEqual(tag(), "")

    def test_config_in_another_thread_follows(self):
        steps = [threading.Event() for _ in range(3)]
        seen = []

        def other_thread():
            functorch_config.save_config_portable()
            seen.append(functorch_config.get_hash())
            steps[0].set()
            steps[1].wait()
            functorch_config.use_site_remat = "all"
            seen.append(functorch_config.get_hash())
            steps[2].wait()
            seen.append("use_site_remat" in functorch_config.save_config_portable())

        thread = threading.Thread(target=other_thread)
        thread.start()
        steps[0].wait()
        torch_overlay.apply("remat")
        steps[1].set()
        while len(seen) < 2:
            time.sleep(0.01)
        torch_overlay.revert()
        steps[2].set()
        thread.join()
        self.assertNotEqual(seen[0], seen[1])
        self.assertIs(seen[2], False)

    def test_tag_tells_values_apart(self):
        tags = []
        for feature in ("remat=light", "remat=all", "remat=light"):
            with torch_overlay.applied(feature):
                tags.append(tag())
        self.assertEqual(tags[0], tags[2])
        self.assertNotEqual(tags[0], tags[1])

    def compile_once(self):
        """Hits of the AOT cache and calls of the pass in one fresh compilation."""
        torch._dynamo.reset()
        counters.clear()
        calls = []
        from torch_overlay._functorch._activation_checkpointing import (
            use_site_remat as ours,
        )

        plain = ours.use_site_remat

        def counted(gm, mode, **options):
            calls.append(mode)
            return plain(gm, mode, **options)

        x = torch.ones(8, 8, requires_grad=True)
        with mock.patch.object(ours, "use_site_remat", counted):
            torch.compile(lambda x: x.sin().cos().sum())(x).backward()
        return counters["aot_autograd"]["autograd_cache_hit"], len(calls)

    @fresh_cache()
    def test_warm_caches_are_neither_used_nor_poisoned(self):
        self.enterContext(functorch_config.patch(enable_autograd_cache=True))
        self.enterContext(torch._inductor.config.patch(fx_graph_cache=True))
        self.assertEqual(self.compile_once(), (0, 0))
        self.assertEqual(self.compile_once(), (1, 0))
        with torch_overlay.applied("remat"):
            self.assertEqual(self.compile_once(), (0, 1))
            self.assertEqual(self.compile_once(), (1, 0))
        self.assertEqual(self.compile_once(), (1, 0))


class TestProcesses(TestCase):
    """Autoload, compile workers, spawned processes and the command line."""

    SHOW = """
        import sys, torch._functorch.config
        print(getattr(torch._functorch.config, "use_site_remat", "plain"), sys.argv[1:])
    """

    def setUp(self):
        super().setUp()
        # The entry point is what is tested here.
        self.assertTrue(_is_autoloaded(), "install the package: pip install -e .")

    def test_autoload(self):
        for spec, shown in [
            ("", "plain"),
            ("0", "plain"),
            ("1", "plain"),
            ("remat", "light"),
            ("remat=all", "all"),
        ]:
            code, out, err = run_python(self.SHOW, TORCH_OVERLAY=spec)
            self.assertEqual((code, out), (0, f"{shown} []\n"), err)

    def test_autoload_of_all_correctness_features(self):
        code, out, err = run_python(
            """
            import torch, torch_overlay
            rows = torch_overlay.status()
            print(sorted({r.feature for r in rows if r.state == "applied"}))
            """,
            TORCH_OVERLAY="1",
        )
        features = _manifest.FEATURES.values()
        correct = [f.name for f in features if f.tier == "correctness"]
        self.assertEqual((code, out), (0, f"{sorted(correct)}\n"), err)

    def test_autoload_of_an_unknown_feature_fails_the_import(self):
        code, _, err = run_python(self.SHOW, TORCH_OVERLAY="rng2")
        self.assertEqual(code, 1)
        self.assertIn("unknown feature 'rng2'; accepted are", err)

    def test_compile_worker(self):
        code, out, err = run_python(
            """
            import torch
            import torch_overlay
            from torch._inductor.compile_worker.subproc_pool import SubprocPool
            if __name__ == "__main__":
                pool = SubprocPool(1)
                print({r.state for r in pool.submit(torch_overlay.status).result()})
                pool.shutdown()
            """,
            TORCH_OVERLAY=",".join(_manifest.FEATURES),
        )
        self.assertEqual((code, out), (0, "{'applied'}\n"), err)

    def test_run_script(self):
        code, out, err = run_python(
            self.SHOW + "\n        sys.exit(7)",
            *"-m torch_overlay run --features remat=all PROGRAM a --features b".split(),
        )
        self.assertEqual((code, out), (7, "all ['a', '--features', 'b']\n"), err)

    def test_run_module(self):
        code, out, err = run_python(
            "",
            *"-m torch_overlay run --features remat -m calendar 2024 2".split(),
        )
        self.assertEqual(code, 0, err)
        self.assertIn("February 2024", out)

    def test_run_covers_spawned_processes(self):
        code, out, err = run_python(
            """
            import multiprocessing as mp
            def show():
                import torch._functorch.config
                print(torch._functorch.config.use_site_remat, flush=True)
            if __name__ == "__main__":
                p = mp.get_context("spawn").Process(target=show)
                p.start()
                p.join()
            """,
            *"-m torch_overlay run --features remat PROGRAM".split(),
        )
        self.assertEqual((code, out), (0, "light\n"), err)

    def test_run_errors(self):
        for args, message in [
            ("--features nope PROGRAM", "unknown feature 'nope'"),
            ("--features remat nothing.py", "nothing.py is not a file"),
        ]:
            code, _, err = run_python("", *f"-m torch_overlay run {args}".split())
            self.assertEqual(code, 2)
            self.assertIn(message, err)
        code, _, err = run_python(
            "",
            *"-m torch_overlay run PROGRAM".split(),
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )
        self.assertEqual(code, 2)
        self.assertIn("unset it", err)

    def test_status(self):
        code, out, err = run_python("", "-m", "torch_overlay", "status", "--json")
        self.assertEqual(code, 0, err)
        report = json.loads(out)
        self.assertEqual(report["torch"], torch.__version__)
        targets = {change.target for change in DECLARED.values()}
        self.assertEqual({r["target"] for r in report["overrides"]}, targets)
        for row in report["overrides"]:
            self.assertEqual(
                set(row) & {"target", "feature", "patch", "issue", "state"},
                {"target", "feature", "patch", "issue", "state"},
            )

    def test_status_of_a_mismatch(self):
        code, out, err = run_python(
            """
            import sys
            from unittest import mock
            from torch_overlay import __main__ as cli, _overrides
            with mock.patch.object(_overrides, "fingerprint", lambda text: "f" * 64):
                sys.exit(cli.main(["status"]))
            """
        )
        self.assertEqual(code, 1)
        self.assertIn("mismatch", out)
        self.assertIn("f" * 64, err)
        self.assertIn(f"verify --diff {TARGET}", err)

    def test_verify_diff(self):
        with tempfile.TemporaryDirectory() as other:
            path = _sources.target_file(TARGET, _sources.torch_root())
            folder = os.path.join(other, "torch", "_functorch")
            os.makedirs(folder)
            copy = os.path.join(folder, "partitioners.py")
            text = path.read_text()
            for changed, code_wanted in [(False, 0), (True, 1)]:
                if changed:
                    text = text.replace("new_graph = fx.Graph()", "new_graph = None")
                with open(copy, "w") as f:
                    f.write(text)
                code, out, err = run_python(
                    "",
                    *f"-m torch_overlay verify --diff {TARGET}".split(),
                    "--against",
                    other,
                )
                self.assertEqual(code, code_wanted, err)
                self.assertEqual("-    new_graph = None" in out, changed)


if __name__ == "__main__":
    run_tests()
