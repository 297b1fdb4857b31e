"""The operator's own series: when they begin, what they say, and when they go."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.shell.conftest import SETTINGS
from tkcc.api.run import RunOutcome
from tkcc.api.status import Phase, RolloutStatus, Source, Status
from tkcc.control.observed import Meta, Observed
from tkcc.shell.drive import Key
from tkcc.shell.metrics import Metrics
from tkcc.shell.process import STANDBY_S, Process

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = Key("shop", "llama")
SEEN = Observed(NOW, Meta("llama", "shop", "u1", 1))
ROLLOUT = RolloutStatus(artifact="a" * 64, source=Source.RUN, spec_digest="s" * 64, started_at=NOW, step_since=NOW)


def value(metrics: Metrics, series: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(series, labels)
    return found


@pytest.mark.parametrize(
    "series, label, values",
    [
        ("tkcc_rollouts_total", "result", ["promoted", "rolled_back"]),
        ("tkcc_recompilation_runs_total", "result", list(RunOutcome)),
        ("tkcc_candidates_total", "outcome", ["accepted", "refused"]),
    ],
)
def test_counters_of_an_object_begin_at_zero_with_its_first_turn(series, label, values):
    metrics = Metrics()
    for each in values:
        assert value(metrics, series, namespace="shop", name="llama", **{label: each}) is None
    for _ in range(2):
        metrics.deployment(KEY, Status(), Status(), SEEN)
    for each in values:
        assert value(metrics, series, namespace="shop", name="llama", **{label: each}) == 0


@pytest.mark.parametrize("kind", ["InferenceDeployment", "RecompilationRun"])
def test_turns_are_counted_from_zero(kind):
    for result in ("done", "error", "cluster_error"):
        assert value(Metrics(), "tkcc_reconcile_total", kind=kind, result=result) == 0


@pytest.mark.parametrize(
    "case, phase, waits, want",
    [
        ("steps are under way", Phase.CANARY, False, 0),
        ("a person is waited for", Phase.CANARY, True, 1),
        ("it is over", Phase.SERVING, True, 0),
    ],
)
def test_a_rollout_that_waits_for_a_person_is_told_from_one_that_hangs(case, phase, waits, want):
    metrics, status = Metrics(), Status(phase=phase, rollout=replace(ROLLOUT, awaiting_approval=waits))
    metrics.deployment(KEY, Status(), status, SEEN)
    assert value(metrics, "tkcc_rollout_awaiting_approval", namespace="shop", name="llama") == want, case


async def test_without_the_lease_nothing_is_looked_at_and_what_was_known_is_forgotten():
    process, forgotten = Process(SETTINGS), []

    async def turn(key: Key) -> float | None:
        raise AssertionError("another operator's turn")

    async def forget(key: Key) -> None:
        forgotten.append(key)

    assert await process._gated(turn, forget)(KEY) == STANDBY_S
    assert forgotten == [KEY]
