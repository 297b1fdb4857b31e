"""One candidate's trial: correctness on a private challenge set, then paired timing, each in fresh runners.

Whatever a candidate does becomes a named outcome here. What is the incumbent's or the tier's own fault is EXPIRED: it
is not held against the candidate.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tkcc.api.report import AlphaTicket, Correctness, Outcome
from tkcc.engine.tier.arena import Geometry
from tkcc.engine.tier.holder import write_sealed
from tkcc.verify import challenge, correctness, errors, roofline
from tkcc.verify.cells import TimedCell
from tkcc.verify.challenge import ChallengeSet
from tkcc.verify.contexts import Content
from tkcc.verify.errors import Limits
from tkcc.verify.executor import CandidateError, RemoteRunner, RunnerGoneError, RunnerLateError
from tkcc.verify.link import SupervisorLink
from tkcc.verify.model import TierModel
from tkcc.verify.speed import Agreement, Pairing, SpeedTest, Timing, WrongOutputError

ROTATE_PAIRS = 12  # fresh runners after so many pairs: one pair of processes has luck that the code has not
ESTIMATE_PAIRS, ESTIMATE_S = 12, 60.0  # at least so many, but for half of them after so long
ESTIMATE_WIDTH, ESTIMATE_WIDTH_RATIO = 0.01, 0.05  # of the 95 % interval: log-gain, or share of the gain
STEP_FACTOR, STEP_FLOOR_S = 10.0, 2.0  # a step's deadline: this times the incumbent's, plus this


class RefusalError(Exception):
    """A trial's end, by name."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass(frozen=True, slots=True)
class ReadyChallenge:
    """A set with its limits, made from the baseline's own run of it."""

    set: ChallengeSet
    limits: Limits
    step_s: float  # the baseline's slowest


class Runners:
    """Has runners made and killed by the supervisor."""

    def __init__(
        self, link: SupervisorLink, model: TierModel, geometry: Geometry, load_s: float, prepare_s: float
    ) -> None:
        self.link, self.model, self.geometry = link, model, geometry
        self.load_s, self.prepare_s = load_s, prepare_s

    @contextlib.contextmanager
    def open(
        self, digest: str, norms_fd: int | None = None, phases: dict[str, float] | None = None
    ) -> Iterator[RemoteRunner]:
        """A prepared runner of this candidate, killed at the end. Raises RefusalError for what it does meanwhile."""
        phases = {} if phases is None else phases
        clock = _Laps(phases)
        message = self.link.call("spawn", digest=digest)
        model = self.model
        body = message.body
        runner = RemoteRunner(
            body["runner"], body["pid"], message.fds, model.config, model.dtype_name, self.geometry, self._retire
        )
        phases["build"] = message.body["built_s"]
        clock.lap("fork")
        try:
            with blame(runner):
                runner.load(model.norms_fd if norms_fd is None else norms_fd, self.load_s)
                clock.lap("load")
                runner.prepare(self.prepare_s)
                clock.lap("prepare")
            yield runner
        finally:
            runner.close()

    def _retire(self, runner: int, is_gone: bool) -> str:
        return str(self.link.call("retire", runner=runner, is_gone=is_gone).body["end"])


class _Laps:
    def __init__(self, phases: dict[str, float]) -> None:
        self.phases, self.at = phases, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name] = now - self.at
        self.at = now


@contextlib.contextmanager
def blame(runner: RemoteRunner, incumbent: RemoteRunner | None = None) -> Iterator[None]:
    """Turns what a candidate's runner does wrong into the trial's end."""
    try:
        yield
    except (CandidateError, RunnerGoneError, RunnerLateError, WrongOutputError) as err:
        if incumbent is not None and incumbent.failed:
            raise RefusalError(Outcome.EXPIRED, f"the incumbent failed: {err}") from err
        match err:
            case CandidateError():
                outcome = Outcome.WRONG if err.is_contract else Outcome.CRASHED
                raise RefusalError(outcome, str(err)) from err
            case WrongOutputError():
                raise RefusalError(Outcome.WRONG, str(err)) from err
            case RunnerLateError():
                raise RefusalError(Outcome.TIMEOUT, str(err)) from err
            case _:
                how = runner.close()
                raise RefusalError(Outcome.CRASHED, f"the runner {how or 'ended'}: {err}") from err


