"""What the demo says when objects change."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from e2e.demo.timeline import Entry, deployment_entries, run_entries
from tkcc.api.condition import Condition, ConditionStatus, ConditionType, RunConditionType
from tkcc.api.report import Verdict
from tkcc.api.run import CandidateCounts, CandidateSummary, RunSpec, RunStatus, Trigger
from tkcc.api.spec import ModelSpec
from tkcc.api.status import DriftStatus, MetricAnalysis, Phase, Plan, Revision, RolloutStatus, Source, Status
from tkcc.api.workload import Quantiles, Workload

NOW = datetime(2026, 1, 2, tzinfo=UTC)
LATER = datetime(2026, 1, 2, 0, 1, tzinfo=UTC)
A, B = "a" * 64, "b" * 64


def _condition(type_: str, status: ConditionStatus, reason: str, message: str = "because") -> Condition:
    return Condition(type_, status, reason, message, 1)


READY = _condition(ConditionType.READY, ConditionStatus.TRUE, "AllReplicasReady")
SERVING = Status(conditions=(READY,))
PLAN = Plan("w" * 64, "baseline", 215, 433, "FirstWindow")
ROLLOUT = RolloutStatus(artifact=A, source=Source.RUN, spec_digest="", started_at=NOW, step_since=NOW, total_steps=2)
CANARY = replace(SERVING, phase=Phase.CANARY, rollout=replace(ROLLOUT, desired_weight=25))


def _drift(distance_milli: int | None, at: datetime = LATER) -> DriftStatus:
    return DriftStatus(270, 600, 40, distance_milli, 1200, 3, tick_at=at)


@pytest.mark.parametrize(
    "case, old, new, said",
    [
        ("nothing changed, nothing is said", CANARY, CANARY, []),
        ("first sight tells what holds", None, SERVING, ["Ready is True (AllReplicasReady): because"]),
        (
            "the first plan is plan 0",
            SERVING,
            replace(SERVING, drift=DriftStatus(plans=(PLAN,))),
            ["plan 0 (FirstWindow): mean prompt 215 tokens, hit ratio 0.43, served by baseline"],
        ),
        (
            "a later plan is new, and one without a hit ratio has none",
            replace(SERVING, drift=DriftStatus(plans=(PLAN,))),
            replace(SERVING, drift=DriftStatus(plans=(PLAN, Plan("v" * 64, A, 324, None, "Promoted")))),
            ["new plan (Promoted): mean prompt 324 tokens, hit ratio -, served by aaaaaaaaaa"],
        ),
        (
            "a distance that crosses 1 is told",
            replace(SERVING, drift=_drift(990, NOW)),
            replace(SERVING, drift=_drift(1010)),
            [
                "distance 1.01 in the long window, 1.20 in the short one; mean prompt 270 tokens, hit ratio 0.60, "
                "40 requests, 3 ticks above 1"
            ],
        ),
        (
            "a distance that hardly moves is not",
            replace(SERVING, drift=_drift(500, NOW)),
            replace(SERVING, drift=_drift(600)),
            [],
        ),
        ("no evidence is no distance", SERVING, replace(SERVING, drift=_drift(None)), []),
        (
            "drift is told with its reason",
            SERVING,
            replace(
                SERVING,
                conditions=(
                    READY,
                    _condition(ConditionType.TRAFFIC_DRIFTED, ConditionStatus.TRUE, "PromptLengthShifted", "1.8 > 1"),
                ),
            ),
            ["seen (PromptLengthShifted): 1.8 > 1"],
        ),
        (
            "a rollout starts without traffic",
            SERVING,
            replace(SERVING, phase=Phase.WARMING, rollout=ROLLOUT),
            ["aaaaaaaaaa (Run) warms up; stable is baseline"],
        ),
        (
            "each weight is a step",
            replace(SERVING, phase=Phase.WARMING, rollout=ROLLOUT),
            CANARY,
            ["weight 25 % (step 1 of 2)"],
        ),
        (
            "a verdict has its numbers, and none is made of no data",
            CANARY,
            replace(
                CANARY,
                rollout=replace(
                    ROLLOUT,
                    desired_weight=25,
                    observed_weight=24,
                    analysis=(
                        MetricAnalysis("tpot", Verdict.PASS, "51 ms", "60 ms", 850, 800, 900, 31),
                        MetricAnalysis("ttft", Verdict.INCONCLUSIVE),
                    ),
                ),
            ),
            [
                "24 % of the requests observed on it",
                "tpot: Pass 51 ms against 60 ms, ratio 0.850 [0.800, 0.900] (31 requests)",
            ],
        ),
        (
            "a rollback names its reason",
            CANARY,
            replace(
                CANARY,
                phase=Phase.ROLLING_BACK,
                rollout=replace(ROLLOUT, desired_weight=25, abort_reason="LatencyExceeded", abort_message="1.4 > 1.1"),
            ),
            ["aaaaaaaaaa rolled back (LatencyExceeded): 1.4 > 1.1"],
        ),
        (
            "a promotion says what is kept",
            CANARY,
            replace(CANARY, stable=Revision(A, "aaaaaaaaaa", speedup="1.15x"), previous=Revision()),
            ["aaaaaaaaaa is the stable revision, 1.15x of the baseline's speed; baseline is kept"],
        ),
        (
            "weights missed in between do not hide the promotion",
            SERVING,
            replace(SERVING, stable=Revision(A, "aaaaaaaaaa"), previous=Revision()),
            ["aaaaaaaaaa is the stable revision; baseline is kept"],
        ),
        (
            "trouble of the operator's own is told",
            SERVING,
            replace(
                SERVING, conditions=(READY, _condition(ConditionType.DEGRADED, ConditionStatus.TRUE, "OperatorError"))
            ),
            ["Degraded (OperatorError): because"],
        ),
    ],
)
def test_deployment(case, old, new, said):
    assert [entry.text for entry in deployment_entries(old, new)] == said


WORKLOAD = Workload(Quantiles(324, 320, 480, 500), Quantiles(14, 12, 20, 30), Quantiles(1, 1, 2, 3), 868, 30, 60, 30)
RUN = RunSpec("smollm2", WORKLOAD, WORKLOAD.digest, "baseline", Trigger.DRIFT, ModelSpec("pvc://m", "smollm2"))
TOP = (
    CandidateSummary(A, "fast", "ACCEPTED", 131, "prepacked linears"),
    CandidateSummary(B, "fast", "WRONG", 0, "pages"),
)


@pytest.mark.parametrize(
    "case, old, new, said",
    [
        (
            "a new run says for what",
            None,
            RunStatus(),
            [
                "smollm2-1 started (Drift): mean prompt 324, mean output 14 tokens, hit ratio 0.87, against baseline",
            ],
        ),
        ("a tier starts", RunStatus(), RunStatus(tier="slow"), ["slow tier at work"]),
        (
            "each verdict is told once",
            RunStatus(top=TOP[:1]),
            RunStatus(top=TOP),
            ["fast bbbbbbbbbb WRONG: pages"],
        ),
        (
            "a candidate goes on to the slow tier",
            RunStatus(top=TOP[:1]),
            RunStatus(top=(replace(TOP[0], tier="slow", gain_milli=98),)),
            ["slow aaaaaaaaaa ACCEPTED +9.8 % time saved: prepacked linears"],
        ),
        (
            "an end has its reason and counts",
            RunStatus(),
            RunStatus(
                candidates=CandidateCounts(6, 0, 6),
                conditions=(
                    _condition(RunConditionType.SUCCEEDED, ConditionStatus.FALSE, "NoImprovement", "none was faster"),
                ),
            ),
            ["NoImprovement: 6 evaluated, 0 accepted, 6 refused. none was faster"],
        ),
        (
            "a run that goes on has not ended",
            RunStatus(),
            RunStatus(conditions=(_condition(RunConditionType.SUCCEEDED, ConditionStatus.UNKNOWN, "Running"),)),
            [],
        ),
    ],
)
def test_run(case, old, new, said):
    assert [entry.text for entry in run_entries("smollm2-1", RUN, old, new)] == said


def test_turning_points_stand_out_from_details():
    def weights(entries: list[Entry]) -> set[int]:
        return {entry.weight for entry in entries}

    assert weights(run_entries("r", RUN, None, RunStatus())) == {2}
    assert weights(run_entries("r", RUN, RunStatus(), RunStatus(top=TOP))) == {0}
    assert weights(deployment_entries(replace(SERVING, phase=Phase.WARMING, rollout=ROLLOUT), CANARY)) == {2}
