"""The operator's process without kopf: what is started, what wakes whom, what is stopped, in which order."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import httpx

from tkcc.kube.cluster import Cluster, connect
from tkcc.kube.errors import ClusterError
from tkcc.kube.resources import INFERENCE_DEPLOYMENT, RECOMPILATION_RUN, JsonObject
from tkcc.shell.apply import Applier
from tkcc.shell.drive import Driver, Key, Pace, Turn, TurnObserver, TurnResult
from tkcc.shell.lease import LeaseGate
from tkcc.shell.metrics import Metrics
from tkcc.shell.observe import Observer
from tkcc.shell.record import Recorder
from tkcc.shell.render.names import DEPLOYMENT_LABEL, RUN_LABEL
from tkcc.shell.runs import Runs
from tkcc.shell.scrape import Scraper
from tkcc.shell.server import Server
from tkcc.shell.settings import Settings
from tkcc.shell.traffic import TrafficTaker
from tkcc.shell.turn import DeploymentTurns, RunTurns
from tkcc.shell.watches import Watches

log = logging.getLogger(__name__)

WATCHED = ("inferencedeployments", "recompilationruns", "deployments", "pods", "jobs")
STANDBY_S = 60.0
STOP_S = 20.0  # for turns that run; the pod's grace period is longer


def hands(
    cluster: Cluster, http: httpx.AsyncClient, settings: Settings, metrics: Metrics, wake: Callable[[Key], None]
) -> tuple[DeploymentTurns, RunTurns]:
    """The turns of both kinds, wired to one cluster. `wake` is called when a probe has been answered."""
    scraper = Scraper(http, settings.scrape)
    traffic, recorder = TrafficTaker(cluster, scraper), Recorder(cluster, settings.identity)
    observer, applier = Observer(cluster, scraper), Applier(cluster, settings, traffic)
    deployments = DeploymentTurns(cluster, settings, http, observer, applier, recorder, metrics, wake)
    return deployments, RunTurns(cluster, settings, Runs(cluster, settings, traffic), recorder, metrics)


class Process:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.metrics = Metrics()
        self.watches = Watches(
            WATCHED,
            settings.watch_limit_s,
            time.monotonic,
            lambda watch: self.metrics.watch_at.labels(watch).set_to_current_time(),
        )
        self._server = Server(self.metrics.registry, self.problems, lambda: self._is_started)
        self._is_started = False
        self._stack = AsyncExitStack()
        self._lease: LeaseGate | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._deployments: Driver | None = None
        self._runs: Driver | None = None

    async def start(self) -> None:
        """Raises ClusterError without usable credentials, OSError when the port is taken."""
        settings = self.settings
        door = await self._stack.enter_async_context(connect())
        self._lease = LeaseGate(
            door, settings.operator_namespace, settings.lease_name, settings.identity, settings.lease_duration_s
        )
        cluster = door.gated(lambda: self._lease is not None and self._lease.is_held)
        http = await self._stack.enter_async_context(
            # Pods come and go: no proxies, no connection that outlives a pod for long.
            httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=64, keepalive_expiry=10.0))
        )
        deployments, runs = hands(cluster, http, settings, self.metrics, self._wake_deployment)
        self._stack.push_async_callback(deployments.close)
        self._deployments = Driver(
            self._gated(deployments.turn, deployments.forget), Pace(), self._observer(INFERENCE_DEPLOYMENT.kind)
        )
        self._runs = Driver(self._gated(runs.turn), Pace(), self._observer(RECOMPILATION_RUN.kind))
        await self._server.start(settings.http_port)
        self._lease_task = asyncio.create_task(self._lease.keep(self._on_lease), name="lease")
        self._is_started = True

    async def stop(self) -> None:
        """Turns that run may finish within a deadline; then the lease is given up: a successor need not wait for it."""
        self._is_started = False
        drivers = [driver for driver in (self._deployments, self._runs) if driver]
        await asyncio.gather(*(driver.stop(STOP_S) for driver in drivers))
        if self._lease_task:
            self._lease_task.cancel()
            await asyncio.gather(self._lease_task, return_exceptions=True)
        if self._lease:
            with contextlib.suppress(ClusterError):
                await self._lease.release()
        await self._server.stop()
        await self._stack.aclose()

    def saw(self, resource: str, obj: JsonObject) -> None:
        """A watch event about `obj`: wake whom it concerns."""
        meta = obj["metadata"]
        namespace, labels = meta["namespace"], meta.get("labels", {})
        self.watches.saw(resource)
        if self._deployments is None or self._runs is None:
            return
        if resource == INFERENCE_DEPLOYMENT.plural:
            self._deployments.wake(Key(namespace, meta["name"]))
            return
        run = meta["name"] if resource == RECOMPILATION_RUN.plural else labels.get(RUN_LABEL)
        if run:
            self._runs.wake(Key(namespace, run))
        if DEPLOYMENT_LABEL in labels and (not run or resource == RECOMPILATION_RUN.plural):
            self._deployments.wake(Key(namespace, labels[DEPLOYMENT_LABEL]))

    def problems(self) -> list[str]:
        """Why this process should be restarted."""
        found = [f"the watch of {name} has been silent for {s:.0f} s" for name, s in self.watches.stalled().items()]
        if self._lease_task and self._lease_task.done():
            found.append("the lease is not being kept")
        return found

    def _wake_deployment(self, key: Key) -> None:
        if self._deployments:
            self._deployments.wake(key)

    def _gated(self, turn: Turn, forget: Callable[[Key], Awaitable[None]] | None = None) -> Turn:
        """Without the lease nothing is looked at or remembered: whoever holds it does. A change of it wakes all."""

        async def gated(key: Key) -> float | None:
            if self._lease and self._lease.is_held:
                return await turn(key)
            if forget:
                await forget(key)
            return STANDBY_S

        return gated

    def _observer(self, kind: str) -> TurnObserver:
        def observe(key: Key, result: TurnResult, took_s: float) -> None:
            self.metrics.turn(kind, result, took_s)

        return observe

    def _on_lease(self, is_held: bool) -> None:
        self.metrics.is_leader.set(is_held)
        for driver in (self._deployments, self._runs):
            if driver:
                for key in driver.keys:
                    driver.wake(key)
