"""What the operator keeps about one InferenceDeployment between turns: measurements, never decisions.

All of it can be lost. Samples come back from the checkpoint ConfigMap, finished requests from the pods' rings, probes
by asking again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tkcc.api.observation import RequestSample
from tkcc.api.spec import Spec
from tkcc.api.status import Status
from tkcc.control.observed import ArtifactSeen
from tkcc.shell import samples as ring
from tkcc.shell.artifacts import Artifacts
from tkcc.shell.configmaps import Parsed
from tkcc.shell.own import Own
from tkcc.shell.probe import Prober
from tkcc.shell.samples import Samples
from tkcc.shell.scrape import Reading
from tkcc.shell.seen import ResultSeen

MAX_REQUESTS = 20_000  # of all pods of one object, half a kilobyte each
MAX_REQUESTS_OF_ALL = 60_000
REQUESTS_KEPT = timedelta(minutes=15)  # outside a rollout
CHECKPOINT_EVERY = timedelta(seconds=10)
WATCH_BREAK = timedelta(minutes=2)  # turns are due every 15 s, and after a failure within 60 s


@dataclass
class Memory:
    own: Own
    held: Artifacts
    prober: Prober
    results: Parsed[ResultSeen]
    artifacts: Parsed[ArtifactSeen | None]
    samples: Samples = ()
    requests: tuple[RequestSample, ...] = ()
    max_requests: int = MAX_REQUESTS
    cursors: dict[str, int] = field(default_factory=dict)  # series -> where its finished requests were read to
    is_restored: bool = False
    checkpoint_at: datetime | None = None
    scrape_errors: tuple[str, ...] = ()
    looked_at: datetime | None = None
    watched_since: datetime | None = None

    def take(self, readings: Iterable[Reading], spec: Spec, status: Status, now: datetime) -> None:
        """Add one round of readings and forget what nobody can ask for any more."""
        self.watched_since = unbroken(self.watched_since, self.looked_at, now)
        self.looked_at = now
        readings = list(readings)
        new = [reading.sample for reading in readings if reading.sample]
        self.samples = ring.extend(self.samples, new, spec.drift, now)
        self.cursors |= {reading.series: reading.next_seq for reading in readings if reading.info}
        alive = {sample.series for sample in self.samples}
        self.cursors = {series: seq for series, seq in self.cursors.items() if series in alive}
        since = now - REQUESTS_KEPT
        if status.rollout and status.rollout.measured_since:
            since = min(since, status.rollout.measured_since)
        found = (*self.requests, *(request for reading in readings for request in reading.requests))
        self.requests = newest_of_each((request for request in found if request.started_at >= since), self.max_requests)
        self.scrape_errors = tuple(reading.error for reading in readings if reading.error)

    def is_checkpoint_due(self, now: datetime) -> bool:
        return bool(self.samples) and (self.checkpoint_at is None or now - self.checkpoint_at >= CHECKPOINT_EVERY)


def newest_of_each(requests: Iterable[RequestSample], most: int) -> tuple[RequestSample, ...]:
    """The newest requests, as many of each pod: the verdict on a canary compares what is left of both sides, so neither
    the order in which pods are read nor a pod's loquacity may decide whose requests are forgotten."""
    by_pod: dict[str, list[RequestSample]] = {}
    for request in requests:
        by_pod.setdefault(request.pod, []).append(request)
    share = max(1, most // max(1, len(by_pod)))
    newest = (sorted(all_of, key=lambda request: request.started_at)[-share:] for all_of in by_pod.values())
    return tuple(request for kept in newest for request in kept)


def unbroken(since: datetime | None, last: datetime | None, now: datetime) -> datetime:
    """Since when turns have followed each other without a break: not while this process, its lease or the API server
    was away."""
    return now if since is None or last is None or now - last > WATCH_BREAK else since
