"""What to tell when the cluster's objects change: pure functions of an object before and after.

Level-based: an entry comes from the difference of two states however far apart they are, so a missed watch event
loses no more than what was already over.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tkcc.api.condition import Condition, ConditionStatus, ConditionType, RunConditionType, find_condition
from tkcc.api.report import Outcome, Verdict
from tkcc.api.run import RunSpec, RunStatus
from tkcc.api.status import DriftStatus, MetricAnalysis, Phase, Plan, Revision, RolloutStatus, Status

_DISTANCE_STEP_MILLI = 250  # a distance is told again when it has moved by this much, or past 1
_NAME_CHARS = 10  # of a digest


@dataclass(frozen=True)
class Entry:
    """One line of the story. `topic` is a word for the margin; `weight` 2 is a turning point, 1 a step, 0 a detail."""

    topic: str
    text: str
    weight: int = 1


def deployment_entries(old: Status | None, new: Status) -> list[Entry]:
    """What changed in an InferenceDeployment; `old` is None at first sight."""
    before = old or Status()
    return [
        *_trouble(before.conditions, new.conditions),
        *_readiness(before.conditions, new.conditions),
        *_plans(before.drift.plans, new.drift.plans),
        *_drift(before, new),
        *_rollout(before.rollout, new),
        *_promotion(before, new),
    ]


def run_entries(name: str, spec: RunSpec, old: RunStatus | None, new: RunStatus) -> list[Entry]:
    """What changed in a RecompilationRun; `old` is None at first sight."""
    entries = []
    if old is None:
        workload = spec.workload
        entries.append(
            Entry(
                "run",
                f"{name} started ({spec.trigger}): mean prompt {workload.prompt_tokens.mean}, mean output "
                f"{workload.output_tokens.mean} tokens, hit ratio {_ratio(workload.hit_ratio_milli)}, "
                f"against {short(spec.incumbent)}",
                2,
            )
        )
    before = old or RunStatus()
    if new.tier and new.tier != before.tier:
        entries.append(Entry("run", f"{new.tier} tier at work"))
    told = {(summary.digest, summary.tier, summary.outcome) for summary in before.top}
    for summary in new.top:
        if (summary.digest, summary.tier, summary.outcome) not in told and summary.outcome:
            entries.append(
                candidate_entry(summary.tier, summary.digest, summary.outcome, summary.gain_milli, summary.hypothesis)
            )
    ended, was = (find_condition(s.conditions, RunConditionType.SUCCEEDED) for s in (new, before))
    if ended and ended.status is not ConditionStatus.UNKNOWN and (was is None or was.status != ended.status):
        counts = new.candidates
        entries.append(
            Entry(
                "run",
                f"{ended.reason}: {counts.evaluated} evaluated, {counts.accepted} accepted, {counts.refused} refused. "
                f"{ended.message}",
                2,
            )
        )
    return entries


def candidate_entry(where: str, digest: str, outcome: str, gain_milli: int, hypothesis: str) -> Entry:
    """A candidate's verdict in one tier, or in one stage of it."""
    gain = f" {gain_milli / 10:+.1f} % time saved" if outcome == Outcome.ACCEPTED or gain_milli else ""
    return Entry("verdict", f"{where} {short(digest)} {outcome}{gain}" + (f": {hypothesis}" if hypothesis else ""), 0)


def short(artifact: str) -> str:
    """An artifact's name for people: `baseline`, or the first digits of its digest."""
    return artifact if len(artifact) < 64 else artifact[:_NAME_CHARS]


def _readiness(before: Iterable[Condition], after: Iterable[Condition]) -> Iterator[Entry]:
    for type_ in (ConditionType.ACCEPTED, ConditionType.READY, ConditionType.METRICS_AVAILABLE):
        change = _flipped(before, after, type_)
        if change:
            yield Entry("serving", f"{type_} is {change.status} ({change.reason}): {change.message}", 0)


def _trouble(before: Iterable[Condition], after: Iterable[Condition]) -> Iterator[Entry]:
    change = _flipped(before, after, ConditionType.DEGRADED)
    if change and change.status is ConditionStatus.TRUE:
        yield Entry("trouble", f"Degraded ({change.reason}): {change.message}", 2)


def _plans(before: tuple[Plan, ...], after: tuple[Plan, ...]) -> Iterator[Entry]:
    known = {plan.workload_digest for plan in before}
    for plan in after:
        if plan.workload_digest in known:
            continue
        number = "plan 0" if not before and plan is after[0] else "new plan"
        yield Entry(
            "plan",
            f"{number} ({plan.reason}): mean prompt {plan.prompt_tokens} tokens, hit ratio "
            f"{_ratio(plan.hit_ratio_milli)}, served by {short(plan.artifact)}",
            2,
        )


