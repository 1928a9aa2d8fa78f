# Owner(s): ["oncall: pt2"]
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase


SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import budget_curve
from curve import measure, methods, models, pretend, report
from curve.dry_run import run_dry


MLP = "--predict --model mlp --layers 2 --hidden 64 --inter 128 --seq 64".split()


def run_curve(*args, **env):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "budget_curve.py"), *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


WRAPPER = """
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
async_compile = AsyncCompile()
twice = async_compile.triton("twice", "not even Python", device_str="cuda")
async_compile.wait(globals())

def call(args):
    x, saved, view, size = args
    args.clear()
    assert_size_stride(x, (size, 256), (256, 1))
    out = empty_strided_cpu((256, 256), (256, 1), torch.float32)
    twice.run(saved, out, stream=get_raw_stream(0))
    del saved
    if not {keep}:
        del view
    other = empty_strided_cpu((256, 256), (256, 1), torch.float32)
    extern_kernels.mm(x, out, out=other)
    again = out; del out  # reuse
    del other
    return (again, reinterpret_tensor(x, (65536,), (1,), 0))
"""


class TestDryRun(TestCase):
    def run_dry(self, keep, held):
        with FakeTensorMode():
            x, saved = (torch.empty(256, 256) for _ in range(2))
            inputs = [x, saved, saved[:128].view(-1), 256]
        source = "import torch\n" + WRAPPER.replace("{keep}", str(keep))
        return run_dry(source, {}, inputs, [held, False, False, False])

    def test_live_bytes(self):
        mat = 256 * 256 * 4
        # Both inputs and a result; then with the last use of one input gone.
        for keep, held, peak in (
            (False, False, 3 * mat),
            (True, False, 4 * mat),
            (False, True, 2 * mat),
            (True, True, 3 * mat),
        ):
            found, results, kept = self.run_dry(keep, held)
            self.assertEqual(found, peak)
            self.assertEqual([r.shape for r in results], [(256, 256), (65536,)])
            self.assertEqual(kept, [False, held])

    def test_scratch_of_attention(self):
        source = """
import torch
def call(args):
    args = list(args)
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        *args, 0.0, [True, True, True, False])[:3]
"""
        with FakeTensorMode():
            q = torch.empty(2, 1024, 8, 32, device="cuda").transpose(1, 2)
            lse = torch.empty(2, 8, 1024, device="cuda")
            seed = torch.empty((), dtype=torch.int64)
            inputs = [q, q, q, q, None, q, lse, seed, seed]
        found, _, _ = run_dry(source, {}, inputs, [True] * len(inputs))
        # Three gradients of 2 MiB; 10555392 bytes were measured on an H200.
        self.assertEqual(found, 10555392)


class TestPretendAttention(TestCase):
    def test_kernel_or_plain_operators(self):
        q = torch.randn(2, 4, 16, 8)
        masks = {
            "none": None,
            "whole": torch.ones(2, 1, 16, 16, dtype=torch.bool),
            "expanded": torch.ones(2, 1, 16, 1, dtype=torch.bool).expand(2, 1, 16, 16),
        }
        for name, mask in masks.items():

            def attend(q):
                return pretend._attention(q, q, q, mask)

            graph = make_fx(attend, tracing_mode="fake", _allow_non_fake_inputs=True)(q)
            kernels = "efficient_attention" in str(graph.graph)
            self.assertEqual(kernels, name != "expanded", name)

    def test_plain_operators_take_a_mask_of_bools(self):
        q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        mask = torch.eye(16, dtype=torch.bool).logical_or(torch.rand(16, 16) > 0.5).t()
        self.assertEqual(
            pretend._attention(q, k, v, mask),
            torch.nn.functional.scaled_dot_product_attention(q, k, v, mask),
        )


