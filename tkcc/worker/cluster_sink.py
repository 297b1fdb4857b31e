"""A campaign's journal, result and progress in the cluster: one result ConfigMap, and this run's own status.

The campaign is synchronous and the cluster's client is not: an event loop in a thread of its own does the calls, each
with the client's time limit and retries.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from tkcc.api.codec import to_dict
from tkcc.api.condition import Condition, ConditionStatus, RunConditionType
from tkcc.kube.cluster import WORKER, Cluster, connect
from tkcc.kube.errors import ClusterError
from tkcc.kube.resources import CONFIG_MAP, RECOMPILATION_RUN
from tkcc.worker import outcome
from tkcc.worker.campaign import State, Tried

CALL_S = 120.0  # the client's retries included
STATUS_INTERVAL_S = 2.0
JOURNAL = "journal.jsonl"
CONFIRMED = frozenset({State.CONFIRMED_FAST, State.CONFIRMED_SLOW, State.ACCEPTED})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunName:
    namespace: str
    name: str
    result: str  # the ConfigMap


class ClusterSink:
    """See `tkcc.worker.job.Sink`; also tells the run's status what happens (see campaign.Observer)."""

    def __init__(self, run: RunName) -> None:
        """Raises ClusterError."""
        self._run = run
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._context = connect()
        self._cluster: Cluster = self._do(self._context.__aenter__())
        self._journal = ""
        self._conditions: dict[str, Condition] = {}
        self._status_at = 0.0

    def close(self) -> None:
        self._do(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)

    # --- the result ConfigMap ---

    def read_journal(self) -> Iterable[str]:
        found = self._do(self._cluster.get(CONFIG_MAP, self._run.namespace, self._run.result))
        if found is None:
            raise ClusterError(f"no ConfigMap {self._run.result}: the operator makes it")
        self._journal = (found.get("data") or {}).get(JOURNAL, "")
        return self._journal.splitlines()

    def append_journal(self, line: str) -> None:
        self._journal += line + "\n"
        self._merge({JOURNAL: self._journal})

    def write(self, files: Mapping[str, str]) -> None:
        """All in one patch; a journal beside it that is too large with it is cut from its start."""
        room = 1_000_000 - sum(len(text.encode()) for text in files.values())
        self._merge({**files, JOURNAL: self._journal[-max(room, 0) :] if room > 0 else ""})

    def _merge(self, data: Mapping[str, str]) -> None:
        patch = {"data": dict(data)}
        self._do(self._cluster.merge(CONFIG_MAP, self._run.namespace, self._run.result, patch, WORKER))

    # --- the run's status ---

    def changed(self, tried: list[Tried], current: Tried | None, doing: str, pairs: int) -> None:
        """Every couple of seconds; a status that cannot be written is no reason to stop searching."""
        now = time.monotonic()
        if doing and now - self._status_at < STATUS_INTERVAL_S:
            return
        self._status_at = now
        tier = "slow" if current and any(key.startswith("slow") for key in current.reports) else "fast"
        if current and doing:
            tier = doing.partition(" ")[0]
        if tier == "slow" and RunConditionType.FAST_TIER_COMPLETED not in self._conditions:
            self._complete(RunConditionType.FAST_TIER_COMPLETED, f"{len(tried)} candidates were screened")
        self._write_status(tried, tier)

    def finish(self, tried: tuple[Tried, ...], message: str) -> None:
        """Both tiers are done."""
        if RunConditionType.FAST_TIER_COMPLETED not in self._conditions:
            self._complete(RunConditionType.FAST_TIER_COMPLETED, f"{len(tried)} candidates were screened")
        self._complete(RunConditionType.SLOW_TIER_COMPLETED, message)
        self._write_status(list(tried), "slow")

    def _complete(self, type_: RunConditionType, message: str) -> None:
        # The clock is read in the process's own loop, as the style asks.
        now = datetime.fromtimestamp(time.time(), UTC)
        self._conditions[type_] = Condition(type_, ConditionStatus.TRUE, "Completed", message[:4096], 1, now)

    def _write_status(self, tried: list[Tried], tier: str) -> None:
        gains = [t.log_gain for t in tried if t.log_gain is not None and t.state in CONFIRMED]
        status: dict[str, Any] = {
            "tier": tier,
            "candidates": to_dict(outcome.counts(tried)),
            "top": [to_dict(summary) for summary in outcome.top(tried)],
            "gainMilli": outcome.saved_milli(max(gains, default=0.0)),
            "conditions": [to_dict(condition) for condition in self._conditions.values()],
        }
        body = {
            "apiVersion": RECOMPILATION_RUN.api_version,
            "kind": RECOMPILATION_RUN.kind,
            "metadata": {"namespace": self._run.namespace, "name": self._run.name},
            "status": status,
        }
        try:
            self._do(self._cluster.apply_status(body, WORKER))
        except ClusterError as err:
            print(f"tkcc worker: the run's status was not written: {err}", flush=True)

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_S)


class Both:
    """Two observers as one."""

    def __init__(self, *observers: Any) -> None:
        self._observers = observers

    def changed(self, tried: list[Tried], current: Tried | None, doing: str, pairs: int) -> None:
        for observer in self._observers:
            observer.changed(tried, current, doing, pairs)
