"""One bounded search: propose, screen on the fast tier, confirm the best, accept on the slow tier, size the gain.

The fast tier only orders work. An accept is a decision of the slow tier on recorded traffic, with a share of the
campaign's error budget; the size of the gain is then estimated from fresh pairs against the baseline revision. Verdicts
go through a journal: with a journal of the same campaign the search runs again without measuring what is known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tkcc.agents.proposer import Cell, Context, Proposer
from tkcc.api.candidate import Candidate
from tkcc.api.report import AlphaTicket, Outcome, Report
from tkcc.api.run import RunOutcome
from tkcc.stats.alpha import AlphaLedger, BudgetSpent
from tkcc.worker.journal import Journal

SCREEN_ALPHA = 0.05  # orders work; no accept rests on it
CONFIRM_FAST_ALPHA = 0.01


class JudgingTier(Protocol):
    name: str

    def judge(
        self, candidate: Candidate, stage: str, ticket: AlphaTicket, progress: Callable[[str, int], None]
    ) -> Report: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one campaign. `search_ratio` of the time is for the fast tier, the rest for accepting."""

    duration_s: float
    max_candidates: int = 1000
    search_ratio: float = 0.55
    patience: int = 12  # candidates in a row without a better one
    max_accepts: int = 8  # slow-tier decisions: each has an equal share of the error budget
    screen_pairs: int = 24
    confirm_pairs: int = 60
    slow_pairs: int = 60
    estimate_pairs: int = 40
    min_gain: float = 0.005  # log-ratio that a rollout must be worth, see `log_gain_of`
    alpha: float = 0.05


class State(StrEnum):
    """Where a candidate is, in the words of docs/architecture.md."""

    DRAFT = "DRAFT"
    SCREENED = "SCREENED"
    CONFIRMED_FAST = "CONFIRMED_FAST"
    CONFIRMED_SLOW = "CONFIRMED_SLOW"
    ACCEPTED = "ACCEPTED"


@dataclass(slots=True)
class Tried:
    """One candidate's way through the tiers."""

    candidate: Candidate
    number: int
    state: str = State.DRAFT
    reports: dict[str, Report] = field(default_factory=dict)  # by "tier stage"
    reason: str = ""

    @property
    def log_gain(self) -> float | None:
        for key in ("slow estimate", "slow confirm", "fast confirm", "fast screen"):
            report = self.reports.get(key)
            if report is not None and report.pairs:
                return report.log_gain
        return None

    @property
    def was_evaluated(self) -> bool:
        """Was its correctness measured, and a speed decision or a rejection made?"""
        return any(report.correctness is not None for report in self.reports.values())


@dataclass(frozen=True, slots=True)
class Result:
    outcome: RunOutcome
    message: str
    tried: tuple[Tried, ...]
    winner: Tried | None = None
    gain: Report | None = None  # the estimate against the baseline revision
    gain_over_incumbent: Report | None = None


class Observer(Protocol):
    """Is told what happens, for tables and statuses. It cannot change anything."""

    def changed(self, tried: list[Tried], current: Tried | None, doing: str, pairs: int) -> None: ...


