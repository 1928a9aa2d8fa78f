# Owner(s): ["module: aotdispatch"]
import random

from torch.testing._internal.common_utils import run_tests, TestCase

from torch_overlay._functorch._activation_checkpointing.liveness import LiveBytes


class TestLiveBytes(TestCase):
    def test_ranges(self):
        # slot      0  1  2  3
        # a, 2 B    2  2
        # b, 5 B       5  5  5
        # c, 1 B          1
        curve = LiveBytes.from_ranges(4, [(0, 1, 2), (1, 3, 5), (2, 2, 1)])
        self.assertEqual([curve.at(i) for i in range(4)], [2, 7, 6, 5])
        self.assertEqual((curve.peak, curve.peak_slot(), curve.area), (7, 1, 20))

    def test_first_of_equal_peaks(self):
        self.assertEqual(LiveBytes([1, 3, 3, 2, 3]).peak_slot(), 1)

    def test_empty(self):
        curve = LiveBytes([])
        self.assertEqual((curve.peak, curve.area), (0, 0))
        curve.add(0, -1, 7)
        self.assertEqual(curve.area, 0)

    def test_random_updates_against_a_list(self):
        rng = random.Random(0)
        for size in (1, 2, 3, 7, 8, 9, 33):
            plain = [rng.randrange(50) for _ in range(size)]
            curve = LiveBytes(plain)
            for _ in range(200):
                first, last = sorted(rng.randrange(size) for _ in range(2))
                delta = rng.randrange(-20, 21)
                curve.add(first, last, delta)
                for i in range(first, last + 1):
                    plain[i] += delta
                slot = rng.randrange(size)
                self.assertEqual(curve.at(slot), plain[slot])
                self.assertEqual(curve.peak, max(plain))
                self.assertEqual(curve.peak_slot(), plain.index(max(plain)))
                self.assertEqual(curve.area, sum(plain))


if __name__ == "__main__":
    run_tests()
