# Owner(s): ["oncall: pt2"]
import json

from patched_env import run_script
from torch.testing._internal.common_utils import run_tests, TestCase


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

    def test_cannot_run(self):
        code, _, err = run_script("repro_190758.py", "--device", "nowhere")
        self.assertEqual(code, 2)
        self.assertIn("repro_190758: RuntimeError: ", err)


if __name__ == "__main__":
    run_tests()
