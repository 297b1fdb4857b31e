"""The judge: takes a workload and an incumbent, then candidates; its word is a Report.

It has the reference, the seeds and the only clock, and never learns who proposed a candidate.
"""

import contextlib
import math
import os
import random
import secrets
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from tkcc.api.report import AlphaTicket, CellReport, Outcome, Report
from tkcc.api.workload import Recording
from tkcc.engine.host import device_name
from tkcc.engine.tier.records import Stage
from tkcc.stats.eprocess import bootstrap_log_ratio, centre_and_spread, median, median_error
from tkcc.verify import challenge, contexts, correctness, cost, errors, heads, reference, roofline, speed
from tkcc.verify.challenge import ChallengeSet
from tkcc.verify.errors import Errors, Limits
from tkcc.verify.executor import Local, kv_at, slots_of
from tkcc.verify.link import SupervisorError, SupervisorLink
from tkcc.verify.model import TierModel, permuted
from tkcc.verify.speed import Agreement, SpeedTest, Timing
from tkcc.verify.trial import ReadyChallenge, RefusalError, Runners, SpeedTrial, above_roofline, blame, try_correctness
from tkcc.verify.workload import CHUNK_TOKENS, Plan, make_plan

REFERENCE_SHARE_S = {"fast": 1.5, "slow": 4.0}  # what the reference may take per challenge set
MIN_CHALLENGE_TOKENS, MAX_CHALLENGE_TOKENS = 400, 6000
# Made while there is nothing to do. The slow tier judges seldom, and may share its core with the fast one.
CHALLENGES_AHEAD = {"fast": 2, "slow": 1}
BASELINE_RUNS = 4  # of the newest: the worst of ever more would grow for ever
MAX_POSITIONS = 8192  # longer requests are cut: a tier's memory is bounded
AA_PAIRS, ESTIMATE_AA_PAIRS = 8, 2
FIRST_STEP_S = 30.0  # a step's deadline before anything was measured


@dataclass(slots=True)
class Contest:
    """What stands once a workload and an incumbent are there."""

    digest: str
    trial: SpeedTrial
    noise_floor: float
    calibration: dict[str, Any]


