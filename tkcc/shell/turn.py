"""A turn: read fresh, reconcile, apply the actions in order, write the status with the resourceVersion read.

A crash or a conflict anywhere means: run again from the old status, and nothing is done twice. What the API server
refuses is shown in the status, in the API server's words, since only the user can mend it; so is any other failure.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

import httpx

from tkcc.api.codec import from_dict, to_dict
from tkcc.api.condition import Condition, ConditionStatus, ConditionType, set_condition
from tkcc.api.run import RunStatus
from tkcc.api.spec import Spec
from tkcc.api.status import Status
from tkcc.control.actions import EmitEvent
from tkcc.control.reconcile import look_again_in, reconcile
from tkcc.control.run import has_ended, reconcile_run
from tkcc.kube.cluster import STATUS, Cluster
from tkcc.kube.errors import ClusterError, Conflict, NotLeader
from tkcc.kube.resources import CONFIG_MAP, INFERENCE_DEPLOYMENT, RECOMPILATION_RUN, JsonObject
from tkcc.shell.apply import Applier
from tkcc.shell.artifacts import Artifacts
from tkcc.shell.configmaps import Parsed
from tkcc.shell.drive import Key
from tkcc.shell.memory import MAX_REQUESTS, MAX_REQUESTS_OF_ALL, Memory
from tkcc.shell.metrics import Metrics
from tkcc.shell.observe import ArtifactParser, Observer
from tkcc.shell.own import Own
from tkcc.shell.probe import Prober
from tkcc.shell.record import Recorder
from tkcc.shell.render.names import Owner, labels, observations_name, owned
from tkcc.shell.render.run import status_patch
from tkcc.shell.runs import Runs
from tkcc.shell.samples import pack
from tkcc.shell.seen import meta, result
from tkcc.shell.settings import Settings

log = logging.getLogger(__name__)

RUN_TURN_S = 15.0  # from one turn of a run to the next, where nothing wakes it
REFUSED_TURN_S = 60.0  # from one look at an object that only its user can mend to the next


class DeploymentTurns:
    """Turns of InferenceDeployments, and what is kept about each between them."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        http: httpx.AsyncClient,
        observer: Observer,
        applier: Applier,
        recorder: Recorder,
        metrics: Metrics,
        wake: Callable[[Key], None],
    ):
        self._cluster, self._settings, self._http = cluster, settings, http
        self._observer, self._applier = observer, applier
        self._recorder, self._metrics = recorder, metrics
        self._wake = wake
        self._memories: dict[Key, tuple[str, Memory]] = {}  # with the uid of the object they are about

    async def turn(self, key: Key) -> float | None:
        """Seconds until the next one is due; None once the object has gone or is going."""
        obj = await self._cluster.get(INFERENCE_DEPLOYMENT, key.namespace, key.name)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            await self.forget(key)
            return None
        status = _status(obj)
        try:
            spec = from_dict(Spec, obj["spec"])
        except ValueError as err:  # the CRD lets through what this operator does not know
            generation = meta(obj).generation
            refused = Condition(
                ConditionType.ACCEPTED, ConditionStatus.FALSE, "InvalidSpec", str(err)[:1024], generation
            )
            await self._show(obj, status, refused)
            return REFUSED_TURN_S
        memory = await self._memory(key, obj)
        try:
            world = await self._observer.observe(obj, spec, status, memory)
            actions, new = reconcile(spec, status, world.seen)
            for action in actions:
                if not isinstance(action, EmitEvent):
                    await self._applier.apply(action, world, memory)
        except (Conflict, NotLeader):
            raise
        except Exception as err:  # a bug of ours, too: nobody else would tell that this object's turns fail
            text = str(err) if isinstance(err, ClusterError) else f"a turn failed: {type(err).__name__}: {err}"
            degraded = Condition(
                ConditionType.DEGRADED, ConditionStatus.TRUE, "OperatorError", text[:1024], meta(obj).generation
            )
            with contextlib.suppress(ClusterError):  # what failed first matters more
                await self._show(obj, status, degraded)
            raise
        if new != status:
            await self._cluster.apply_status(_status_object(obj, new), STATUS)
        await self._tell(obj, actions)
        self._metrics.deployment(key, status, new, world.seen)
        await self._checkpoint(world.owner, memory, world.seen.now)
        return self._due_s(spec, new)

    async def close(self) -> None:
        for key in list(self._memories):
            await self.forget(key)

    async def forget(self, key: Key) -> None:
        """It has gone, or another operator looks after it: what is known here would soon be wrong."""
        if key in self._memories:
            _, memory = self._memories.pop(key)
            await memory.prober.close()
            self._metrics.forget(key)

    async def _memory(self, key: Key, obj: JsonObject) -> Memory:
        owner = Owner.of(obj)
        uid, memory = self._memories.get(key, ("", None))
        if memory is None or uid != owner.uid:  # deleted and made again under the same name: another object
            await self.forget(key)
            memory = Memory(
                own=Own(self._cluster, owner),
                held=Artifacts(self._cluster, owner),
                prober=Prober(self._http, self._settings.scrape.probe_timeout_s, lambda: self._wake(key)),
                results=Parsed(self._cluster, lambda found: result(found.get("data") or {})),
                artifacts=Parsed(self._cluster, ArtifactParser(owner.uid)),
            )
            self._memories[key] = (owner.uid, memory)
        memory.max_requests = min(MAX_REQUESTS, MAX_REQUESTS_OF_ALL // len(self._memories))
        return memory

    async def _tell(self, obj: JsonObject, actions: Iterable[object]) -> None:
        events = [action for action in actions if isinstance(action, EmitEvent)]
        self._metrics.events(Key(obj["metadata"]["namespace"], obj["metadata"]["name"]), events)
        for event in events:
            await self._recorder.post(obj, event)

    async def _checkpoint(self, owner: Owner, memory: Memory, now: datetime) -> None:
        if not memory.is_checkpoint_due(now):
            return
        name, meta_labels = observations_name(owner.name), labels(owner.name, "observations")
        await memory.own.apply(owned(CONFIG_MAP, owner, name, meta_labels, binaryData=pack(memory.samples)))
        memory.checkpoint_at = now

    async def _show(self, obj: JsonObject, status: Status, condition: Condition) -> None:
        """Write this condition and nothing else: nothing that was decided in this turn has happened."""
        conditions = set_condition(status.conditions, condition, datetime.now(UTC))
        if conditions != status.conditions:
            shown = replace(status, conditions=conditions)
            await self._cluster.apply_status(_status_object(obj, shown), STATUS)

    def _due_s(self, spec: Spec, status: Status) -> float:
        return self._settings.tick_s or look_again_in(spec, status).total_seconds()


class RunTurns:
    """Turns of RecompilationRuns."""

    def __init__(self, cluster: Cluster, settings: Settings, runs: Runs, recorder: Recorder, metrics: Metrics):
        self._cluster, self._settings, self._runs = cluster, settings, runs
        self._recorder, self._metrics = recorder, metrics

    async def turn(self, key: Key) -> float | None:
        """Seconds until the next one is due; None once the run has ended and nothing of it is left to remove."""
        obj = await self._cluster.get(RECOMPILATION_RUN, key.namespace, key.name)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            return None
        world = await self._runs.observe(obj)
        status = from_dict(RunStatus, obj.get("status") or {})
        if has_ended(status) and not world.seen.leftovers:
            return None
        actions, new = reconcile_run(world.spec, status, world.seen)
        own = Own(self._cluster, world.owner)
        for action in actions:
            if not isinstance(action, EmitEvent):
                await self._runs.apply(action, world, own)
        patch = status_patch(status, new)
        if patch:
            version = obj["metadata"]["resourceVersion"]
            await self._cluster.merge_status(RECOMPILATION_RUN, key.namespace, key.name, version, patch, STATUS)
            if has_ended(new) and not has_ended(status):
                self._metrics.run_ended(key, world.spec.deployment, new)
        for action in actions:
            if isinstance(action, EmitEvent):
                await self._recorder.post(obj, action)
        return self._settings.tick_s or RUN_TURN_S


def _status(obj: JsonObject) -> Status:
    """As stored. A status that does not parse is as good as none: the core finds its way back from what exists."""
    try:
        return from_dict(Status, obj.get("status") or {})
    except ValueError as err:
        log.error("%s/%s: status starts anew: %s", obj["metadata"]["namespace"], obj["metadata"]["name"], err)
        return Status()


def _status_object(obj: JsonObject, status: Status) -> JsonObject:
    have = obj["metadata"]
    return {
        "apiVersion": INFERENCE_DEPLOYMENT.api_version,
        "kind": INFERENCE_DEPLOYMENT.kind,
        "metadata": {key: have[key] for key in ("namespace", "name", "resourceVersion")},
        "status": to_dict(status),
    }
