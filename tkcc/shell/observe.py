"""Reads everything a turn of one InferenceDeployment may look at: owned objects, pods, their admin ports."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tkcc.api.fields import BASELINE
from tkcc.api.run import RunSpec
from tkcc.api.spec import ProposerType, Spec, model_claim
from tkcc.api.status import Status
from tkcc.control.observed import ArtifactSeen, MissingReference, Observed, RunSeen, ServingSeen
from tkcc.kube.cluster import Cluster
from tkcc.kube.resources import CLAIM, CONFIG_MAP, DEPLOYMENT, POD, RECOMPILATION_RUN, JsonObject, Kind
from tkcc.shell import samples as ring
from tkcc.shell import seen as see
from tkcc.shell.memory import Memory
from tkcc.shell.probe import PROMPTS
from tkcc.shell.render.artifact import COMPONENT as ARTIFACT
from tkcc.shell.render.names import (
    CANARY,
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    MANAGED_BY,
    ROLE_LABEL,
    ROLES,
    STABLE,
    Owner,
    artifact_name,
    observations_name,
    result_name,
)
from tkcc.shell.render.serving import COMPONENT as SERVING
from tkcc.shell.scrape import PodAddress, Reading, Scraper

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """One turn's view: what the core sees, and the objects behind it that actions refer to by name."""

    owner: Owner
    spec: Spec
    seen: Observed
    pods: Mapping[str, JsonObject]
    runs: Mapping[str, JsonObject]

    def addresses(self, names: Iterable[str]) -> list[PodAddress]:
        """Of those named pods that have one."""
        return addresses(self.pods[name] for name in names if name in self.pods)

    def ready(self, role: str) -> list[PodAddress]:
        pods = (pod for pod in self.pods.values() if pod["metadata"]["labels"].get(ROLE_LABEL) == role)
        return addresses(pod for pod in pods if see.is_ready(pod))


class Observer:
    def __init__(self, cluster: Cluster, scraper: Scraper):
        self._cluster = cluster
        self._scraper = scraper

    async def observe(self, obj: JsonObject, spec: Spec, status: Status, memory: Memory) -> World:
        """Raises ClusterError where the API server does not answer; a pod that does not is part of what is seen."""
        owner = Owner.of(obj)
        await self._restore(owner, memory)
        mine = {**MANAGED_BY, DEPLOYMENT_LABEL: owner.name}
        deployments, pods, runs = await asyncio.gather(
            self._cluster.list(DEPLOYMENT, owner.namespace, {**mine, COMPONENT_LABEL: SERVING}),
            self._cluster.list(POD, owner.namespace, {**mine, COMPONENT_LABEL: SERVING}),
            self._cluster.list(RECOMPILATION_RUN, owner.namespace, mine),
        )
        runs = [run for run in runs if see.is_controlled_by(run, owner.uid)]
        deployments = [have for have in deployments if see.is_controlled_by(have, owner.uid)]
        now = datetime.now(UTC)
        readings = await self._scraper.read(addresses(pods), spec.engine.type, memory.cursors, now)
        memory.take(_without_starting(readings, pods), spec, status, now)
        memory.prober.keep(frozenset(pod["metadata"]["name"] for pod in pods))
        by_role = _serving(deployments, pods, {reading.pod: reading for reading in readings})
        seen = Observed(
            now=datetime.now(UTC),
            meta=see.meta(obj),
            stable=by_role.get(STABLE),
            canary=by_role.get(CANARY),
            runs=await self._runs(owner, runs, memory),
            artifacts=await self._artifacts(owner, {spec.rollout.artifact, status.stable.artifact}, memory),
            samples=memory.samples,
            requests=memory.requests,
            probes=memory.prober.seen,
            probe_ids=tuple(PROMPTS),
            missing=await self._missing(owner, spec),
            scrape_errors=memory.scrape_errors,
            watched_since=memory.watched_since,
        )
        return World(owner, spec, seen, _by_name(pods), _by_name(runs))

    async def _restore(self, owner: Owner, memory: Memory) -> None:
        if memory.is_restored:
            return
        have = await self._cluster.get(CONFIG_MAP, owner.namespace, observations_name(owner.name))
        if have and see.is_controlled_by(have, owner.uid):
            try:
                memory.samples = ring.unpack(have.get("binaryData", {}))
            except ValueError as err:
                log.warning("%s/%s: measurements start anew: %s", owner.namespace, owner.name, err)
        memory.is_restored = True

    async def _runs(self, owner: Owner, runs: list[JsonObject], memory: Memory) -> tuple[RunSeen, ...]:
        """With their results; one that does not parse is left out and said so."""
        labels = {**MANAGED_BY, DEPLOYMENT_LABEL: owner.name}
        metas = {
            item["metadata"]["name"]: item["metadata"]
            for item in await self._cluster.list(CONFIG_MAP, owner.namespace, labels, metadata_only=True)
        }
        found = []
        for run in runs:
            name = run["metadata"]["name"]
            meta = metas.get(result_name(name))
            result = await memory.results.value(meta) if meta else None
            try:
                found.append(see.run(run, result or see.ResultSeen()))
            except ValueError as err:
                log.error("RecompilationRun %s/%s is left out: %s", owner.namespace, name, err)
        memory.results.keep({meta["uid"] for meta in metas.values()})
        return tuple(found)

    async def _artifacts(self, owner: Owner, named: set[str], memory: Memory) -> tuple[ArtifactSeen, ...]:
        """All of the namespace that are what they claim; those named here are seen, labelled or not."""
        listed = await self._cluster.list(CONFIG_MAP, owner.namespace, {COMPONENT_LABEL: ARTIFACT}, metadata_only=True)
        metas = {item["metadata"]["name"]: item["metadata"] for item in listed}
        for name in {artifact_name(digest) for digest in named - {"", BASELINE}} - metas.keys():
            have = await self._cluster.get(CONFIG_MAP, owner.namespace, name)
            if have:
                metas[name] = have["metadata"]
        values = [await memory.artifacts.value(meta) for meta in metas.values()]
        memory.artifacts.keep({meta["uid"] for meta in metas.values()})
        return tuple(value for value in values if value)

    async def _missing(self, owner: Owner, spec: Spec) -> tuple[MissingReference, ...]:
        claim, _ = model_claim(spec.model.uri)
        names: list[tuple[str, Kind, str]] = [("spec.model.uri", CLAIM, claim)]
        proposer = spec.recompilation.proposer
        if proposer.type is ProposerType.SCRIPTED:
            names.append(("spec.recompilation.proposer.scriptConfigMap", CONFIG_MAP, proposer.script_config_map))
        found = await asyncio.gather(*(self._cluster.get(kind, owner.namespace, name) for _, kind, name in names))
        return tuple(
            MissingReference(field, kind.kind, name)
            for (field, kind, name), have in zip(names, found, strict=True)
            if have is None
        )


