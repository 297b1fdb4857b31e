"""Takes the recorded traffic of a run from the serving pods' rings and keeps it in the run's traffic ConfigMap."""

import asyncio
from weakref import WeakValueDictionary

from tkcc.api.run import RunSpec
from tkcc.api.workload import Recording
from tkcc.kube.cluster import WORKLOAD, Cluster
from tkcc.kube.errors import Conflict
from tkcc.kube.resources import CONFIG_MAP, POD, RECOMPILATION_RUN, JsonObject
from tkcc.shell.observe import addresses, recorded_since
from tkcc.shell.recording import fitted, merged
from tkcc.shell.render import run as render
from tkcc.shell.render.names import COMPONENT_LABEL, DEPLOYMENT_LABEL, Owner, traffic_name
from tkcc.shell.render.serving import COMPONENT as SERVING
from tkcc.shell.scrape import Scraper

MAX_REQUESTS = 4000  # what a slow tier can replay in reasonable time


class TrafficTaker:
    def __init__(self, cluster: Cluster, scraper: Scraper):
        self._cluster = cluster
        self._scraper = scraper
        self._taking = asyncio.Lock()  # one at a time: what is taken is the largest that the operator ever holds
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def take(self, namespace: str, spec: RunSpec) -> Recording | None:
        """What the pods recorded since the window began; None where they record nothing."""
        labels = {DEPLOYMENT_LABEL: spec.deployment, COMPONENT_LABEL: SERVING}
        pods = addresses(await self._cluster.list(POD, namespace, labels))
        kept: Recording | None = None
        async with self._taking:
            async for recording in self._scraper.recordings(pods, recorded_since(spec), MAX_REQUESTS):
                kept = merged([*([kept] if kept else []), recording], spec.window_end, MAX_REQUESTS)
        return fitted(kept) if kept else None

    def making(self, namespace: str, run: str) -> asyncio.Lock:
        """Held while a run and its traffic are made: the run's own turn would take another recording, and race."""
        return self._making.setdefault(f"{namespace}/{run}", asyncio.Lock())

    async def ensure(self, run: Owner, spec: RunSpec) -> JsonObject:
        """The ConfigMap, made if it is not there. One made late, after a crash, holds what the rings still have."""
        async with self.making(run.namespace, run.name):
            return await self.make(run, spec)

    async def make(self, run: Owner, spec: RunSpec, recording: Recording | None = None) -> JsonObject:
        """As `ensure`, for who is `making` it. Raises Conflict where the run has gone meanwhile."""
        have = await self._cluster.get(CONFIG_MAP, run.namespace, traffic_name(run.name))
        if have is not None:
            return have
        recording = recording or await self.take(run.namespace, spec)
        owner = await self._cluster.get(RECOMPILATION_RUN, run.namespace, run.name)
        if owner is None or owner["metadata"]["uid"] != run.uid:  # gone while the pods were asked
            raise Conflict(f"run {run.namespace}/{run.name} was deleted")
        return await self._cluster.create_once(render.traffic(run, spec, recording), WORKLOAD)
