"""The operator's own metrics. Names, labels and alerts: docs/operator.md.

Gauges show the last turn and go with their object, or with the lease; counters follow what was decided, not how often
it was looked at, and begin at 0: the increase of a series that is born with its first event is none.
"""

import platform
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tkcc import __version__
from tkcc.api.condition import ConditionStatus, ConditionType, RunConditionType, find_condition
from tkcc.api.run import RunOutcome, RunStatus
from tkcc.api.status import Phase, Status
from tkcc.control.actions import EmitEvent
from tkcc.control.observed import Observed
from tkcc.kube.resources import INFERENCE_DEPLOYMENT, RECOMPILATION_RUN
from tkcc.shell.drive import Key, TurnResult

_TURN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_RUN_BUCKETS_S = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
_OBJECT = ("namespace", "name")
_PROMOTED, _ROLLED_BACK = "promoted", "rolled_back"  # values of the label `result` of tkcc_rollouts_total


class Metrics:
    def __init__(self) -> None:
        self.registry = reg = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, (*_OBJECT, *labels), registry=reg)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*_OBJECT, *labels), registry=reg)

        # The operator itself
        self.reconciles = Counter("tkcc_reconcile", "Turns.", ("kind", "result"), registry=reg)
        self.reconcile_s = Histogram(
            "tkcc_reconcile_duration_seconds", "Time of a turn.", ("kind",), buckets=_TURN_BUCKETS_S, registry=reg
        )
        self.watch_at = Gauge(
            "tkcc_watch_last_event_timestamp_seconds", "Last sign of life of a watch.", ("resource",), registry=reg
        )
        self.is_leader = Gauge("tkcc_is_leader", "1 while this process holds the lease.", registry=reg)
        build = Gauge("tkcc_build_info", "Always 1.", ("version", "python"), registry=reg)
        build.labels(__version__, platform.python_version()).set(1)
        for kind in (INFERENCE_DEPLOYMENT.kind, RECOMPILATION_RUN.kind):
            for result in TurnResult:
                self.reconciles.labels(kind, result.value)

        # One InferenceDeployment
        self.condition = gauge("tkcc_condition", "1 for the status that a condition has.", "type", "status")
        self.phase = gauge("tkcc_phase", "1 for the phase that it is in.", "phase")
        self.scrape_errors = gauge("tkcc_scrape_errors", "Serving pods that did not answer in the last round.")
        self.prompt_tokens = gauge("tkcc_observed_prompt_tokens_mean", "Mean of a request, long window.")
        self.hit_ratio = gauge("tkcc_observed_prefix_cache_hit_ratio", "Token-weighted, long window.")
        self.drift_distance = gauge("tkcc_drift_distance", "To the nearest plan; drift is more than 1.", "window")
        self.drift_detected = counter("tkcc_drift_detected", "Drifts seen.")
        self.plan_age_s = gauge("tkcc_baseline_age_seconds", "Since the newest plan was made.")
        self.runs = counter("tkcc_recompilation_runs", "Ended runs, by reason.", "result")
        self.run_s = Histogram(
            "tkcc_recompilation_duration_seconds", "Time of a run.", _OBJECT, buckets=_RUN_BUCKETS_S, registry=reg
        )
        self.candidates = counter("tkcc_candidates", "Judged candidates of ended runs.", "outcome")
        self.best_gain = gauge("tkcc_candidate_best_gain_ratio", "Time saved per output token, last run's best, 0-1.")
        self.awaiting_approval = gauge(
            "tkcc_rollout_awaiting_approval", "1 while a canary that passed all steps waits for approvedArtifact."
        )
        self.weight = gauge("tkcc_canary_weight_ratio", "The canary's share of traffic, 0-1.", "kind")
        self.analysis = gauge(
            "tkcc_canary_analysis_result", "1 for the verdict of a metric's last measurement.", "metric", "verdict"
        )
        self.rollouts = counter("tkcc_rollouts", "Ended rollouts, by result.", "result")
        self.rollout_s = Histogram(
            "tkcc_rollout_duration_seconds", "Time of a rollout.", _OBJECT, buckets=_RUN_BUCKETS_S, registry=reg
        )
        self.rollbacks = counter("tkcc_rollbacks", "Rollouts taken back, by reason.", "reason")

    def turn(self, kind: str, result: TurnResult, took_s: float) -> None:
        self.reconciles.labels(kind, result.value).inc()
        self.reconcile_s.labels(kind).observe(took_s)

    def deployment(self, key: Key, old: Status, new: Status, seen: Observed) -> None:
        """After a turn whose status was written."""
        own = (key.namespace, key.name)
        self._begin(own)
        self._conditions(own, new)
        for phase in Phase:
            self.phase.labels(*own, phase.value).set(phase is new.phase)
        self._drift(own, new, seen)
        self._rollout(own, old, new, seen)
        self.scrape_errors.labels(*own).set(len(seen.scrape_errors))

    def run_ended(self, key: Key, deployment: str, status: RunStatus) -> None:
        """Once, when its end was written."""
        own = (key.namespace, deployment)
        end = find_condition(status.conditions, RunConditionType.SUCCEEDED)
        self.runs.labels(*own, end.reason if end else "Unknown").inc()
        self.candidates.labels(*own, "accepted").inc(status.candidates.accepted)
        self.candidates.labels(*own, "refused").inc(status.candidates.refused)
        self.best_gain.labels(*own).set(status.gain_milli / 1000)
        if status.started_at and status.finished_at:
            self.run_s.labels(*own).observe((status.finished_at - status.started_at).total_seconds())

    def forget(self, key: Key) -> None:
        """Drop every series of a deleted object."""
        for metric in vars(self).values():
            if isinstance(metric, Counter | Gauge | Histogram) and metric._labelnames[:2] == _OBJECT:
                metric.remove_by_labels({"namespace": key.namespace, "name": key.name})

    def _begin(self, own: tuple[str, str]) -> None:
        self.drift_detected.labels(*own)
        for outcome in RunOutcome:
            self.runs.labels(*own, outcome.value)
        for verdict in ("accepted", "refused"):
            self.candidates.labels(*own, verdict)
        for result in (_PROMOTED, _ROLLED_BACK):
            self.rollouts.labels(*own, result)

    def _conditions(self, own: tuple[str, str], status: Status) -> None:
        for type_ in ConditionType:
            have = find_condition(status.conditions, type_)
            for value in ConditionStatus:
                self.condition.labels(*own, type_.value, value.value).set(have is not None and have.status is value)

    def _drift(self, own: tuple[str, str], new: Status, seen: Observed) -> None:
        drift = new.drift
        _set_known(self.drift_distance.labels(*own, "long"), drift.long_distance_milli, 1000)
        _set_known(self.drift_distance.labels(*own, "short"), drift.short_distance_milli, 1000)
        _set_known(self.prompt_tokens.labels(*own), drift.long_prompt_tokens, 1)
        _set_known(self.hit_ratio.labels(*own), drift.long_hit_ratio_milli, 1000)
        newest = max((plan.added_at for plan in drift.plans if plan.added_at), default=None)
        if newest:
            self.plan_age_s.labels(*own).set((seen.now - newest).total_seconds())

    def _rollout(self, own: tuple[str, str], old: Status, new: Status, seen: Observed) -> None:
        rollout = new.rollout
        is_under_way = new.phase in (Phase.WARMING, Phase.CANARY, Phase.PROMOTING)
        is_waiting = rollout is not None and is_under_way and rollout.awaiting_approval
        self.awaiting_approval.labels(*own).set(is_waiting)
        desired = rollout.desired_weight if rollout and is_under_way else 0
        observed = rollout.observed_weight if rollout and is_under_way else 0
        self.weight.labels(*own, "desired").set(desired / 100)
        self.weight.labels(*own, "observed").set((observed or 0) / 100)
        for item in rollout.analysis if rollout else ():
            for verdict in type(item.verdict):
                self.analysis.labels(*own, item.metric, verdict.value).set(item.verdict is verdict)
        ended = old.phase in (Phase.PROMOTING, Phase.ROLLING_BACK) and new.phase is Phase.SERVING
        if not (ended and rollout):
            return
        promoted = old.phase is Phase.PROMOTING
        self.rollouts.labels(*own, _PROMOTED if promoted else _ROLLED_BACK).inc()
        self.rollout_s.labels(*own).observe((seen.now - rollout.started_at).total_seconds())
        if not promoted:
            self.rollbacks.labels(*own, rollout.abort_reason or "Unknown").inc()

    def events(self, key: Key, events: Iterable[EmitEvent]) -> None:
        for event in events:
            if event.reason == "TrafficDriftDetected":
                self.drift_detected.labels(key.namespace, key.name).inc()


def _set_known(gauge: Gauge, value: int | None, scale: int) -> None:
    """NaN where it is not known: a stale figure would look like a fresh one."""
    gauge.set(float("nan") if value is None else value / scale)
