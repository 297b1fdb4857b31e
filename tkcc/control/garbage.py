"""What has outlived its use: finished runs beyond their limit, artifacts that nothing refers to. Only in Serving."""

from tkcc.api.condition import ConditionStatus, RunConditionType, find_condition
from tkcc.api.status import Phase, Status
from tkcc.control.actions import Action, EnsureArtifactGone, EnsureRunGone
from tkcc.control.turn import Turn


def collect(turn: Turn, status: Status) -> tuple[Action, ...]:
    if status.phase is not Phase.SERVING:
        return ()
    ended = []
    for run in sorted(turn.seen.runs, key=lambda r: r.created_at, reverse=True):
        succeeded = find_condition(run.conditions, RunConditionType.SUCCEEDED)
        if succeeded is not None and succeeded.status is not ConditionStatus.UNKNOWN:
            ended.append(run.name)
    used = _artifacts_in_use(turn, status)
    idle = [a for a in turn.seen.artifacts if a.is_owned and a.digest not in used]
    idle.sort(key=lambda a: a.created_at, reverse=True)
    runs = ended[turn.spec.recompilation.run_history_limit :]
    artifacts = idle[turn.spec.rollout.revision_history_limit :]
    return (*(EnsureRunGone(name) for name in runs), *(EnsureArtifactGone(a.digest) for a in artifacts))


def _artifacts_in_use(turn: Turn, status: Status) -> set[str]:
    revisions = (status.stable, status.previous, status.candidate)
    return {
        *(revision.artifact for revision in revisions if revision is not None),
        *(plan.artifact for plan in status.drift.plans),
        turn.spec.rollout.artifact,
        turn.spec.rollout.approved_artifact,
    }