def try_correctness(runners: Runners, digest: str, ready: ReadyChallenge, phases: dict[str, float]) -> Correctness:
    """Run the challenge set in a runner whose norm weights are the set's own. Raises RefusalError."""
    norms_fd, _ = write_sealed("tkcc-norms", [(name, ready.set.norms[name]) for name in runners.model.norms])
    timeout_s = STEP_FACTOR * ready.step_s + STEP_FLOOR_S
    try:
        with runners.open(digest, norms_fd, phases) as runner, blame(runner):
            run = correctness.run(runner, ready.set, secrets.randbits(62), timeout_s)
    finally:
        os.close(norms_fd)
    phases["verify"] = run.step_s[0]
    worst, worst_limit = errors.worst_layer(run.errors, ready.limits)
    failure = errors.failure(run.errors, ready.limits) or run.stray_write
    return Correctness(
        passed=not failure,
        positions=run.errors.positions,
        logit_error_median=run.errors.logits.median,
        logit_error_p99=run.errors.logits.p99,
        logit_error_max=run.errors.logits.max,
        limit_median=ready.limits.logits.median,
        limit_p99=ready.limits.logits.p99,
        limit_max=ready.limits.logits.max,
        kv_error_max=worst,
        kv_limit_max=worst_limit,
        challenges=challenge.COVERED,
        failure=failure,
    )


@dataclass(slots=True)
class SpeedTrial:
    """Paired timing of one candidate, over as many fresh pairs of runners as it takes."""

    runners: Runners
    content: Content  # what timed steps attend to
    cells: Sequence[TimedCell]
    agreement: Agreement
    step_s: Sequence[float]  # the incumbent's, by cell: deadlines are made of it
    progress: Callable[[int], None]

    def run(
        self, incumbent: str, candidate: str, ticket: AlphaTicket, is_estimate: bool
    ) -> tuple[str, SpeedTest, Timing]:
        """Returns the decision (see SpeedTest; "sized" or "" for an estimate) and what it rests on. Raises
        RefusalError."""
        test = SpeedTest(ticket.alpha, ticket.min_gain, ticket.max_pairs)
        timing = Timing.of(self.cells)
        decision, began_s = "", time.monotonic()
        while not decision and len(timing.pairs) < ticket.max_pairs:
            with self.runners.open(incumbent) as a, self.runners.open(candidate) as b, blame(b, incumbent=a):
                pairing = self.pair(a, b, timing)
                for _ in range(min(ROTATE_PAIRS, ticket.max_pairs - len(timing.pairs))):
                    a_s, b_s = pairing.run_pair(self._timeout_s)
                    self.progress(len(timing.pairs))
                    test.update(a_s, b_s)
                    if is_estimate:
                        decision = "sized" if is_sized(timing, time.monotonic() - began_s) else ""
                    else:
                        decision = test.decision(timing)
                    if decision:
                        break
        return decision, test, timing

    def pair(self, a: RemoteRunner, b: RemoteRunner, timing: Timing) -> Pairing:
        vocab = self.runners.model.config.vocab_size
        pairing = Pairing(a, b, timing, self.agreement, self.content, vocab, secrets.randbits(62))
        pairing.warm_up(STEP_FACTOR * max(self.step_s) + STEP_FLOOR_S)
        return pairing

    def _timeout_s(self, cell: int) -> float:
        return STEP_FACTOR * self.step_s[cell] + STEP_FLOOR_S


def is_sized(timing: Timing, seconds: float) -> bool:
    """Is the gain known well enough, or has it taken long enough? A stop by width or by a clock favours no size."""
    pairs = len(timing.pairs)
    if 2 * pairs >= ESTIMATE_PAIRS and seconds > ESTIMATE_S:
        return True
    if pairs < ESTIMATE_PAIRS or pairs % 4:
        return False
    gain = timing.gain(seed=pairs)
    return gain.high - gain.low < max(ESTIMATE_WIDTH, ESTIMATE_WIDTH_RATIO * abs(gain.median))


def above_roofline(trial: SpeedTrial, device: roofline.Device, timing: Timing) -> str:
    """The first cell that is faster than the device allows, with its numbers; empty if none is."""
    config = trial.runners.model.config
    for times in timing.cells:
        least_s = min(roofline.least_s(config, device, step) for step in times.cell.steps)
        found_s = sorted(times.candidate_s)[len(times.candidate_s) // 2]
        if found_s < least_s:
            cell = times.cell.cell
            return (
                f"{cell.phase} batch {cell.batch} took {found_s * 1e6:.0f} us, less than the {least_s * 1e6:.0f} us"
                " that this device needs to read the weights"
            )
    return ""