def _drift(before: Status, after: Status) -> Iterator[Entry]:
    change = _flipped(before.conditions, after.conditions, ConditionType.TRAFFIC_DRIFTED)
    if _is_worth_telling(before.drift, after.drift):
        drift = after.drift
        mean = "-" if drift.long_prompt_tokens is None else drift.long_prompt_tokens
        yield Entry(
            "drift",
            f"distance {_milli(drift.long_distance_milli)} in the long window, {_milli(drift.short_distance_milli)} in "
            f"the short one; mean prompt {mean} tokens, hit ratio {_ratio(drift.long_hit_ratio_milli)}, "
            f"{drift.long_requests} requests, {drift.ticks} ticks above 1",
            0,
        )
    if change and change.status is ConditionStatus.TRUE:
        yield Entry("drift", f"seen ({change.reason}): {change.message}", 2)
    if change and change.status is ConditionStatus.FALSE and before.conditions:
        yield Entry("drift", f"none ({change.reason}): {change.message}", 0)


def _is_worth_telling(before: DriftStatus, after: DriftStatus) -> bool:
    if after.tick_at == before.tick_at or after.long_distance_milli is None:
        return False
    if before.long_distance_milli is None:
        return True
    crossed = (before.long_distance_milli > 1000) != (after.long_distance_milli > 1000)
    return crossed or abs(before.long_distance_milli - after.long_distance_milli) >= _DISTANCE_STEP_MILLI


def _rollout(before: RolloutStatus | None, status: Status) -> Iterator[Entry]:
    now = status.rollout
    if now is None:
        return
    is_new = before is None or (before.artifact, before.started_at) != (now.artifact, now.started_at)
    if is_new:
        yield Entry(
            "canary", f"{short(now.artifact)} ({now.source}) warms up; stable is {short(status.stable.artifact)}", 2
        )
    old = None if is_new else before
    if now.desired_weight and (old is None or (old.step, old.desired_weight) != (now.step, now.desired_weight)):
        yield Entry("canary", f"weight {now.desired_weight} % (step {now.step + 1} of {now.total_steps})", 2)
    if now.observed_weight is not None and (old is None or old.observed_weight != now.observed_weight):
        yield Entry("canary", f"{now.observed_weight} % of the requests observed on it", 0)
    told = {line.metric: line for line in old.analysis} if old else {}
    for line in now.analysis:
        if line.verdict is not Verdict.INCONCLUSIVE and told.get(line.metric, _NOTHING).verdict is not line.verdict:
            yield Entry("canary", f"{line.metric}: {line.verdict}{_comparison(line)}", 0)
    if now.abort_reason and (old is None or old.abort_reason != now.abort_reason):
        yield Entry("canary", f"{short(now.artifact)} rolled back ({now.abort_reason}): {now.abort_message}", 2)


_NOTHING = MetricAnalysis(metric="", verdict=Verdict.INCONCLUSIVE)


def _comparison(line: MetricAnalysis) -> str:
    ratio = "" if line.ratio_milli is None else f", ratio {line.ratio_milli / 1000:.3f}"
    if ratio and line.ratio_low_milli is not None and line.ratio_high_milli is not None:
        ratio += f" [{line.ratio_low_milli / 1000:.3f}, {line.ratio_high_milli / 1000:.3f}]"
    values = f" {line.canary} against {line.cohort}" if line.canary and line.cohort else ""
    return f"{values}{ratio} ({line.requests} requests)"


def _promotion(before: Status, after: Status) -> Iterator[Entry]:
    if after.phase is Phase.PROMOTING and before.phase is not Phase.PROMOTING and after.rollout:
        yield Entry("promote", f"stable pods take over {short(after.rollout.artifact)}", 1)
    if before.stable.artifact == after.stable.artifact or not before.conditions:
        return
    kept = f"; {_revision(after.previous)} is kept" if after.previous else ""
    gain = f", {after.stable.speedup} of the baseline's speed" if after.stable.speedup else ""
    yield Entry("promote", f"{_revision(after.stable)} is the stable revision{gain}{kept}", 2)


def _revision(revision: Revision) -> str:
    return short(revision.artifact)


def _flipped(before: Iterable[Condition], after: Iterable[Condition], type_: str) -> Condition | None:
    """The condition, if its status or reason is not what it was."""
    new, old = find_condition(tuple(after), type_), find_condition(tuple(before), type_)
    if new is None or (old is not None and (old.status, old.reason) == (new.status, new.reason)):
        return None
    return new


def _ratio(milli: int | None) -> str:
    return "-" if milli is None else f"{milli / 1000:.2f}"


def _milli(value: int | None) -> str:
    return "-" if value is None else f"{value / 1000:.2f}"