class TestArguments(TestCase):
    def test_budgets(self):
        self.assertEqual(budget_curve.parse_budgets("0:0.2:0.1"), [0.0, 0.1, 0.2])
        self.assertEqual(budget_curve.parse_budgets("1,0,0.5,0"), [0.0, 0.5, 1.0])
        self.assertEqual(len(budget_curve.parse_budgets("0:1:0.05")), 21)
        for text in ("", "a", "0:1", "0:1:0", "1:0:0.1", "-0.1", "1.5", "nan"):
            with self.assertRaisesRegex(argparse.ArgumentTypeError, "from 0 to 1"):
                budget_curve.parse_budgets(text)

    def test_bad_calls_say_what_is_accepted(self):
        for args, message in [
            (["--predict", "--rng", "keep"], "accepted are off, replay, save"),
            (
                ["--predict", "--methods", "best"],
                "accepted are stock, light, all, peak, memory, ac1",
            ),
            (["--predict", "--jobs", "0"], "--jobs must be at least 1"),
            (["--measure", "--device", "cpu"], "use --predict on a CPU-only machine"),
            ([], "one of the arguments --predict --measure is required"),
            (
                ["--predict", "--model", "mlp", "--model-file", "x.py:f"],
                "exclude each other",
            ),
        ]:
            done = run_curve(*args)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(message, done.stderr)

    def test_measure_needs_a_device(self):
        if torch.cuda.is_available():
            self.skipTest("needs a machine without CUDA; on one with it, it measures")
        done = run_curve("--measure", "--model", "mlp")
        self.assertEqual(done.returncode, 2)
        self.assertIn("sees no CUDA device", done.stderr)


class TestModels(TestCase):
    def test_every_model_trains_a_step(self):
        small = {"layers": 1, "hidden": 32, "inter": 64, "heads": 2, "batch": 1}
        for name in models.DEFAULTS:
            seq = 1024 if name == "resnet" else 16  # its last layers see 1/32 of a side
            sizes = models.sizes_for(name, seq=seq, **small)
            model, inputs = models.build(name, sizes, torch.float32)
            loss = model(**inputs)
            loss.backward()
            norm = sum(
                p.grad.square().sum() for p in model.parameters() if p.grad is not None
            )
            self.assertGreater(norm.item(), 0, name)
            self.assertEqual(models.has_dropout(model), sizes.dropout > 0, name)

    def test_models_with_their_loss(self):
        small = {"hidden": 32, "inter": 64, "heads": 2, "kv_heads": 2, "seq": 16}
        values = {}
        for name in ("lm", "tied", "twice", "values", "encdec"):
            torch.manual_seed(0)
            sizes = models.sizes_for(name, layers=4, **small)
            model, inputs = models.build(name, sizes, torch.float32)
            values[name] = model(**inputs)
            self.assertEqual(values[name].dim(), 0)
            if name != "tied":  # a head of unit variance is sure of its words
                # Nothing is learned yet: every word is about as likely.
                chance = math.log(sizes.vocab)
                self.assertEqual(values[name].item(), chance, atol=1, rtol=0)
        tied, inputs = models.build("tied", sizes, torch.float32)
        self.assertIs(tied.head.weight, tied.embedding.weight)
        encoder_reads = [layer.cross is None for layer in model.encoder]
        decoder_reads = [layer.cross is None for layer in model.layers]
        self.assertEqual((encoder_reads, decoder_reads), ([True] * 2, [False] * 2))
        # Without the value residual the same weights give another loss.
        sizes = models.sizes_for("values", layers=2, **small)
        model, inputs = models.build("values", sizes, torch.float32)
        plain, _ = models.build("lm", sizes, torch.float32)
        plain.load_state_dict(model.state_dict())
        self.assertNotEqual(plain(**inputs).item(), model(**inputs).item())

    def test_published_sizes_are_the_defaults(self):
        self.assertEqual(
            models.DEFAULTS["llama"], models.Sizes(32, 256, 688, 8, 2, 1024)
        )
        self.assertEqual(
            models.DEFAULTS["bert"], models.Sizes(32, 192, 768, 3, 2, 1024, dropout=0.1)
        )

    def test_errors(self):
        with self.assertRaisesRegex(models.ModelError, "square number"):
            models.build("vit", models.sizes_for("vit", seq=15), torch.float32)
        with self.assertRaisesRegex(models.ModelError, "not a multiple of --heads"):
            models.build("llama", models.sizes_for("llama", heads=7), torch.float32)
        with self.assertRaisesRegex(models.ModelError, "FILE.py:function"):
            models.build_from_file("nowhere.py:f", torch.float32)
        with self.assertRaisesRegex(models.ModelError, "nn.ModuleList"):
            models.repeated_layers(torch.nn.Linear(2, 2))

    def test_checkpointing_keeps_gradients(self):
        sizes = models.sizes_for("mlp", layers=3, hidden=16, inter=32, seq=8)
        wanted = None
        for method in (None, "ac1", "ac2", "sac-attn", "sac-mm"):
            model, inputs = models.build("mlp", sizes, torch.float32)
            if method is not None:
                methods.use_checkpointing(model, method)
            model(**inputs).backward()
            found = [p.grad for p in model.parameters()]
            wanted = wanted or found
            self.assertEqual(measure.relative_l2(found, wanted), 0.0)


