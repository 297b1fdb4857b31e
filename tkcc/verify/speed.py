"""Paired timing of a candidate against the live incumbent, and the decision on its signs.

A pair is one round over all cells: in each, the same recorded steps with fresh tokens and fresh page tables run on both
runners, in random order, by this process's clock; the outputs of every timed step are compared. The pair's unit is the
workload's time, so a gain is what users would see, not a mean of cells.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tkcc.stats.eprocess import Interval, SignEProcess, bootstrap_log_ratio, centre_and_spread, median, median_error
from tkcc.verify import errors
from tkcc.verify.cells import TimedCell
from tkcc.verify.contexts import Content, Contexts
from tkcc.verify.executor import Executor, kv_at, slots_of

MIN_UNIT_S = 0.005  # shorter steps are repeated within a unit: a clock call and a wake-up cost some 50 us
MAX_REPEATS = 16
FUTILITY_ALPHA = 0.05
CELL_REGRESS_LIMIT = 0.01  # log-gain
CELL_HOLD_PAIRS = 12  # for which a cell that looks worse holds an accept back
CELL_REGRESS_SIGMAS = 1.645  # one-sided 95 %: so sure a cell must be to be worse than that
# Below this, two results never count as different: what a calibration of a few steps has not seen is no fault. Work
# left out, or done in the next lower precision, is an order of magnitude above it.
AGREEMENT_FLOOR = {torch.float32: 5e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
AGREEMENT_FACTOR = 4.0  # two right results may be this times as far apart as a result may be from the truth
TWIN_FACTOR = 8.0  # ... or this times as far as two orders of the baseline's sums were seen to be


class WrongOutputError(Exception):
    """A timed step's output is not what the incumbent computed on the same inputs."""


@dataclass(slots=True)
class CellTimes:
    cell: TimedCell
    incumbent_s: list[float] = field(default_factory=list)  # per step, one entry a pair
    candidate_s: list[float] = field(default_factory=list)

    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.incumbent_s, self.candidate_s, strict=True))

    @property
    def best_log_gain(self) -> float:
        """What its log-gain may be at most, given how much its pairs scatter."""
        logs = [math.log(a / b) for a, b in self.pairs()]
        centre, spread = centre_and_spread(logs)
        return centre + CELL_REGRESS_SIGMAS * median_error(spread, len(logs))