class Judge:
    def __init__(self, link: SupervisorLink, model: TierModel, tier: str, load_s: float, prepare_s: float) -> None:
        self.link, self.model, self.tier = link, model, tier
        self.load_s, self.prepare_s = load_s, prepare_s
        self.device = roofline.measure(model.dtype, model.threads)
        self.plan: Plan | None = None
        self.contest: Contest | None = None
        self.estimates_only = False
        self.challenges: deque[ReadyChallenge] = deque()
        self.baseline_errors: deque[Errors] = deque(maxlen=BASELINE_RUNS)  # in units of what is compared
        self._idle = ThreadPoolExecutor(1, initializer=_yield_to_all)  # priorities are a thread's
        self._ahead: Future[ReadyChallenge] | None = None

    # --- workload and incumbent ---

    def take_workload(self, recording: Recording, estimates_only: bool = False) -> Plan:
        """Steps, cells and challenge size of these requests. Raises RefusalError if the judge itself is not fit.

        estimates_only: nothing will be decided, so no challenges are made and no noise floor is to be known well.
        """
        model = self.model
        max_positions = min(MAX_POSITIONS, model.config.max_positions)
        cost_s = cost.fit(model, max_positions, recording.block_tokens)
        tokens = self._challenge_tokens()
        self.contest = None
        self.challenges.clear()
        self.plan = make_plan(model.config, recording, max_positions, cost_s, tokens, secrets.randbits(62))
        self.baseline = Local(model.config, model.everything, model.dtype, self.plan.geometry, model.threads)
        self.heads = heads.find(model, self.baseline, secrets.randbits(62))
        self.twin_permutation = secrets.randbits(62)
        self.baseline_errors.clear()
        self.estimates_only = estimates_only
        limits = None if estimates_only else self._prove_reordering_passes()
        self.agreement = self._agreement(limits)
        return self.plan

    def _challenge_tokens(self) -> int:
        probe = torch.zeros(64, dtype=torch.int64)
        one_above = reference.ONE_ABOVE[self.model.dtype]
        start = time.perf_counter()
        reference.run(self.model.config, self.model.everything, one_above, [probe], [(0, 63)])
        tokens = int(REFERENCE_SHARE_S[self.tier] * len(probe) / (time.perf_counter() - start))
        return max(MIN_CHALLENGE_TOKENS, min(MAX_CHALLENGE_TOKENS, tokens))

    def _prove_reordering_passes(self) -> Limits:
        """The first challenge set's limits. Limits that refuse a right build would refuse every candidate."""
        ready = self._make_challenge(None, self.twin_permutation)
        run = self._run_baseline(ready.set, permutation=secrets.randbits(62))
        failure = errors.failure(run.errors, ready.limits)
        if failure:
            raise RefusalError(Outcome.QUARANTINED, f"a reordered but equal build fails the limits: {failure}")
        self.challenges.append(ready)  # nobody has seen it
        return ready.limits

    def _agreement(self, limits: Limits | None) -> Agreement:
        """How far the outputs of timed steps may be apart: these have their own inputs, so their own errors."""
        allowed = Agreement.floor(self.model.dtype)
        if limits is not None:
            kv = max(limit / scale for limit, scale in zip(limits.kv_l, limits.kv_scale_l, strict=True))
            known = Agreement(limits.logits.max / limits.logit_scale, kv)
            allowed = allowed.wider(known.times(speed.AGREEMENT_FACTOR))
        model, plan = self.model, self._need_plan()
        twin = Local(
            model.config,
            permuted(model.everything, model.config, self.twin_permutation),
            model.dtype,
            plan.geometry,
            model.threads,
        )
        self.baseline.use(model.everything)
        steps = [step for cell in plan.cells for step in cell.steps]
        self.content = contexts.make_content(
            self.baseline, steps, model.config.vocab_size, self.heads, CHUNK_TOKENS, secrets.randbits(62)
        )
        rng, both = random.Random(secrets.randbits(62)), (self.baseline, twin)
        contents = contexts.Contexts(self.content, both, rng)
        for cell in plan.cells:
            step = contents.fresh(rng.choice(cell.steps), model.config.vocab_size)
            slots = slots_of(step, plan.geometry.block_tokens)
            a, b = ((one.step(step, 0.0).logits_bv, *kv_at(one.kv, slots)) for one in both)
            allowed = allowed.wider(speed.apart(a, b).times(speed.TWIN_FACTOR))
        return allowed

    def take_incumbent(self, digest: str) -> Contest:
        """Run it against itself in another process: what differs is noise. Raises RefusalError, SupervisorError."""
        plan = self._need_plan()
        runners = Runners(self.link, self.model, plan.geometry, self.load_s, self.prepare_s)
        deadlines = [FIRST_STEP_S] * len(plan.cells)
        trial = SpeedTrial(runners, self.content, plan.cells, self.agreement, deadlines, self._progress)
        timing = Timing.of(plan.cells)
        with runners.open(digest) as a, runners.open(digest) as b, blame(b, incumbent=a):
            pairing = trial.pair(a, b, timing)
            for _ in range(ESTIMATE_AA_PAIRS if self.estimates_only else AA_PAIRS):
                pairing.run_pair(lambda _: FIRST_STEP_S)
        logs = [math.log(a / b) for a, b in timing.pairs]
        centre, sigma = centre_and_spread(logs)
        noise_floor = abs(centre) + 1.96 * median_error(sigma, len(logs))  # two-sided 95 %
        trial.step_s = [median(times.incumbent_s) for times in timing.cells]
        self._weigh_cells(trial)
        self.device = self.device.best(roofline.measure(self.model.dtype, self.model.threads))
        calibration = {
            "aaLogRatio": centre,
            "aaPairSigma": sigma,
            "readGbPerS": self.device.read_bytes_per_s / 1e9,
            "gemmGflops": self.device.flops_per_s / 1e9,
            "stepS": list(trial.step_s),
            "challengeTokens": self.plan.challenge.long_tokens if self.plan else 0,
        }
        self.contest = Contest(digest, trial, noise_floor, calibration)
        return self.contest

    def _weigh_cells(self, trial: SpeedTrial) -> None:
        """Shares of the time as measured, in place of the cost model's."""
        spent = [cell.count * s for cell, s in zip(trial.cells, trial.step_s, strict=True)]
        trial.cells = [
            replace(cell, cell=replace(cell.cell, weight_ratio=s / sum(spent)))
            for cell, s in zip(trial.cells, spent, strict=True)
        ]

    # --- challenges ---

    @torch.inference_mode()  # it is a thread's, too
    def _make_challenge(self, *permutations: int | None) -> ReadyChallenge:
        """A set, and limits from the baseline's errors on it, in these orders of its sums (None: its own), and on the
        sets before it."""
        model, plan = self.model, self._need_plan()
        made = challenge.make(
            model.config, model.weights, model.norms, model.dtype, plan.challenge, self.heads, secrets.randbits(62)
        )
        runs = [self._run_baseline(made, permutation) for permutation in permutations]
        logit_scale, kv_scales = correctness.scales(made)
        per_scale = [1 / scale for scale in kv_scales]
        self.baseline_errors.extend(errors.scaled(run.errors, 1 / logit_scale, per_scale) for run in runs)
        known = errors.scaled(errors.worst(self.baseline_errors), logit_scale, kv_scales)
        limits = errors.limits(known, logit_scale, kv_scales, model.dtype)
        return ReadyChallenge(made, limits, max(s for run in runs for s in run.step_s))

    def _make_another(self) -> ReadyChallenge:
        return self._make_challenge(secrets.randbits(62))

    def _run_baseline(self, made: ChallengeSet, permutation: int | None) -> correctness.ChallengeRun:
        """In this process, with the set's norm weights; with a permutation, its sums run in another order."""
        model = self.model
        weights = {**model.weights, **made.norms}
        if permutation is not None:
            weights = permuted(weights, model.config, permutation)
        self.baseline.use(weights)
        return correctness.run(self.baseline, made, secrets.randbits(62), 0.0)

    def work_ahead(self) -> None:
        """Begin a challenge set if there is room for one, in a thread that everything else on this core goes before."""
        if self._ahead is None and self.has_room:
            self._ahead = self._idle.submit(self._make_another)

    @property
    def has_room(self) -> bool:
        if self.contest is None or self.estimates_only:
            return False
        return len(self.challenges) < CHALLENGES_AHEAD[self.tier]

    def take_ahead(self, wait: bool) -> bool:
        """Take over a set begun by `work_ahead`. Until it is done, nothing else here may run. True if none is left."""
        if self._ahead is not None and (wait or self._ahead.done()):
            self.challenges.append(self._ahead.result())
            self._ahead = None
        return self._ahead is None

    # --- a candidate ---

    def judge(self, digest: str, against: str, stage: Stage, ticket: AlphaTicket) -> Report:
        """against: the incumbent, or for an estimate another one that is built."""
        contest = self.contest
        if contest is None:
            return Report(digest, "", self.tier, Outcome.EXPIRED, "no incumbent yet", ticket_id=ticket.id)
        report = Report(
            digest, against, self.tier, Outcome.EXPIRED, "", noise_floor=contest.noise_floor,
            ticket_id=ticket.id, environment=self._environment(stage),
        )  # fmt: skip
        phases: dict[str, float] = {}
        try:
            if not stage.is_estimate:
                self._progress(0, "CORRECTNESS")
                ready = self.challenges.popleft() if self.challenges else self._make_another()
                found = try_correctness(contest.trial.runners, digest, ready, phases)
                report = replace(report, correctness=found, phases_s=phases, reload_s=sum(phases.values()))
                if not found.passed:
                    raise RefusalError(Outcome.WRONG, found.failure)
            self._progress(0, "SPEED")
            decision, test, timing = contest.trial.run(against, digest, ticket, stage.is_estimate)
            report = self._with_timing(report, test, timing)
            if stage.is_estimate:
                return self._sized(report, contest, timing)
            return self._verdict(report, contest, decision, timing, ticket)
        except RefusalError as refusal:
            return replace(report, outcome=refusal.outcome, reason=refusal.reason)
        except SupervisorError as err:
            return replace(report, outcome=Outcome.EXPIRED, reason=str(err))

    def _sized(self, report: Report, contest: Contest, timing: Timing) -> Report:
        """An estimate decides nothing; its outcome says whether the interval is above zero."""
        alarm = above_roofline(contest.trial, self.device, timing)
        if alarm:
            return replace(report, outcome=Outcome.QUARANTINED, reason=alarm)
        low, mid, high = (_saved(x) for x in (report.log_gain_low, report.log_gain, report.log_gain_high))
        reason = f"{mid} of the time saved [{low}, {high}] in {report.pairs} pairs"
        return replace(report, outcome=Outcome.ACCEPTED if report.log_gain_low > 0 else Outcome.FUTILE, reason=reason)

    def _verdict(self, report: Report, contest: Contest, decision: str, timing: Timing, ticket: AlphaTicket) -> Report:
        gain = f"{_saved(report.log_gain)} of the time saved"
        alarm = above_roofline(contest.trial, self.device, timing)
        if alarm:
            return replace(report, outcome=Outcome.QUARANTINED, reason=alarm)
        if decision == "regressed":
            cell, at_most = timing.surest_regress()
            name = f"{cell.cell.cell.phase} batch {cell.cell.cell.batch} context {cell.cell.cell.context_tokens}"
            reason = f"{gain} overall, but for {name} {_saved(at_most)} at best; -1 % is allowed"
            return replace(report, outcome=Outcome.REGRESSED, reason=reason)
        if decision == "futile":
            reason = f"{gain} in {report.pairs} pairs, e-value {report.e_value:.3g} < {1 / ticket.alpha:.3g}"
            return replace(report, outcome=Outcome.FUTILE, reason=reason)
        if not report.log_gain > contest.noise_floor:
            reason = f"{gain} is within this tier's noise floor of {_saved(contest.noise_floor)}"
            return replace(report, outcome=Outcome.FUTILE, reason=reason)
        return replace(report, outcome=Outcome.ACCEPTED, reason=f"{gain} in {report.pairs} pairs")

    def _with_timing(self, report: Report, test: SpeedTest, timing: Timing) -> Report:
        overall = timing.gain(secrets.randbits(31))
        cells = []
        for times in timing.cells:
            gain = bootstrap_log_ratio(times.pairs(), secrets.randbits(31))
            c, took = times.cell.cell, (1e6 * median(times.incumbent_s), 1e6 * median(times.candidate_s))
            shape = (c.phase, c.batch, c.new_tokens, c.context_tokens, c.weight_ratio)
            cells.append(CellReport(*shape, len(times.incumbent_s), *took, *gain))
        return replace(
            report,
            cells=tuple(cells),
            pairs=len(timing.pairs),
            e_value=min(test.process.e_value, 1e300),
            log_gain=overall.median,
            log_gain_low=overall.low,
            log_gain_high=overall.high,
        )

    def _environment(self, stage: Stage) -> dict[str, str]:
        return {
            "stage": str(stage),
            "device": device_name(),
            "torch": torch.__version__,
            "dtype": self.model.dtype_name,
            "threads": str(self.model.threads),
            "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "load_1min": f"{os.getloadavg()[0]:.2f}",
        }

    def _need_plan(self) -> Plan:
        assert self.plan is not None, "no workload yet"
        return self.plan

    def _progress(self, pairs: int, state: str = "SPEED") -> None:
        self.link.send("progress", state=state, pairs=pairs)


def _saved(log_gain: float) -> str:
    return f"{-100 * math.expm1(-log_gain):+.1f} %"


def _yield_to_all() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
