"""The decision on speed, and the pairing it rests on, over executors whose clock is a table."""

import math
import random

import pytest
import torch

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.models.forward import Cell, KVCache
from tkcc.verify import roofline, speed
from tkcc.verify.cells import TimedCell
from tkcc.verify.contexts import Content, Contexts
from tkcc.verify.executor import StepResult, slots_of
from tkcc.verify.speed import CELL_REGRESS_LIMIT, Agreement, Pairing, SpeedTest, Timing, WrongOutputError
from tkcc.verify.trial import is_sized

STEP = StepBatch(StepKind.DECODE, (StepRequest((3,), 9, (5, 6)), StepRequest((4,), 4, (5,))))
CELLS = (
    TimedCell(Cell("decode", 2, 1, 10, 0.5), 10.0, (STEP,)),
    TimedCell(Cell("decode", 1, 1, 10, 0.5), 10.0, (StepBatch(StepKind.DECODE, STEP.requests[:1]),)),
)
TIGHT = Agreement(1e-3, 1e-3)
HEADS = ((7, 8, 9),)
# Two sequences of two blocks; block i of sequence s holds 10 s + i + 1.
CONTENT = Content(
    *(torch.tensor([1.0, 2.0, 11.0, 12.0])[None, :, None, None, None].repeat(1, 1, 1, 8, 4),) * 2, 2, HEADS
)


class Machine:
    """An executor that computes a function of its inputs and cache; each step takes what `times_s` says."""

    def __init__(self, times_s: dict[int, float], noise: float = 0.0, seed: int = 0, wrong: float = 0.0) -> None:
        self.kv = KVCache(torch.ones(1, 40, 1, 8, 4), torch.ones(1, 40, 1, 8, 4))
        self.times_s, self.noise, self.wrong = times_s, noise, wrong
        self.rng = random.Random(seed)
        self.seen: list[StepBatch] = []

    def step(self, step: StepBatch, timeout_s: float, extra_pages: int = 0, reuse_inputs: bool = False) -> StepResult:
        self.seen.append(step)
        slots = slots_of(step, 8)
        for cache in (self.kv.k_lnksd, self.kv.v_lnksd):
            cache[:, slots // 8, :, slots % 8] = torch.tensor([float(r.tokens[0]) for r in step.requests])[
                :, None, None, None
            ]
        logits = torch.tensor([[float(r.tokens[0] + sum(r.blocks)), 1.0] for r in step.requests])
        elapsed = self.times_s[len(step.requests)] * math.exp(self.rng.gauss(0.0, self.noise))
        return StepResult(logits * (1 + self.wrong), elapsed)


def measure(a: Machine, b: Machine, test: SpeedTest, pairs: int = 100) -> tuple[str, Timing]:
    timing = Timing.of(CELLS)
    pairing = Pairing(a, b, timing, TIGHT, CONTENT, 100, 1)
    decision = ""
    while not decision and len(timing.pairs) < pairs:
        test.update(*pairing.run_pair(lambda i: 1.0))
        decision = test.decision(timing)
    return decision, timing