@dataclass(slots=True)
class Timing:
    """What was measured; pairs of the workload's time, (incumbent, candidate), in seconds."""

    cells: list[CellTimes]
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @staticmethod
    def of(cells: Sequence[TimedCell]) -> "Timing":
        return Timing([CellTimes(cell) for cell in cells])

    def gain(self, seed: int) -> Interval:
        return bootstrap_log_ratio(self.pairs, seed)

    def worst_cell(self) -> tuple[CellTimes, float]:
        """The cell with the smallest median log-gain."""
        gains = [(times, log_gain(times.pairs())) for times in self.cells]
        return min(gains, key=lambda g: g[1])

    def surest_regress(self) -> tuple[CellTimes, float]:
        """The cell whose log-gain may be the least at most, and that bound."""
        return min(((times, times.best_log_gain) for times in self.cells), key=lambda g: g[1])


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far apart two results are, or may be, as a share of the RMS of what is compared."""

    logits_ratio: float
    kv_ratio: float

    def wider(self, other: "Agreement") -> "Agreement":
        return Agreement(max(self.logits_ratio, other.logits_ratio), max(self.kv_ratio, other.kv_ratio))

    @staticmethod
    def floor(dtype: torch.dtype) -> "Agreement":
        return Agreement(AGREEMENT_FLOOR[dtype], AGREEMENT_FLOOR[dtype])

    def times(self, factor: float) -> "Agreement":
        return Agreement(factor * self.logits_ratio, factor * self.kv_ratio)


class Pairing:
    """Two executors, and the fresh inputs that both are given."""

    def __init__(
        self,
        incumbent: Executor,
        candidate: Executor,
        timing: Timing,
        agreement: Agreement,
        content: Content,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.incumbent, self.candidate = incumbent, candidate
        self.agreement, self.vocab_size = agreement, vocab_size
        self.timing = timing
        self.rng = random.Random(seed)
        self.contexts = Contexts(content, (incumbent, candidate), self.rng)
        self.block_tokens = incumbent.kv.k_lnksd.shape[3]
        self.repeats = [1] * len(timing.cells)

    def warm_up(self, timeout_s: float) -> None:
        """Every cell once on both, untimed but compared; sets how often short steps repeat."""
        for i, cell in enumerate(self.timing.cells):
            slow_s = min(self._unit(cell.cell, 1, timeout_s))
            self.repeats[i] = min(MAX_REPEATS, max(1, math.ceil(MIN_UNIT_S / slow_s)))

    def run_pair(self, timeout_s: Callable[[int], float]) -> tuple[float, float]:
        """One round over all cells; returns the workload's (incumbent, candidate) seconds."""
        totals = [0.0, 0.0]
        for i, times in enumerate(self.timing.cells):
            a_s, b_s = self._unit(times.cell, self.repeats[i], timeout_s(i))
            times.incumbent_s.append(a_s)
            times.candidate_s.append(b_s)
            totals[0] += times.cell.count * a_s
            totals[1] += times.cell.count * b_s
        self.timing.pairs.append((totals[0], totals[1]))
        return totals[0], totals[1]

    def _unit(self, cell: TimedCell, repeats: int, timeout_s: float) -> tuple[float, float]:
        """Mean seconds of a step on each; the same steps, one runner after the other, in random order."""
        both = (self.incumbent, self.candidate)
        steps = [self.contexts.fresh(self.rng.choice(cell.steps), self.vocab_size) for _ in range(repeats)]
        outputs, times = {}, {}
        order = [0, 1]
        self.rng.shuffle(order)
        for side in order:
            total_s, found = 0.0, []
            for k, step in enumerate(steps):
                result = both[side].step(step, timeout_s, reuse_inputs=k % 2 == 1)
                total_s += result.elapsed_s
                found.append((result.logits_bv, *kv_at(both[side].kv, slots_of(step, self.block_tokens))))
            outputs[side], times[side] = found, total_s / repeats
        for a, b in zip(outputs[0], outputs[1], strict=True):
            self._compare(apart(a, b), cell)
        return times[0], times[1]

    def _compare(self, found: Agreement, cell: TimedCell) -> None:
        allowed = self.agreement
        where = f"of a timed step ({cell.cell.phase} batch {cell.cell.batch})"
        if not found.logits_ratio <= allowed.logits_ratio:
            raise WrongOutputError(
                f"logits {where} are {found.logits_ratio:.3g} x their RMS off, allowed is {allowed.logits_ratio:.3g}"
            )
        if not found.kv_ratio <= allowed.kv_ratio:
            raise WrongOutputError(
                f"KV {where} is {found.kv_ratio:.3g} x its RMS off, allowed is {allowed.kv_ratio:.3g}"
            )


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Agreement:
    """(logits, K, V) of one step against those of another executor; NaN where either has one."""
    ratios = [float((x.double() - y.double()).abs().max()) / errors.rms(x) for x, y in zip(a, b, strict=True)]
    kv = math.nan if any(map(math.isnan, ratios)) else max(ratios[1:])
    return Agreement(ratios[0], kv)


def log_gain(pairs: Sequence[tuple[float, float]]) -> float:
    return median([math.log(a / b) for a, b in pairs])


@dataclass(slots=True)
class SpeedTest:
    """The sequential decision over pairs."""

    alpha: float
    min_gain: float
    max_pairs: int
    process: SignEProcess = field(default_factory=SignEProcess)
    accepted_at: int = 0  # pairs, once the e-process accepts

    def update(self, incumbent_s: float, candidate_s: float) -> None:
        """A win must be worth `min_gain`; a tie is a loss."""
        self.process.update(math.log(incumbent_s / candidate_s) > self.min_gain)

    def decision(self, timing: Timing) -> str:
        """ "faster", "regressed", "futile", or "" while pairs are still wanted.

        A cell below the regress limit holds an accept back for some pairs, which show whether it was noise: a cell that
        the candidate leaves alone falls below the limit by chance as often as its times scatter by more than that.
        """
        pairs = len(timing.pairs)
        is_last = pairs >= self.max_pairs
        if self.process.accepts(self.alpha):
            self.accepted_at = self.accepted_at or pairs
            _, found = timing.worst_cell()
            if found >= -CELL_REGRESS_LIMIT:
                return "faster"
            if not is_last and pairs < self.accepted_at + CELL_HOLD_PAIRS:
                return ""
            return "regressed" if timing.surest_regress()[1] < -CELL_REGRESS_LIMIT else "faster"
        return "futile" if is_last or self.process.is_futile(FUTILITY_ALPHA) else ""