class TestRows(TestCase):
    def base(self):
        row = dict.fromkeys(budget_curve.FIELDS)
        row.update(model="mlp", layers=2, seq=8, batch=1, dtype="float32", torch="2")
        row.update(device="cpu", backend="inductor")
        return row

    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def store(self, resume=False):
        return budget_curve.Store(self.folder / "rows.json", resume, self.base())

    def test_rows_survive_and_resume_skips_good_ones(self):
        store = self.store()
        store.add({"method": "stock", "budget": 0.5, "liveness_peak_bytes": 7})
        store.add({"method": "stock", "budget": 0.0, "error": "boom"})
        again = self.store(resume=True)
        self.assertTrue(again.has("stock", 0.5, None))
        self.assertFalse(again.has("stock", 0.0, None))
        self.assertEqual([r["budget"] for r in again.rows], [0.5])

    def test_a_new_run_keeps_the_old_file(self):
        self.store().add({"method": "stock", "budget": 1.0})
        self.store()
        kept = json.loads((self.folder / "rows.previous.json").read_text())
        self.assertEqual(kept[0]["budget"], 1.0)

    def test_row_of_several_graphs_is_replaced(self):
        store = self.store()
        for peak in (1, 2):
            store.add({"method": "all", "budget": 0.0, "liveness_peak_bytes": peak})
        self.assertEqual([r["liveness_peak_bytes"] for r in store.rows], [2])

    def test_dead_worker_leaves_error_rows(self):
        store = self.store()
        job = {"points": [["stock", 0.0, None], ["all", 0.0, None]], "rng": "save"}
        with mock.patch.object(budget_curve, "__file__", "/nonexistent/worker.py"):
            budget_curve.run_worker(job, [], store, mock.Mock())
        self.assertEqual(len(store.rows), 2)
        for row in store.rows:
            self.assertIn("worker exited with code", row["error"])
            self.assertEqual(row["rng"], "save")

    def test_policies_are_told_apart(self):
        store = self.store()
        point = {"method": "stock", "budget": 0.5}
        store.add({**point, "liveness_peak_bytes": 7})
        store.add({**point, "rng": "save", "liveness_peak_bytes": 8})
        self.assertEqual([r["liveness_peak_bytes"] for r in store.rows], [7, 8])
        self.assertTrue(store.has("stock", 0.5, None))
        self.assertTrue(store.has("stock", 0.5, None, "save"))
        self.assertFalse(store.has("stock", 0.5, None, "replay"))
        self.assertIn("rng", report.table(store.rows).splitlines()[0])
        self.assertNotIn("rng", report.table(store.rows[:1]).splitlines()[0])

    def test_table_and_plot(self):
        rows = [
            {**self.base(), "method": "stock", "budget": b, "predicted_peak_bytes": p}
            for b, p in [(0.0, 5_000_000), (1.0, 3_000_000)]
        ]
        rows.append({**self.base(), "method": "ac1", "predicted_peak_bytes": 2_000_000})
        rows.append({**self.base(), "method": "all", "budget": 0.0, "error": "no\nway"})
        text = report.table(rows)
        self.assertIn("5.0", text)
        self.assertIn("no", text)
        self.assertNotIn("step ms", text)
        report.plot(rows, self.folder / "plot.png")
        self.assertEqual((self.folder / "plot.png").read_bytes()[1:4], b"PNG")


