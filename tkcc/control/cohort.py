"""Who is who in a rollout: canary pods that are warm or in service, and the stable pods that they are compared with."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from tkcc.api.observation import RequestSample
from tkcc.api.report import Verdict
from tkcc.api.status import MetricAnalysis, RolloutStatus
from tkcc.control.observed import Observed, PodSeen, ServingSeen
from tkcc.control.turn import in_service, live_pods, serves
from tkcc.control.verdict import Failure, Started, is_probed
from tkcc.stats.proportion import share_is_near

_SHARE_SLACK_RATIO = 0.05  # connections, not requests, are what is shared out
_SHARE_SIGMAS = 3.5
_MIN_SHARED = 8  # requests, over all pods, below which a share says nothing


@dataclass(frozen=True)
class Cohorts:
    """Names of pods. `loaded`: ready and running the candidate by their own word; `warm`: loaded and probed (a wrong
    answer of any ends the rollout), or let in already; `canary`, `stable`: ready and in service. `cohort`: as many of
    `stable` as the canary has pods."""

    loaded: tuple[str, ...]
    warm: tuple[str, ...]
    canary: tuple[str, ...]
    stable: tuple[str, ...]
    pods: tuple[PodSeen, ...]

    @property
    def cohort(self) -> tuple[str, ...]:
        return self.stable[: len(self.canary)]

    @property
    def weight_pct(self) -> int:
        """The canary's share of the pods in service."""
        total = len(self.canary) + len(self.stable)
        return round(100 * len(self.canary) / total) if total else 0

    def requests_started(self) -> tuple[int | None, int | None]:
        """Totals of (canary, stable) by the pods' own counters; None where one of them could not be read."""
        return self._started(self.canary), self._started(self.stable)

    def _started(self, names: tuple[str, ...]) -> int | None:
        counts = [pod.requests_started for pod in self.pods if pod.name in names]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def has_lost_counts(self, rollout: RolloutStatus) -> bool:
        """Has a pod been replaced since the measurement began, and its counter with it?"""
        before = (rollout.canary_requests_before, rollout.stable_requests_before)
        return any(n is not None and n < least for n, least in zip(self.requests_started(), before, strict=True))

    def requests_since(
        self, requests: Iterable[RequestSample], since: datetime
    ) -> tuple[list[RequestSample], list[RequestSample], list[RequestSample]]:
        """Finished requests that started from `since` on, of (canary, cohort, all stable pods), oldest first."""
        recent = sorted((r for r in requests if r.started_at >= since), key=lambda r: r.started_at)
        ours, cohort, stable = (
            [r for r in recent if r.pod in names] for names in (self.canary, self.cohort, self.stable)
        )
        return ours, cohort, stable

    def share(self, canary_before: int, stable_before: int) -> tuple[MetricAnalysis, Started]:
        """Is the share of requests what the pods make it? And how many have started on each side."""
        ours, theirs = self.requests_started()
        started = Started(max(0, (ours or 0) - canary_before), max(0, (theirs or 0) - stable_before))
        total = started.canary + started.cohort
        want_ratio = len(self.canary) / max(1, len(self.canary) + len(self.stable))
        known = ours is not None and theirs is not None and total >= _MIN_SHARED
        near = known and share_is_near(
            started.canary, total, want_ratio, slack=_SHARE_SLACK_RATIO, sigmas=_SHARE_SIGMAS
        )
        text = f"the canary got {started.canary} of {total} requests, its pods are {100 * want_ratio:.0f} %"
        return MetricAnalysis(
            metric="TrafficSplit",
            verdict=Verdict.PASS if near else Verdict.INCONCLUSIVE,
            canary=str(started.canary),
            cohort=str(started.cohort),
            ratio_milli=round(1000 * started.canary / total) if total else None,
            requests=total,
            message=text if known else f"{text}; {_MIN_SHARED} requests needed, counters of every pod",
        ), started


def cohorts(seen: Observed, artifact: str, since: datetime) -> Cohorts:
    """`since`: probes before it do not count. A pod that was let in stays in while it flickers or does not answer for a
    moment: taking it out and back would move other pods about."""
    candidates = [p for p in live_pods(seen.canary) if p.template_artifact == artifact]
    loaded = [p for p in candidates if p.is_ready and serves(p, artifact)]
    let_in = [p for p in candidates if p.in_service and (serves(p, artifact) or not p.artifact_digest)]
    fresh = [p.name for p in loaded if not p.in_service and is_probed(seen.probes, seen.probe_ids, p.name, since)]
    return Cohorts(
        loaded=tuple(sorted(p.name for p in loaded)),
        warm=(*sorted(p.name for p in let_in), *sorted(fresh)),
        canary=tuple(sorted(p.name for p in let_in if p.is_ready)),
        stable=tuple(sorted(p.name for p in in_service(seen.stable))),
        pods=(*live_pods(seen.canary), *live_pods(seen.stable)),
    )


def crashed(serving: ServingSeen | None, artifact: str) -> Failure | None:
    """A pod of the candidate whose container has ended: out of memory, a fault, a refused artifact."""
    for pod in live_pods(serving):
        if pod.template_artifact == artifact and pod.restarts > 0:
            why = f": {pod.last_words}" if pod.last_words else f", {pod.waiting_reason}" if pod.waiting_reason else ""
            return Failure("CanaryCrashed", f"{pod.name} restarted {pod.restarts} times{why}")
    return None
