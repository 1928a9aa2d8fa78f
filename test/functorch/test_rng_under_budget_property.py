# Owner(s): ["module: aotdispatch"]
import random

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import checkpoint

import torch_overlay  # overlay only


RANDOM_OPS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
    "rand_like": torch.rand_like,
    "randn": lambda h: h + torch.randn(h.shape),
    "uniform_": lambda h: h + torch.empty_like(h).uniform_(-1, 1),
    "randint": lambda h: h * torch.randint(-1, 2, h.shape),
    "normal": lambda h: torch.normal(h, 1.0),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, True),
    "exponential_": lambda h: h.clone().exponential_() - 1,
}
POINTWISE = {
    "sin": torch.sin,
    "gelu": F.gelu,
    "softmax": lambda h: h.softmax(-1) * 8 - 1,
    "matmul": lambda h: h @ h.tanh() / 8,
}


class Program:
    """``x`` times factors of 1/2 and 2 that hang on random numbers.

    In exact arithmetic the gradient is ``out / x``, and every product and quotient
    here is exact, so a single number drawn again shows.
    """

    def __init__(self, rng):
        self.factors = []
        for _ in range(rng.randint(1, 3)):
            ops = [rng.choice(list(RANDOM_OPS)) for _ in range(rng.randint(1, 3))]
            ops += [rng.choice(list(POINTWISE)) for _ in range(rng.randint(0, 3))]
            rng.shuffle(ops)
            self.factors.append((ops, rng.random() < 0.3))
        while sum(op in RANDOM_OPS for ops, _ in self.factors for op in ops) < 3:
            self.factors[0][0].append(rng.choice(list(RANDOM_OPS)))

    def factor(self, ops, h):
        for op in ops:
            h = (RANDOM_OPS.get(op) or POINTWISE[op])(h)
        return torch.where(h > 0.25, 2.0, 0.5)

    def __call__(self, x):
        out = x
        for ops, in_checkpoint in self.factors:
            start = out.detach()
            if in_checkpoint:
                out = out * checkpoint(self.factor, ops, start, use_reentrant=False)
            else:
                out = out * self.factor(ops, start)
        return out


class TestRandomPrograms(TestCase):
    def check(self, seed, backend):
        rng = random.Random(seed)
        program = Program(rng)
        size = rng.choice((16, 64))
        budget = rng.choice((0, 0.001, 0.05, 0.3, 0.7, 0.99, 1.0))
        policy = rng.choice(("replay", "save"))
        torch._dynamo.reset()
        torch.manual_seed(seed)
        x = torch.exp2(torch.randint(-3, 4, (size, size))).requires_grad_()
        config = {"activation_memory_budget": budget, "rng_recompute": policy}
        if not hasattr(functorch_config, "rng_recompute"):
            del config["rng_recompute"]
        with functorch_config.patch(config):
            out = torch.compile(program, backend=backend, fullgraph=True)(x)
            (grad,) = torch.autograd.grad(out.sum(), x)
        told = f"{seed}: {program.factors} {size} {budget} {policy} {backend}"
        self.assertTrue(torch.equal(grad, (out / x).detach()), told)

    @torch_overlay.applied("rng")  # overlay only
    def test_aot_eager(self):
        for seed in range(100):
            self.check(seed, "aot_eager")

    @torch_overlay.applied("rng")  # overlay only
    def test_inductor(self):
        for seed in range(1000, 1010):
            self.check(seed, "inductor")


if __name__ == "__main__":
    run_tests()
