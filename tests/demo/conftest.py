"""A made-up story of the demo, built from the shipped traces' real lengths, for the pages and figures made of it."""

import random
from pathlib import Path

import pytest

from e2e.demo.facts import CandidateFact, DriftFact, Look, Ratio, RunFact, Sent, Story, Told, fingerprint
from tkcc.api.condition import Condition, ConditionStatus
from tkcc.api.run import CandidateCounts
from tkcc.traffic import shape
from tkcc.traffic.replay import Result
from tkcc.traffic.trace import read

TRACES = Path(__file__).parents[2] / "examples" / "traces"
BASELINE, FOR_A, FOR_B = "0" * 64, "a" * 64, "b" * 64
SWITCH_S, END_S = 240.0, 600.0
IN_SERVICE = ((0.0, BASELINE, 60.0), (200.0, FOR_A, 52.0), (540.0, FOR_B, 47.0))  # from, artifact, TPOT in ms


def _requests() -> list[Sent]:
    noise = random.Random(7)
    sent = []
    for label, name, start_s, end_s in (("A", "chat", 5.0, SWITCH_S), ("B", "coding-agent", SWITCH_S, END_S)):
        for request in shape.scale(read(TRACES / f"{name}.jsonl.gz"), 0.125, 1.0).requests:
            at_s = start_s + request.arrival_s
            if at_s >= end_s:
                break
            artifact, tpot_ms = next((a, t) for since, a, t in reversed(IN_SERVICE) if at_s >= since)
            cached = int(
                request.prompt_tokens * noise.uniform(0.3, 0.6) if label == "A" else request.prompt_tokens * 0.88
            )
            tpot_s = tpot_ms * noise.lognormvariate(0, 0.08) / 1e3
            result = Result(
                index=len(sent),
                started_at_s=at_s,
                late_s=0.0,
                status=200,
                error="",
                prompt_tokens=request.prompt_tokens,
                cached_tokens=cached,
                output_tokens=request.output_tokens,
                ttft_s=(request.prompt_tokens - cached) * 0.004,
                tpot_s=tpot_s,
                fingerprint=fingerprint(artifact),
            )
            sent.append(Sent(at_s, label, result))
    return sent


def _looks() -> list[Look]:
    looks = []
    for at_s in range(0, int(END_S), 4):
        stable = next(a for since, a, _ in reversed(IN_SERVICE) if at_s >= since)
        moved = min(1.0, max(0.0, (at_s - SWITCH_S) / 60))
        known = at_s > 30
        weight = {150: 50, 460: 50}
        asked = next((w for since, w in weight.items() if since <= at_s < since + (50 if since == 150 else 80)), 0)
        looks.append(
            Look(
                at_s=float(at_s),
                phase="Canary" if asked else "Serving",
                stable=stable,
                long_prompt_tokens=int(215 + 109 * moved) if known else None,
                long_hit_ratio=0.43 + 0.44 * moved if known else None,
                long_distance=(0.1 + 2.1 * moved if at_s < 540 else 0.05) if known else None,
                short_distance=(0.15 + 2.1 * min(1.0, moved * 2) if at_s < 540 else 0.08) if known else None,
                desired_weight_pct=asked,
                observed_weight_pct=asked - 3 if asked and at_s % 20 == 0 else None,
            )
        )
    return looks


@pytest.fixture
def story() -> Story:
    told = [
        (0.0, "serving", "Accepted is True (Valid): the spec is valid", 0),
        (60.0, "plan", "plan 0 (FirstWindow): mean prompt 215 tokens, hit ratio 0.43, served by baseline", 2),
        (62.0, "run", "smollm2-0123456789 started (Token): mean prompt 215 tokens, against baseline", 2),
        (150.0, "canary", "aaaaaaaaaa (Run) warms up; stable is baseline", 2),
        (200.0, "promote", "aaaaaaaaaa is the stable revision, 1.15x of the baseline's speed; baseline is kept", 2),
        (SWITCH_S, "traffic", "from workload A to workload B", 2),
        (300.0, "drift", "seen (MultipleSignalsShifted): distance 2.10 > 1 in both windows for 6 ticks <b>&</b>", 2),
        (540.0, "promote", "bbbbbbbbbb is the stable revision, 1.27x of the baseline's speed; aaaaaaaaaa is kept", 2),
    ]
    return Story(
        machine={"machine": "2 cores", "model": "SmolLM2-135M-Instruct", "Kubernetes": "v1.37.2"},
        looks=_looks(),
        sent=_requests(),
        told=[Told(*line) for line in told],
        runs=[
            RunFact("smollm2-0123456789", "A", "SearchSucceeded", "1 of 3 accepted.", CandidateCounts(6, 1, 5), 88.0),
            RunFact("smollm2-abcdef0123", "B", "SearchSucceeded", "1 of 2 accepted.", CandidateCounts(8, 2, 6), 101.0),
        ],
        candidates=[
            CandidateFact("r", "fast", "screen", FOR_A, "ACCEPTED", 131, "prepacked linears save a copy per step", 0.4),
            CandidateFact(
                "r", "fast", "screen", "c" * 64, "WRONG", 0, "attention over pages & <script>alert(1)</script>", 0.5
            ),
            CandidateFact(
                "r", "slow", "confirm", FOR_B, "ACCEPTED", 212, "shapes specialised to decode at 400 tokens", 1.9
            ),
        ],
        cross=[
            Ratio("A", "A", 1.153, 1.141, 1.166),
            Ratio("A", "B", 1.120, 1.111, 1.131),
            Ratio("B", "A", 1.090, 1.080, 1.100),
            Ratio("B", "B", 1.271, 1.262, 1.283),
        ],
        drift=DriftFact("MultipleSignalsShifted", 2.1),
        revisions=[BASELINE, FOR_A, FOR_B],
        compiled_for={FOR_A: "A", FOR_B: "B"},
        canary_tpot_ratio=0.91,
        timings_s={"build": 1.2, "cluster": 14.0, "plan 0": 60.0, "whole": 640.0},
        conditions=(Condition("Ready", ConditionStatus.TRUE, "AllReplicasReady", "2 of 2 pods are ready", 1),),
    )
