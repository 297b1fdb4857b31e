"""One turn of a RecompilationRun: its token, traffic, tiers and Job, and the operator's part of its status."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from tkcc.api.codec import from_dict
from tkcc.api.run import RunSpec
from tkcc.control.actions import EmitEvent, EnsureRunTornDown, EnsureRunWorkers, RunAction
from tkcc.control.observed import RunObserved
from tkcc.kube.cluster import WORKLOAD, Cluster
from tkcc.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    POD,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    JsonObject,
    Kind,
)
from tkcc.shell import seen as see
from tkcc.shell.own import Own, of_uid
from tkcc.shell.render import run as render
from tkcc.shell.render.names import RUN_LABEL, TIER_LABEL, TIERS, Owner, result_name, tier_name, token_name
from tkcc.shell.settings import Settings
from tkcc.shell.traffic import TrafficTaker


@dataclass(frozen=True)
class RunWorld:
    """One turn's view of a run, and what of it exists."""

    owner: Owner
    spec: RunSpec
    seen: RunObserved
    has_token: bool


class Runs:
    def __init__(self, cluster: Cluster, settings: Settings, traffic: TrafficTaker):
        self._cluster = cluster
        self._settings = settings
        self._traffic = traffic

    async def observe(self, obj: JsonObject) -> RunWorld:
        owner, spec = Owner.of(obj), from_dict(RunSpec, obj["spec"])
        mine = {RUN_LABEL: owner.name}
        deployments, pods, job, secret, result_map = await asyncio.gather(
            self._cluster.list(DEPLOYMENT, owner.namespace, mine),
            self._cluster.list(POD, owner.namespace, mine),
            self._cluster.get(JOB, owner.namespace, owner.name),
            self._cluster.get(SECRET, owner.namespace, token_name(owner.name)),
            self._cluster.get(CONFIG_MAP, owner.namespace, result_name(owner.name)),
        )
        result = see.result((result_map or {}).get("data") or {})
        workers = [pod for pod in pods if not _tier_of(pod)]
        succeeded, failed = see.job_end(job, workers) if job else (False, "")
        now = datetime.now(UTC)
        seen = RunObserved(
            now=now,
            name=owner.name,
            generation=obj["metadata"]["generation"],
            created_at=see.when(obj["metadata"]["creationTimestamp"]),
            tiers=tuple(
                see.tier(tier, have, [pod for pod in pods if _tier_of(pod) == tier], now)
                for tier in TIERS
                for have in deployments
                if _tier_of(have) == tier
            ),
            job_exists=job is not None,
            worker_problem=see.problem(workers, now),
            job_failed=failed,
            job_succeeded=succeeded,
            leftovers=bool(deployments or job or secret),
            result=result.result,
            result_error=result.error,
            source_digest=result.source_digest,
        )
        return RunWorld(owner, spec, seen, secret is not None)

    async def apply(self, action: RunAction, world: RunWorld, own: Own) -> None:
        match action:
            case EnsureRunWorkers():
                await self._ensure_workers(world, own)
            case EnsureRunTornDown():
                await self._ensure_torn_down(world.owner)
            case EmitEvent():
                raise AssertionError("events are posted after the status was written")
            case _:
                assert_never(action)

    async def _ensure_workers(self, world: RunWorld, own: Own) -> None:
        """The Job comes last: when it starts, all that it mounts and talks to is named. Nothing of a run changes once
        it is there, so that an operator of another version leaves a run that is under way alone."""
        run, spec, settings = world.owner, world.spec, self._settings
        have_tiers = {tier.name for tier in world.seen.tiers}
        if world.seen.job_exists and have_tiers == set(TIERS):
            return
        traffic = await self._traffic.ensure(run, spec)
        if not world.has_token:
            await own.create_once(render.token(run, spec, secrets.token_urlsafe(32)))
        objects = [render.result(run, spec), render.service_account(run, spec), render.role(run, spec)]
        objects += [render.role_binding(run, spec)]
        objects += render.network_policies(run, spec) if settings.network_policies else []
        for obj in objects:
            await own.create_once(obj)
        addresses = {}
        for tier in TIERS:
            service = await own.create_once(render.tier_service(run, spec, tier))
            addresses[tier] = service["spec"]["clusterIP"]
            if tier not in have_tiers:
                await own.create_once(render.tier_deployment(run, spec, settings, tier))
        order = of_uid(render.order(run, spec, addresses), traffic["metadata"]["uid"])
        await self._cluster.apply(order, WORKLOAD)
        if not world.seen.job_exists:
            await own.create_once(render.job(run, spec, settings))

    async def _ensure_torn_down(self, run: Owner) -> None:
        tiers = [tier_name(run.name, tier) for tier in TIERS]
        going: Mapping[Kind, list[str]] = {
            JOB: [run.name],
            DEPLOYMENT: tiers,
            SERVICE: tiers,
            ROLE_BINDING: [run.name],
            ROLE: [run.name],
            SERVICE_ACCOUNT: [run.name],
            SECRET: [token_name(run.name)],
            NETWORK_POLICY: [f"{run.name}-{component}" for component in (render.TIER, render.WORKER)],
        }
        for kind, names in going.items():
            for name in names:
                await self._cluster.delete(kind, run.namespace, name)


def _tier_of(obj: JsonObject) -> str:
    label: str = obj["metadata"].get("labels", {}).get(TIER_LABEL, "")
    return label
