# Owner(s): ["module: functorch"]

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)

import torch_overlay  # overlay only


BUDGETS = (0, 0.5)
# What ends a program after a matmul.  Its gradient reaches the matmul expanded, or the
# program returns what the matmul's readers make.
ENDS = {
    "scaled_sum": lambda y: y.sum() * 2,
    "double_of_sum": lambda y: y.sum().double(),
    "negated_sum": lambda y: y.sum().neg(),
    "columns": lambda y: y.sum(0).double(),
    "rows": lambda y: y.float().mean(1, keepdim=True),
    "float_of_sum": lambda y: y.sum().float(),
    "logsumexp": lambda y: y.logsumexp(-1),
    "masked_logsumexp": lambda y: y.masked_fill(y > 0, -1e4).logsumexp(0),
    "norm": lambda y: y.norm(dim=-1),
    "norm_of_all": lambda y: y.norm(),
    "amax": lambda y: y.amax(-1),
    "variance": lambda y: y.var(0),
    "expanded": lambda y: y.mean(0).expand(8, 8).cos() + y,
    "expanded_result": lambda y: y[:1].expand(8, 8),
    "softmax": lambda y: y.softmax(-1),
    "cross_entropy": lambda y: F.cross_entropy(y.float(), torch.arange(8)),
    "mse": lambda y: F.mse_loss(y, torch.ones_like(y)),
    "l1": lambda y: F.l1_loss(y, torch.ones_like(y), reduction="sum"),
    "nothing": lambda y: y,
    "two_results": lambda y: (y.sum(0), y.exp().sum()),
}


def of_product(x, w):
    return x @ w


def of_gram_matrix(x, w):
    return (x @ x.t()) + w


def of_embedding(x, w):
    return F.embedding(torch.arange(8), x.exp()) @ w


STARTS = (of_product, of_gram_matrix, of_embedding)


def leaves_of(result):
    return result if isinstance(result, tuple) else (result,)


class TestSavedSetPrograms(TestCase):
    def gradients(self, program, dtype):
        torch.manual_seed(0)
        inputs = [torch.randn(8, 8, dtype=dtype, requires_grad=True) for _ in "xw"]
        results = leaves_of(program(*inputs))
        ones = [torch.ones((), dtype=r.dtype).expand_as(r) for r in results]
        torch.autograd.backward(results, ones)
        found = [i.grad for i in inputs if i.grad is not None]
        return [*(r.detach() for r in results), *found]

    @torch_overlay.applied("rng", "peak")  # overlay only
    @parametrize("start", STARTS, name_fn=lambda start: start.__name__)
    @parametrize("end", [subtest(end, name=name) for name, end in ENDS.items()])
    def test_gradients(self, start, end):
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        for dtype in dtypes if start is of_product else dtypes[:1]:

            def program(x, w):
                return end(start(x, w))

            right = self.gradients(program, dtype)
            for budget in BUDGETS:
                torch._dynamo.reset()
                with functorch_config.patch(activation_memory_budget=budget):
                    compiled = torch.compile(program, backend="aot_eager")
                    found = self.gradients(compiled, dtype)
                self.assertEqual(found, right, msg=f"{dtype} at {budget}")


instantiate_parametrized_tests(TestSavedSetPrograms)

if __name__ == "__main__":
    run_tests()
