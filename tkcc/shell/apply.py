"""Carries out the core's actions for one InferenceDeployment, in order; the first that fails ends the turn."""

from dataclasses import replace
from typing import assert_never

from tkcc.api.codec import from_dict
from tkcc.api.condition import Condition, ConditionStatus, RunConditionType, set_condition
from tkcc.api.fields import BASELINE
from tkcc.api.run import RunSpec, RunStatus
from tkcc.control.actions import (
    Action,
    EmitEvent,
    EnsureArtifact,
    EnsureArtifactGone,
    EnsureCanary,
    EnsureProbed,
    EnsureRun,
    EnsureRunEnded,
    EnsureRunGone,
    EnsureService,
    EnsureSize,
    EnsureStable,
    EnsureWeight,
)
from tkcc.control.run import has_ended
from tkcc.kube.cluster import STATUS, TRAFFIC, WORKLOAD, Cluster
from tkcc.kube.errors import Conflict, Invalid, NotFound
from tkcc.kube.resources import CONFIG_MAP, DEPLOYMENT, POD, RECOMPILATION_RUN
from tkcc.shell.memory import Memory
from tkcc.shell.observe import World
from tkcc.shell.own import Own
from tkcc.shell.render import artifact as render_artifact
from tkcc.shell.render import run as render_run
from tkcc.shell.render import serving as render
from tkcc.shell.render.names import (
    CANARY,
    ROLE_LABEL,
    SERVING_LABEL,
    STABLE,
    Owner,
    artifact_name,
    result_name,
    serving_name,
)
from tkcc.shell.settings import Settings
from tkcc.shell.traffic import TrafficTaker


class Applier:
    def __init__(self, cluster: Cluster, settings: Settings, traffic: TrafficTaker):
        self._cluster = cluster
        self._settings = settings
        self._traffic = traffic

    async def apply(self, action: Action, world: World, memory: Memory) -> None:
        """Make it true. Raises ClusterError; Invalid also for a result that is not what it claims."""
        own = memory.own
        owner, spec, settings = world.owner, world.spec, self._settings
        match action:
            case EnsureService():
                await own.apply(render.service(owner))
                await own.apply(render.disruption_budget(owner))
                if settings.network_policies:
                    await own.apply(render.network_policy(owner, settings))
            case EnsureStable(artifact, replicas):
                await self._hold(artifact, world, memory)
                try:
                    await own.apply(render.deployment(owner, spec, settings, STABLE, artifact, replicas))
                except Invalid:
                    if world.seen.stable is not None:  # and is ours
                        await self._ensure_size(owner, STABLE, replicas)
                    raise
            case EnsureCanary(artifact, replicas):
                if replicas > 0:
                    await self._hold(artifact, world, memory)
                if replicas > 0 or world.seen.canary is not None:
                    await own.apply(render.deployment(owner, spec, settings, CANARY, artifact, replicas))
            case EnsureSize(role, replicas):
                await self._ensure_size(owner, role, replicas)
            case EnsureWeight(_, pods):
                await self._ensure_in_service(world, frozenset(pods))
            case EnsureProbed(pods, after):
                stable = next(iter(world.ready(STABLE)), None)
                memory.prober.ensure(world.addresses(pods), stable, spec.model.name, after)
            case EnsureRun(name, run_spec):
                await self._ensure_run(world, own, name, run_spec)
            case EnsureRunEnded(name, reason, message):
                await self._ensure_run_ended(world, name, reason, message)
            case EnsureRunGone(name):
                await self._cluster.delete(RECOMPILATION_RUN, owner.namespace, name)
            case EnsureArtifact(digest, run):
                await self._ensure_artifact(owner, digest, run)
            case EnsureArtifactGone(digest):
                await memory.held.let_go(digest)
            case EmitEvent():
                raise AssertionError("events are posted after the status was written")
            case _:
                assert_never(action)

    async def _hold(self, artifact: str, world: World, memory: Memory) -> None:
        """Before pods mount it. One that was deleted is made again while the run that found it is kept."""
        if artifact != BASELINE and all(have.digest != artifact for have in world.seen.artifacts):
            for run in world.seen.runs:
                if run.result and run.result.artifact == run.source_digest == artifact:
                    await self._ensure_artifact(world.owner, artifact, run.name)
        await memory.held.hold(artifact)

    async def _ensure_size(self, owner: Owner, role: str, replicas: int) -> None:
        """Of a template that is refused this much can be done: pods that serve, of the one before."""
        name, patch = serving_name(owner.name, role), {"spec": {"replicas": replicas}}
        await self._cluster.merge(DEPLOYMENT, owner.namespace, name, patch, WORKLOAD)

    async def _ensure_in_service(self, world: World, wanted: frozenset[str]) -> None:
        for name, pod in world.pods.items():
            labels = pod["metadata"]["labels"]
            if labels.get(ROLE_LABEL) != CANARY or (labels.get(SERVING_LABEL) == "true") == (name in wanted):
                continue
            value = "true" if name in wanted else None
            # The uid makes this fail on a pod that took the name since, and a merge patch never creates one.
            patch = {"metadata": {"uid": pod["metadata"]["uid"], "labels": {SERVING_LABEL: value}}}
            try:
                await self._cluster.merge(POD, world.owner.namespace, name, patch, TRAFFIC)
            except NotFound:
                if name in wanted:
                    raise Conflict(f"canary pod {name} has gone") from None
        missing = wanted - world.pods.keys()
        if missing:
            raise Conflict(f"canary pods {', '.join(sorted(missing))} have gone")

    async def _ensure_run(self, world: World, own: Own, name: str, spec: RunSpec) -> None:
        if name in world.runs:
            await self._traffic.ensure(Owner.of(world.runs[name]), spec)
            return
        async with self._traffic.making(world.owner.namespace, name):
            recording = await self._traffic.take(world.owner.namespace, spec)  # first: what is there now drifted
            run = await own.create_once(render_run.recompilation_run(world.owner, name, spec))
            await self._traffic.make(Owner.of(run), spec, recording)

    async def _ensure_run_ended(self, world: World, name: str, reason: str, message: str) -> None:
        run = world.runs.get(name)
        if run is None:
            return
        status, meta = from_dict(RunStatus, run.get("status") or {}), run["metadata"]
        if has_ended(status):
            return
        end = Condition(RunConditionType.SUCCEEDED, ConditionStatus.FALSE, reason, message, meta["generation"])
        conditions = set_condition(status.conditions, end, world.seen.now)
        ended = replace(status, finished_at=world.seen.now, conditions=conditions)
        patch = render_run.status_patch(status, ended)
        await self._cluster.merge_status(
            RECOMPILATION_RUN, meta["namespace"], name, meta["resourceVersion"], patch, STATUS
        )

    async def _ensure_artifact(self, owner: Owner, digest: str, run: str) -> None:
        if await self._cluster.get(CONFIG_MAP, owner.namespace, artifact_name(digest)):
            return  # immutable, and its content is checked when it is read
        result = await self._cluster.get(CONFIG_MAP, owner.namespace, result_name(run))
        if result is None:
            raise Conflict(f"the result of {run} has gone before its artifact was made")
        try:
            made = render_artifact.artifact(owner, digest, result.get("data") or {})
        except ValueError as err:
            raise Invalid(f"the result of {run} is refused: {err}") from err
        await self._cluster.create_once(made, WORKLOAD)