class Campaign:
    def __init__(
        self,
        proposer: Proposer,
        context: Context,
        fast: JudgingTier,
        slow: JudgingTier,
        journal: Journal,
        budget: Budget,
        now_s: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.proposer, self.context = proposer, context
        self.fast, self.slow = fast, slow
        self.journal, self.budget, self.now_s, self.observer = journal, budget, now_s, observer
        self.ledger = AlphaLedger.replay(journal.shares, budget.alpha, budget.max_accepts)
        self.tried: list[Tried] = []

    def run(self) -> Result:
        """Raises TierGoneError when a tier is lost for good."""
        self._search()
        ranked = sorted(
            (t for t in self.tried if t.state == State.SCREENED), key=lambda t: t.log_gain or 0.0, reverse=True
        )
        for tried in ranked[: self.budget.max_accepts]:
            if self._is_over(1.0) and not self._is_known(self.fast, "confirm", tried):
                break
            if self._confirm_fast(tried) and self._confirm_slow(tried):
                return self._accept(tried)
        return Result(*self._failure(), tuple(self.tried))

    # --- the fast tier ---

    def _search(self) -> None:
        best, since_best = 0.0, 0
        while len(self.tried) < self.budget.max_candidates and since_best < self.budget.patience:
            candidate = self.proposer.propose(self.context)
            if candidate is None:
                return
            tried = Tried(candidate, len(self.tried) + 1)
            is_late = self._is_over(self.budget.search_ratio) or self.journal.is_full
            if is_late and not self._is_known(self.fast, "screen", tried):
                return
            self.tried.append(tried)
            if any(t.candidate.digest == candidate.digest for t in self.tried[:-1]):
                tried.state, tried.reason = Outcome.DUPLICATE, "proposed before"
                continue
            ticket = self._ticket(tried, "screen", SCREEN_ALPHA, self.budget.screen_pairs)
            report = self._judge(self.fast, tried, "screen", ticket)
            self.proposer.observe(report)
            since_best += 1
            if tried.state == State.SCREENED and report.log_gain > best + self.budget.min_gain:
                best, since_best = report.log_gain, 0

    def _confirm_fast(self, tried: Tried) -> bool:
        ticket = self._ticket(tried, "confirm", CONFIRM_FAST_ALPHA, self.budget.confirm_pairs)
        self._judge(self.fast, tried, "confirm", ticket)
        return tried.state == State.CONFIRMED_FAST

    # --- the slow tier: the only one that accepts ---

    def _confirm_slow(self, tried: Tried) -> bool:
        name = f"slow {tried.candidate.digest}"
        try:
            alpha = self.ledger.draw(name)
        except BudgetSpent as err:
            tried.state, tried.reason = Outcome.EXPIRED, str(err)
            return False
        self.journal.share(name, alpha)  # before it is spent: a decision that is resumed is still one decision
        self._judge(self.slow, tried, "confirm", self._ticket(tried, "slow", alpha, self.budget.slow_pairs))
        return tried.state == State.CONFIRMED_SLOW

    def _accept(self, tried: Tried) -> Result:
        """Size the gain from fresh pairs: against the incumbent and, if that is another, the baseline revision."""
        ticket = self._ticket(tried, "estimate", SCREEN_ALPHA, self.budget.estimate_pairs)
        over_incumbent = self._judge(self.slow, tried, "estimate", ticket)
        gain = over_incumbent
        if self.context.incumbent is not None:
            gain = self._judge(self.slow, tried, "estimate-baseline", ticket)
        if not over_incumbent.log_gain_low > 0.0 or not over_incumbent.log_gain >= self.budget.min_gain:
            tried.state = Outcome.FUTILE
            tried.reason = f"confirmed, but fresh pairs show only {_percent(over_incumbent)}"
            return Result(RunOutcome.NO_IMPROVEMENT, tried.reason, tuple(self.tried))
        tried.state = State.ACCEPTED
        message = f"{_percent(over_incumbent)} less time per token than the incumbent"
        return Result(RunOutcome.SEARCH_SUCCEEDED, message, tuple(self.tried), tried, gain, over_incumbent)

    # --- common ---

    def _judge(self, tier: JudgingTier, tried: Tried, stage: str, ticket: AlphaTicket) -> Report:
        known = self.journal.verdicts.get((tier.name, stage, tried.candidate.digest))
        if known is None:
            known = self._measure(tier, tried, stage, ticket)
        tried.reports[f"{tier.name} {stage}"] = known
        tried.reason = known.reason
        if known.outcome is not Outcome.ACCEPTED:
            tried.state = known.outcome
        elif stage in ("screen", "confirm"):
            passed = {"fast screen": State.SCREENED, "fast confirm": State.CONFIRMED_FAST}
            tried.state = passed.get(f"{tier.name} {stage}", State.CONFIRMED_SLOW)
        self.observer.changed(self.tried, tried, "", known.pairs)
        return known

    def _measure(self, tier: JudgingTier, tried: Tried, stage: str, ticket: AlphaTicket) -> Report:
        """What the tier could not judge for a reason of its own is no verdict: tried once more, and not kept."""

        def progress(doing: str, pairs: int) -> None:
            self.observer.changed(self.tried, tried, f"{tier.name} {doing}", pairs)

        report = tier.judge(tried.candidate, stage, ticket, progress)
        if report.outcome is Outcome.EXPIRED:
            report = tier.judge(tried.candidate, stage, ticket, progress)
        if report.outcome is not Outcome.EXPIRED:
            self.journal.verdict(stage, report)
        return report

    def _is_known(self, tier: JudgingTier, stage: str, tried: Tried) -> bool:
        """From an earlier life: it costs no time."""
        return (tier.name, stage, tried.candidate.digest) in self.journal.verdicts

    def _ticket(self, tried: Tried, stage: str, alpha: float, max_pairs: int) -> AlphaTicket:
        return AlphaTicket(f"{tried.candidate.digest[:16]}-{stage}", alpha, self.budget.min_gain, max_pairs)

    def _is_over(self, ratio: float) -> bool:
        return self.now_s() - self.journal.started_at_s > ratio * self.budget.duration_s

    def _failure(self) -> tuple[RunOutcome, str]:
        evaluated = [t for t in self.tried if t.was_evaluated]
        if not evaluated:
            last = f"; the last: {self.tried[-1].reason}" if self.tried else ""
            return RunOutcome.BUDGET_EXHAUSTED, f"no candidate could be judged ({len(self.tried)} proposed{last})"
        wrong = [t for t in evaluated if t.state == Outcome.WRONG]
        if len(wrong) == len(evaluated):
            return RunOutcome.CORRECTNESS_FAILED, f"all {len(wrong)} candidates were wrong: {wrong[0].reason}"
        best = max((t.log_gain for t in evaluated if t.log_gain is not None), default=0.0)
        challenged = [t for t in self.tried if len(t.reports) > 1]
        waiting = [t for t in self.tried if t.state == State.SCREENED]
        if challenged and all(t.state == Outcome.EXPIRED for t in challenged):
            reason = challenged[-1].reason
            return RunOutcome.BUDGET_EXHAUSTED, f"no screened candidate could be judged again; the last: {reason}"
        if challenged:
            reason = challenged[-1].reason
            return RunOutcome.NO_IMPROVEMENT, f"no screened candidate was confirmed; the last: {reason}"
        if waiting:
            text = f"the budget ended before any of {len(waiting)} screened candidates could be confirmed; the best"
            return RunOutcome.BUDGET_EXHAUSTED, f"{text} saved {-100 * math.expm1(-best):+.1f} % of the time"
        return (
            RunOutcome.NO_IMPROVEMENT,
            f"none of {len(evaluated)} judged candidates beat the incumbent; the best saved"
            f" {-100 * math.expm1(-best):+.1f} % of the time",
        )


def _percent(report: Report) -> str:
    low, mid, high = (100 * -math.expm1(-x) for x in (report.log_gain_low, report.log_gain, report.log_gain_high))
    return f"{mid:.1f} % [{low:.1f}, {high:.1f}]"


def log_gain_of(saved_ratio: float) -> float:
    """Of a share of the time per token that is saved, in [0, 1): what users are told and ask for."""
    return -math.log1p(-saved_ratio)


def context_of(info: dict[str, object], incumbent: Candidate | None) -> Context:
    """What proposers may know, from a tier's GET /v1/info."""
    cells = info["cells"]
    assert isinstance(cells, list)
    model = info["model"]
    assert isinstance(model, dict)
    return Context(
        model=model,
        device=str(info["device"]),
        dtype=str(info["dtype"]),
        threads=int(str(info["threads"])),
        cells=tuple(Cell(c["phase"], c["batch"], c["newTokens"], c["contextTokens"], c["weightRatio"]) for c in cells),
        incumbent=incumbent,
    )
