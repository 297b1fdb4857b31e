"""Kubernetes Events, named by the digest of what they say: the same thing said again is counted, not stored again.

Posting is best effort: an Event that cannot be written is logged and never holds up a turn.
"""

import logging
from datetime import UTC, datetime, timedelta

from tkcc.api.codec import sha256_hex
from tkcc.control.actions import EmitEvent
from tkcc.kube.cluster import STATUS, Cluster
from tkcc.kube.errors import AlreadyExists, ClusterError, NotFound
from tkcc.kube.resources import EVENT, JsonObject

log = logging.getLogger(__name__)
REPEAT_AFTER = timedelta(minutes=1)
MAX_MESSAGE = 1024  # the API server's limit


class Recorder:
    def __init__(self, cluster: Cluster, instance: str):
        self._cluster = cluster
        self._instance = instance
        self._posted: dict[str, datetime] = {}  # name -> when

    async def post(self, about: JsonObject, event: EmitEvent) -> None:
        """Within a minute the same event is posted once."""
        now = datetime.now(UTC)
        self._posted = {name: at for name, at in self._posted.items() if now - at < REPEAT_AFTER}
        if event_name(about, event) in self._posted:
            return
        self._posted[event_name(about, event)] = now
        meta = about["metadata"]
        log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], event.reason, event.message)
        try:
            await self._count(about, event)
        except ClusterError as err:
            log.warning("event %s of %s/%s not posted: %s", event.reason, meta["namespace"], meta["name"], err)

    async def _count(self, about: JsonObject, event: EmitEvent) -> None:
        namespace, name = about["metadata"]["namespace"], event_name(about, event)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        message = event.message[:MAX_MESSAGE]
        have = await self._cluster.get(EVENT, namespace, name)
        if have is None:
            try:
                await self._cluster.create(self._event(about, event, name, message, now), STATUS)
                return
            except AlreadyExists:
                have = {"count": 1}
        patch = {"count": have.get("count", 1) + 1, "lastTimestamp": now}
        try:
            await self._cluster.merge(EVENT, namespace, name, patch, STATUS)
        except NotFound:
            log.debug("event %s expired while it was counted", name)

    def _event(self, about: JsonObject, event: EmitEvent, name: str, message: str, now: str) -> JsonObject:
        meta = about["metadata"]
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"namespace": meta["namespace"], "name": name},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "type": event.type.value,
            "reason": event.reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": "tkcc-operator"},
            "reportingComponent": "tkcc.dev/operator",
            "reportingInstance": self._instance,
        }


def event_name(about: JsonObject, event: EmitEvent) -> str:
    digest = sha256_hex(f"{about['metadata']['uid']} {event.type.value} {event.reason} {event.message}")
    return f"{about['metadata']['name']}.{digest[:12]}"