@dataclass(frozen=True)
class ArtifactParser:
    """An artifact ConfigMap as the core sees it; None for one that is not what it claims, which is logged once."""

    owner_uid: str

    def __call__(self, obj: JsonObject) -> ArtifactSeen | None:
        try:
            return see.artifact(obj, self.owner_uid)
        except ValueError as err:
            log.error("ConfigMap %s/%s is no artifact: %s", obj["metadata"]["namespace"], obj["metadata"]["name"], err)
            return None


def addresses(pods: Iterable[JsonObject]) -> list[PodAddress]:
    """Of pods that run and have an address."""
    return [
        PodAddress(pod["metadata"]["name"], pod["status"]["podIP"])
        for pod in pods
        if pod.get("status", {}).get("phase") == "Running" and pod["status"].get("podIP")
    ]


def recorded_since(spec: RunSpec) -> datetime:
    """From where recorded requests belong to the workload that a run is for."""
    return spec.window_start or datetime.fromtimestamp(0, UTC)


def _serving(
    deployments: Iterable[JsonObject], pods: Iterable[JsonObject], readings: Mapping[str, Reading]
) -> dict[str, ServingSeen]:
    by_role = {have["metadata"]["labels"].get(ROLE_LABEL, ""): have for have in deployments}
    return {
        role: see.serving(
            by_role[role],
            [
                see.pod(pod, readings.get(pod["metadata"]["name"]))
                for pod in pods
                if pod["metadata"]["labels"].get(ROLE_LABEL) == role
            ],
        )
        for role in ROLES
        if role in by_role
    }


def _without_starting(readings: Iterable[Reading], pods: Iterable[JsonObject]) -> list[Reading]:
    """A pod that is not ready is not expected to answer: no error then."""
    ready = {pod["metadata"]["name"] for pod in pods if see.is_ready(pod)}
    return [reading for reading in readings if not reading.error or reading.pod in ready]


def _by_name(objects: Iterable[JsonObject]) -> dict[str, JsonObject]:
    return {obj["metadata"]["name"]: obj for obj in objects}
