"""The gate that lets one operator act at a time: a coordination.k8s.io Lease, renewed while we live.

kopf's peering freezes every peer of equal priority; a lease does not. Expiry is judged by our own monotonic clock since
we last saw the record change, as client-go does, so clocks of different nodes need not agree.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from tkcc.kube.cluster import Cluster
from tkcc.kube.errors import AlreadyExists, ClusterError, Conflict
from tkcc.kube.resources import LEASE, JsonObject

log = logging.getLogger(__name__)
MANAGER = "tkcc/lease"


class LeaseGate:
    """Call `keep` in a task; act only while `is_held`."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, identity: str, duration_s: int = 15):
        if duration_s < 3:
            raise ValueError(f"a lease of {duration_s} s is too short to be renewed in time; use 3 or more")
        self._cluster = cluster
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration_s = duration_s
        self._held_until = float("-inf")  # event-loop time
        self._seen: tuple[str, str, float] | None = None  # holder, renewTime, when we first saw that pair

    @property
    def is_held(self) -> bool:
        """Nobody else may act before this turns False: we stop a fifth of the lease before it ends for others."""
        return asyncio.get_running_loop().time() < self._held_until

    async def keep(self, on_change: Callable[[bool], None]) -> None:
        """Acquire and renew until cancelled; say when it was gained or lost. A failed renewal is tried again; if it
        fails for too long, `is_held` ends by itself."""
        was_held = False
        while True:
            try:
                async with asyncio.timeout(self._duration_s / 3):
                    await self._renew()
            except (Conflict, AlreadyExists):
                pass  # somebody else was faster: look again
            except (ClusterError, TimeoutError) as err:
                log.warning("lease %s/%s not renewed: %s", self._namespace, self._name, err or "timed out")
            if self.is_held != was_held:
                was_held = self.is_held
                log.info("lease %s/%s is %s", self._namespace, self._name, "ours" if was_held else "lost")
                on_change(was_held)
            await asyncio.sleep(self._duration_s / 5)

    async def release(self) -> None:
        """Let the next one in at once. Best effort: without it they wait for the lease to expire."""
        if not self.is_held:
            return
        self._held_until = float("-inf")
        have = await self._cluster.get(LEASE, self._namespace, self._name)
        if have and have["spec"].get("holderIdentity") == self._identity:
            await self._cluster.replace({**have, "spec": {**have["spec"], "holderIdentity": ""}}, MANAGER)

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()  # before the call: the lease may have been written at any time since
        have = await self._cluster.get(LEASE, self._namespace, self._name)
        if have is None:
            await self._cluster.create(self._record(None), MANAGER)
        elif self._is_free(have, asked_at):
            await self._cluster.replace(self._record(have), MANAGER)
        else:
            return
        self._held_until = asked_at + 0.8 * self._duration_s

    def _is_free(self, have: JsonObject, now: float) -> bool:
        spec = have["spec"]
        holder, renewed = spec.get("holderIdentity", ""), spec.get("renewTime", "")
        if self._seen is None or self._seen[:2] != (holder, renewed):
            self._seen = (holder, renewed, now)
        return holder in ("", self._identity) or now - self._seen[2] > spec.get("leaseDurationSeconds", 0)

    def _record(self, have: JsonObject | None) -> JsonObject:
        old = have["spec"] if have else {}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        is_ours = old.get("holderIdentity") == self._identity
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": have["metadata"] if have else {"namespace": self._namespace, "name": self._name},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._duration_s,
                "acquireTime": old["acquireTime"] if is_ours else now,
                "renewTime": now,
                "leaseTransitions": old.get("leaseTransitions", 0) + (0 if is_ours or not old else 1),
            },
        }