def test_a_real_gain_is_accepted_in_few_pairs_and_sized_right() -> None:
    test = SpeedTest(alpha=0.005, min_gain=0.005, max_pairs=60)
    decision, timing = measure(Machine({1: 0.01, 2: 0.02}, 0.02), Machine({1: 0.009, 2: 0.018}, 0.02, 1), test)
    assert decision == "faster" and len(timing.pairs) < 25
    assert timing.gain(0).median == pytest.approx(math.log(1 / 0.9), abs=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_no_gain_is_not_accepted(seed: int) -> None:
    test = SpeedTest(alpha=0.005, min_gain=0.005, max_pairs=60)
    decision, _ = measure(Machine({1: 0.01, 2: 0.02}, 0.05, seed), Machine({1: 0.01, 2: 0.02}, 0.05, 99 + seed), test)
    assert decision == "futile"


def test_a_gain_that_is_not_worth_it_is_no_win() -> None:
    test = SpeedTest(alpha=0.05, min_gain=0.05, max_pairs=30)
    decision, _ = measure(Machine({1: 0.01, 2: 0.02}), Machine({1: 0.0098, 2: 0.0196}), test)
    assert decision == "futile" and test.process.wins == 0


def test_a_cell_that_regresses_is_not_paid_for_by_another() -> None:
    test = SpeedTest(alpha=0.05, min_gain=0.005, max_pairs=30)
    decision, timing = measure(Machine({1: 0.01, 2: 0.02}), Machine({1: 0.011, 2: 0.01}), test)
    cell, log_gain = timing.worst_cell()
    assert decision == "regressed" and cell.cell.cell.batch == 1 and log_gain == pytest.approx(math.log(10 / 11))


def test_a_cell_that_scatters_is_not_taken_for_a_regress() -> None:
    test = SpeedTest(alpha=0.05, min_gain=0.005, max_pairs=8)
    rng = random.Random(3)
    timing = Timing.of(CELLS)
    for _ in range(8):
        test.update(2.0, 1.0)
        timing.pairs.append((2.0, 1.0))
        for times, incumbent_s in zip(timing.cells, (1.0, 2.0), strict=True):
            times.incumbent_s.append(incumbent_s)
        timing.cells[0].candidate_s.append(1.02 * rng.uniform(0.9, 1.1))
        timing.cells[1].candidate_s.append(1.0)
    assert timing.worst_cell()[1] < -CELL_REGRESS_LIMIT and test.decision(timing) == "faster"
    timing.cells[0].candidate_s = [1.02] * 8
    assert test.decision(timing) == "regressed"


def test_the_unit_is_the_workloads_time_not_a_mean_of_cells() -> None:
    _, timing = measure(Machine({1: 0.01, 2: 1.0}), Machine({1: 0.001, 2: 1.0}), SpeedTest(0.05, 0.5, 3))
    assert timing.pairs[0] == pytest.approx((10.1, 10.01))


@pytest.mark.parametrize("wrong", [0.01, math.nan])
def test_a_timed_output_that_differs_ends_the_trial(wrong: float) -> None:
    with pytest.raises(WrongOutputError, match="of a timed step"):
        measure(Machine({1: 1.0, 2: 1.0}), Machine({1: 0.1, 2: 0.1}, wrong=wrong), SpeedTest(0.05, 0.0, 5))


def test_both_sides_get_the_same_fresh_inputs_in_random_order() -> None:
    a, b = Machine({1: 0.01, 2: 0.01}), Machine({1: 0.01, 2: 0.01})
    measure(a, b, SpeedTest(0.001, 0.0, 40))
    assert a.seen == b.seen and len({step.requests[0].tokens for step in a.seen}) > 8
    assert len({step.requests[0].blocks for step in a.seen}) > 8
    shared = [step for step in a.seen if len(step.requests) == 2]
    assert all(step.requests[0].blocks[0] == step.requests[1].blocks[0] for step in shared)


def test_what_a_step_attends_to_is_real_and_in_order() -> None:
    """Whatever earlier steps wrote: before each step, block i of a context is block i of a sequence, on both sides."""

    class Looking(Machine):
        def step(self, step: StepBatch, *args: object, **kwargs: object) -> StepResult:
            for r in step.requests:
                held = [float(self.kv.k_lnksd[0, block, 0, 0, 0]) for block in r.blocks]
                assert [value % 10 for value in held] == [float(i + 1) for i in range(len(r.blocks))]
            return super().step(step, 0.0)

    measure(Looking({1: 0.01, 2: 0.01}), Looking({1: 0.01, 2: 0.01}), SpeedTest(0.001, 0.0, 40))


def test_a_sequence_that_a_step_begins_begins_well() -> None:
    contexts = Contexts(CONTENT, (Machine({}),), random.Random(0))
    step = StepBatch(StepKind.PREFILL, (StepRequest((1,) * 6, 0, (1,)), StepRequest((1,) * 6, 8, (2, 3))))
    first, second = contexts.fresh(step, 100).requests
    assert first.tokens[:3] == HEADS[0] != second.tokens[:3] and len(first.tokens) == len(second.tokens) == 6


def test_short_steps_are_repeated_within_a_unit() -> None:
    a, b = Machine({1: 0.0005, 2: 0.1}), Machine({1: 0.0005, 2: 0.1})
    pairing = Pairing(a, b, Timing.of(CELLS), TIGHT, CONTENT, 100, 1)
    pairing.warm_up(1.0)
    assert pairing.repeats == [1, 10]


def test_nan_anywhere_in_the_cache_is_nan_in_the_comparison() -> None:
    a = (torch.ones(2, 3), torch.ones(2), torch.ones(2))
    b = (torch.ones(2, 3), torch.ones(2), torch.tensor([1.0, math.nan]))
    assert math.isnan(speed.apart(a, b).kv_ratio)


def test_the_least_time_of_a_step_grows_with_weights_in_decode_and_with_tokens_in_prefill() -> None:
    from tests.verify.test_challenge import PLAIN

    device = roofline.Device(read_bytes_per_s=1e9, flops_per_s=1e9)
    one, two = (roofline.least_s(PLAIN, device, cell.steps[0]) for cell in CELLS)
    assert one > 0 and two > 0
    long = StepBatch(StepKind.PREFILL, (StepRequest((1,) * 400, 0, (1,)),))
    assert roofline.least_s(PLAIN, device, long) > 10 * one


def sized(pairs: int, spread: float, seconds: float) -> bool:
    rng = random.Random(pairs)
    timing = Timing.of(CELLS)
    timing.pairs = [(math.exp(0.3 + rng.gauss(0.0, spread)), 1.0) for _ in range(pairs)]
    return is_sized(timing, seconds)


@pytest.mark.parametrize(
    "case, pairs, spread, seconds, want",
    [
        ("a narrow interval is enough", 16, 0.002, 5.0, True),
        ("a wide one is not", 16, 0.2, 5.0, False),
        ("but too few pairs are never", 8, 0.0001, 5.0, False),
        ("time ends it", 6, 0.2, 121.0, True),
        ("not before there is an interval at all", 5, 0.2, 999.0, False),
    ],
)
def test_an_estimate_ends_when_the_size_is_known(
    case: str, pairs: int, spread: float, seconds: float, want: bool
) -> None:
    assert sized(pairs, spread, seconds) is want