class TestPredict(TestCase):
    """Whole runs of the command on a two-layer model."""

    def setUp(self):
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.out = Path(folder, "curve.json")

    def rows(self):
        return {(r["method"], r["budget"]): r for r in json.loads(self.out.read_text())}

    def test_inductor(self):
        done = run_curve(
            *MLP, "--budgets", "0,1", "--methods", "stock,all,ac1", "--out", self.out
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = self.rows()
        self.assertEqual(
            set(rows),
            {("stock", 0.0), ("stock", 1.0), ("all", 0.0), ("all", 1.0), ("ac1", None)},
        )
        for row in rows.values():
            self.assertGreater(row["predicted_peak_bytes"], 0)
            self.assertGreater(row["estimated_peak_bytes"], 0)
            self.assertGreater(row["liveness_peak_bytes"], 0)
            self.assertIsNone(row["measured_peak_bytes"])
            self.assertEqual(set(budget_curve.FIELDS) - set(row), set())
        # Budget 0 saves nothing but parameters and the graph's input.
        self.assertEqual(rows["stock", 0.0]["saved_bytes"], 0)
        self.assertGreater(rows["stock", 1.0]["saved_bytes"], 0)
        # gate and up of both layers are computed again: 2 x 2 x 2 x 128 x 64 x 128
        self.assertGreaterEqual(
            rows["stock", 0.0]["recompute_flops"], 8 * 128 * 64 * 128
        )
        self.assertEqual(rows["stock", 1.0]["recompute_flops"], 0)
        self.assertTrue(self.out.with_suffix(".png").exists())
        self.assertIn("predicted MB", done.stdout)

    def test_aot_eager_and_failing_job_and_resume(self):
        args = [*MLP, "--backend", "aot_eager", "--budgets", "0", "--out", self.out]
        done = run_curve(*args, "--methods", "stock,light,eager")
        self.assertEqual(done.returncode, 1, done.stderr)
        rows = self.rows()
        self.assertIn("use --measure", rows["eager", None]["error"])
        for method in ("stock", "light"):
            self.assertIsNone(rows[method, 0.0]["error"])
            self.assertIsNone(rows[method, 0.0]["predicted_peak_bytes"])
        before = self.out.stat().st_mtime_ns
        done = run_curve(*args, "--methods", "stock,light", "--resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreaterEqual(self.out.stat().st_mtime_ns, before)
        self.assertEqual(set(self.rows()), {("stock", 0.0), ("light", 0.0)})

    def test_policies(self):
        args = ["--predict", "--model", "gpt2", "--layers", "2", "--hidden", "32"]
        args += ["--heads", "2", "--vocab", "64", "--batch", "2", "--seq", "128"]
        args += [
            "--dropout",
            "0.1",
            "--backend",
            "aot_eager",
            "--budgets",
            "0",
            "--methods",
            "stock",
        ]
        done = run_curve(*args, "--rng", "off,replay,save", "--out", self.out)
        self.assertEqual(done.returncode, 0, done.stderr)
        saved = {
            row["rng"]: row["saved_bytes"] for row in json.loads(self.out.read_text())
        }
        self.assertEqual(list(saved), ["off", "replay", "save"])
        self.assertEqual(saved["off"], 0)
        # One Mersenne Twister state for each of the five dropouts and both attentions.
        self.assertEqual(saved["replay"] % 5056, 0)
        self.assertGreater(saved["save"], saved["replay"])

    def test_model_file_with_a_graph_break(self):
        source = self.out.with_name("mine.py")
        source.write_text(
            textwrap.dedent(
                """
                import torch

                class Two(torch.nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

                    def forward(self, x):
                        h = self.a(x).sin()
                        torch._dynamo.graph_break()
                        return self.b(h).cos().sum()

                def make():
                    return Two(), {"x": torch.randn(4, 8)}
                """
            )
        )
        args = ["--predict", "--backend", "aot_eager", "--budgets", "0"]
        done = run_curve(*args, "--model-file", f"{source}:make", "--out", self.out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.rows()["stock", 0.0]["model"], f"{source}:make")

        source.write_text("def make():\n    raise RuntimeError('no data')\n")
        done = run_curve(*args, "--model-file", f"{source}:make", "--out", self.out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no data", self.rows()["stock", 0.0]["error"])

    def test_interrupt_keeps_rows(self):
        args = [*MLP, "--backend", "aot_eager", "--jobs", "1", "--budgets", "0:1:0.1"]
        process = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPTS / "budget_curve.py"),
                *args,
                "--out",
                self.out,
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(600):
            if self.out.exists():
                break
            time.sleep(0.1)
        process.send_signal(2)
        process.wait(60)
        self.assertIn(process.returncode, (0, 130))
        self.assertGreater(len(self.rows()), 0)


if __name__ == "__main__":
    run_tests()
