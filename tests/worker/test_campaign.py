"""One campaign over tables of verdicts: what is accepted, why nothing is, and what a kill at any point leaves."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.judging_tier import FakeTier
from tkcc.agents.proposer import Context
from tkcc.api.candidate import Candidate
from tkcc.api.report import Outcome, Report
from tkcc.api.run import RunOutcome
from tkcc.worker.campaign import Budget, Campaign, Result, State
from tkcc.worker.files import DirectorySink
from tkcc.worker.journal import Journal
from tkcc.worker.outcome import counts, report, run_result, saved_milli

CONTEXT = Context({}, "cpu", "float32", 1, ())
IDENTITY = {"model": "m"}


class Script:
    """Proposes the given sources in order."""

    def __init__(self, *sources: str) -> None:
        self.left = [Candidate(source, {}) for source in sources]
        self.seen: list[Report] = []

    def propose(self, context: Context) -> Candidate | None:
        return self.left.pop(0) if self.left else None

    def observe(self, report: Report) -> None:
        self.seen.append(report)


class Quiet:
    def changed(self, *_: object) -> None: ...


def campaign(
    script: Script, fast: FakeTier, slow: FakeTier, journal: Journal | None = None, **settings: Any
) -> tuple[Campaign, list[str]]:
    lines: list[str] = []
    journal = journal or Journal.open([], lines.append, IDENTITY, 0.0)
    now = settings.pop("now", lambda: 1.0)
    context = settings.pop("context", CONTEXT)
    budget = Budget(duration_s=100.0, **settings)
    return Campaign(script, context, fast, slow, journal, budget, now, Quiet()), lines


def run(sources: tuple[str, ...], fast: Mapping[str, float], slow: Mapping[str, float], **settings: Any) -> Result:
    return campaign(Script(*sources), FakeTier("fast", fast), FakeTier("slow", slow), **settings)[0].run()


GAINS = {"a": 0.1, "b": 0.3, "c": -0.2}


def test_the_best_screened_candidate_is_accepted_on_the_slow_tier() -> None:
    result = run(("a", "b", "c", "d"), GAINS, GAINS)
    assert result.outcome is RunOutcome.SEARCH_SUCCEEDED and result.winner is not None
    assert result.winner.candidate.source == "b" and result.winner.state == State.ACCEPTED
    assert {t.candidate.source: str(t.state) for t in result.tried} == {
        "a": "SCREENED", "b": "ACCEPTED", "c": "FUTILE", "d": "WRONG",
    }  # fmt: skip
    assert (counts(result.tried).evaluated, counts(result.tried).accepted, counts(result.tried).refused) == (4, 1, 2)
    assert run_result(result).gain_milli == saved_milli(0.3) == 259


def test_what_is_served_is_built_for_the_cells_that_it_was_judged_at(tmp_path: Path) -> None:
    from tkcc.engine.serve.loading import _judged_cells
    from tkcc.models.forward import Cell

    cell = {"phase": "decode", "batch": 2, "newTokens": 1, "contextTokens": 90, "weightRatio": 1.0}
    told = report(run(("b",), GAINS, GAINS), {"fast": {}, "slow": {"cells": [cell]}}, 1.0, {})
    (tmp_path / "report.json").write_text(json.dumps(told))
    assert _judged_cells(tmp_path) == (Cell("decode", 2, 1, 90, 1.0),)


def test_the_next_best_is_tried_when_the_slow_tier_refuses_the_best() -> None:
    result = run(("a", "b"), GAINS, {"a": 0.1, "b": 0.0})
    assert result.winner is not None and result.winner.candidate.source == "a"


@pytest.mark.parametrize(
    "case, sources, fast, slow, outcome, words",
    [
        ("nothing is faster", ("c",), GAINS, GAINS, RunOutcome.NO_IMPROVEMENT, "none of 1 judged"),
        ("all are wrong", ("x", "y"), GAINS, GAINS, RunOutcome.CORRECTNESS_FAILED, "all 2 candidates were wrong"),
        ("faster on few layers only", ("a",), GAINS, {"a": -0.1}, RunOutcome.NO_IMPROVEMENT, "no screened candidate"),
        ("wrong on all layers", ("a",), GAINS, {}, RunOutcome.CORRECTNESS_FAILED, "all 1 candidates were wrong"),
        ("nothing is proposed", (), GAINS, GAINS, RunOutcome.BUDGET_EXHAUSTED, "no candidate could be judged"),
    ],
)
def test_ends_without_an_artifact(
    case: str, sources: tuple[str, ...], fast: dict[str, float], slow: dict[str, float], outcome: RunOutcome, words: str
) -> None:
    result = run(sources, fast, slow)
    assert (result.outcome, result.winner, words in result.message) == (outcome, None, True), result.message


def test_a_gain_that_fresh_pairs_do_not_show_is_no_improvement() -> None:
    overrides = {("a", "confirm"): Outcome.ACCEPTED}
    slow = FakeTier("slow", {"a": 0.004}, overrides)
    result = campaign(Script("a"), FakeTier("fast", GAINS), slow)[0].run()
    assert result.outcome is RunOutcome.NO_IMPROVEMENT and "fresh pairs" in result.message


def test_only_slow_confirmations_spend_the_error_budget_and_each_its_own_share() -> None:
    fast, slow = FakeTier("fast", GAINS), FakeTier("slow", {"a": 0.2, "b": -1.0})
    one, lines = campaign(Script("a", "b"), fast, slow, max_accepts=4)
    one.run()
    spent = [(source, ticket.alpha) for source, stage, ticket in slow.calls if stage == "confirm"]
    assert spent == [("b", 0.0125), ("a", 0.0125)] and one.ledger.spent == pytest.approx(0.025)
    assert sum('"kind":"share"' in line for line in lines) == 2


def test_no_more_decisions_than_the_error_budget_has_shares() -> None:
    names = [f"s{i}" for i in range(9)]
    gains = {name: 0.1 for name in names}
    slow = FakeTier("slow", {})
    result = campaign(Script(*names), FakeTier("fast", gains), slow, max_accepts=3)[0].run()
    assert len(slow.calls) == 3 and result.winner is None


def test_a_duplicate_costs_no_measurement() -> None:
    fast = FakeTier("fast", GAINS)
    result = campaign(Script("a", "a"), fast, FakeTier("slow", GAINS))[0].run()
    assert [t.state for t in result.tried].count(Outcome.DUPLICATE) == 1
    assert [stage for _, stage, _ in fast.calls].count("screen") == 1


def test_the_search_leaves_time_to_accept() -> None:
    clock = iter([0.0, 50.0, 56.0] + [60.0] * 50)
    fast = FakeTier("fast", GAINS)
    result = campaign(Script("a", "b"), fast, FakeTier("slow", GAINS), now=lambda: next(clock), search_ratio=0.55)[0]
    found = result.run()
    assert found.winner is not None and [s for s, stage, _ in fast.calls if stage == "screen"] == ["a", "b"]


def test_patience_ends_a_search_that_finds_nothing_better() -> None:
    names = [f"s{i}" for i in range(50)]
    fast = FakeTier("fast", {name: 0.1 for name in names})
    campaign(Script(*names), fast, FakeTier("slow", {}), patience=5, max_accepts=1)[0].run()
    assert [stage for _, stage, _ in fast.calls].count("screen") == 6  # the first is better than nothing


def test_against_another_incumbent_the_gain_over_the_baseline_is_sized_too() -> None:
    slow = FakeTier("slow", GAINS)
    context = Context({}, "cpu", "float32", 1, (), incumbent=Candidate("old", {}))
    result = campaign(Script("b"), FakeTier("fast", GAINS), slow, context=context)[0].run()
    assert [stage for _, stage, _ in slow.calls] == ["confirm", "estimate", "estimate-baseline"]
    assert result.gain is not None and result.gain_over_incumbent is not result.gain


def test_a_search_that_was_over_when_it_was_killed_ends_as_it_would_have() -> None:
    """However late: what is known costs no time, and what is not is not begun."""
    names = ("a", "b", "c", "d")
    whole, lines = campaign(Script(*names[:3]), FakeTier("fast", GAINS), FakeTier("slow", GAINS))
    want = whole.run()
    for late_s in (60.0, 101.0):
        journal = Journal.open(lines, lambda line: None, IDENTITY, late_s)
        fast, slow = FakeTier("fast", GAINS), FakeTier("slow", GAINS)
        result = campaign(Script(*names), fast, slow, journal, now=lambda late_s=late_s: late_s)[0].run()
        assert result.winner and want.winner and result.winner.candidate.digest == want.winner.candidate.digest
        assert len(result.tried) == 3 and fast.calls == slow.calls == []


def test_what_a_tier_could_not_judge_is_no_verdict() -> None:
    """It is judged once more, and the journal does not keep it: another life may find the tier in better health."""
    down = {("b", "confirm"): Outcome.EXPIRED}
    slow = FakeTier("slow", GAINS, down)
    ran, lines = campaign(Script("b"), FakeTier("fast", GAINS), slow)
    result = ran.run()
    assert (result.outcome, len(slow.calls)) == (RunOutcome.BUDGET_EXHAUSTED, 2)
    assert "could be judged again" in result.message and not any("EXPIRED" in line for line in lines)


def test_a_budget_that_ends_before_any_confirmation_says_so() -> None:
    clock = iter([0.0, 1.0])
    result = campaign(
        Script("a", "b"), FakeTier("fast", GAINS), FakeTier("slow", GAINS), now=lambda: next(clock, 200.0)
    )[0].run()
    assert result.outcome is RunOutcome.BUDGET_EXHAUSTED
    assert "before any of 2 screened candidates could be confirmed" in result.message


def test_a_killed_campaign_goes_on_without_measuring_or_spending_twice() -> None:
    """Killed after every number of durable lines, it ends with the same winner and each verdict is taken once."""
    names = ("a", "b", "c", "d")
    whole, lines = campaign(Script(*names), FakeTier("fast", GAINS), FakeTier("slow", GAINS))
    want = whole.run()
    for keep in range(1, len(lines) + 1):
        kept = lines[:keep]
        tail = list(kept)

        def append(line: str, tail: list[str] = tail) -> None:
            tail.append(line)

        journal = Journal.open(kept, append, IDENTITY, 99.0)
        fast, slow = FakeTier("fast", GAINS), FakeTier("slow", GAINS)
        result = campaign(Script(*names), fast, slow, journal)[0].run()
        assert result.outcome is want.outcome and result.winner and want.winner
        assert result.winner.candidate.digest == want.winner.candidate.digest
        assert tail == lines, f"after {keep} lines the journal ends otherwise"


def test_a_line_cut_by_the_kill_is_no_fact() -> None:
    _, lines = campaign(Script(), FakeTier("fast", {}), FakeTier("slow", {}))
    journal = Journal.open([*lines, '{"kind": "verd'], lambda line: None, IDENTITY, 5.0)
    assert (journal.started_at_s, journal.verdicts) == (0.0, {})


def test_a_file_whose_last_line_was_cut_goes_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    sink = DirectorySink(tmp_path)
    sink.append_journal("one")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"cut')
    assert list(sink.read_journal()) == ["one"]
    sink.append_journal("two")
    assert list(sink.read_journal()) == ["one", "two"]


def test_another_campaigns_journal_is_refused() -> None:
    lines: list[str] = []
    Journal.open([], lines.append, IDENTITY, 1.0)
    with pytest.raises(ValueError, match="another campaign"):
        Journal.open(lines, lines.append, {"model": "other"}, 2.0)
