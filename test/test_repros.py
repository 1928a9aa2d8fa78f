# Owner(s): ["oncall: pt2"]
import json
import unittest

from patched_env import run_script
from torch._inductor import config as inductor_config
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


class TestRepros(TestCase):
    def test_random_numbers_under_a_budget(self):
        script = ["repro_190758.py", "--backend", "aot_eager"]
        code, out, err = run_script(*script)
        self.assertEqual(code, 1, err)
        self.assertRegex(out, r"dropout +aot_eager +\d{4} +\d{4}")
        code, out, err = run_script(*script, "--overlay", "--json")
        self.assertEqual(code, 0, err)
        found = json.loads(out)
        self.assertTrue(found["overlay"])
        self.assertEqual({cell["wrong"] for cell in found["cells"]}, {0})

    @unittest.skipIf(not has_triton_package(), "needs Triton")
    def test_random_stream(self):
        code, out, err = run_script("repro_198333.py", "--interpreter", "--json")
        four = not hasattr(inductor_config, "use_rand4x")
        self.assertEqual(code, int(four), err)
        plain = json.loads(out)["results"]
        self.assertEqual(any(r["bad"] for r in plain), four)
        code, out, err = run_script("repro_198333.py", "--interpreter", "--overlay")
        self.assertEqual(code, 0, err)
        self.assertIn(f"0 of {len(plain)} are wrong", out)

    def test_knapsack(self):
        code, out, err = run_script("repro_197871.py", "--json")
        self.assertEqual(code, 1, err)
        self.assertEqual(sum(r["bad"] for r in json.loads(out)["results"]), 8)
        code, out, err = run_script("repro_197871.py", "--overlay")
        self.assertEqual(code, 0, err)
        self.assertIn("0 of 16 are wrong", out)

    def test_peak_memory(self):
        code, out, err = run_script("repro_197838.py", "--device", "cpu", "--json")
        self.assertEqual(code, 1, err)
        self.assertEqual(sum(r["bad"] for r in json.loads(out)["results"]), 3)
        code, out, err = run_script("repro_197838.py", "--device", "cpu", "--overlay")
        self.assertEqual(code, 0, err)
        self.assertIn("0 of 8 rise", out)

    def test_cannot_run(self):
        code, _, err = run_script("repro_190758.py", "--device", "nowhere")
        self.assertEqual(code, 2)
        self.assertIn("repro_190758: RuntimeError: ", err)


if __name__ == "__main__":
    run_tests()
