"""Applies objects that we own, after making sure that we do: a Service that somebody else made under our name is
theirs, and server-side apply with force would take it over without a word."""

from tkcc.kube.cluster import WORKLOAD, Cluster
from tkcc.kube.errors import Conflict, Invalid
from tkcc.kube.resources import JsonObject, Kind, kind_of
from tkcc.shell.render.names import Owner
from tkcc.shell.seen import is_controlled_by


def of_uid(obj: JsonObject, uid: str) -> JsonObject:
    """What to apply to the object of this uid alone: where that is gone, the apply is a Conflict and makes no other."""
    return {**obj, "metadata": {**obj["metadata"], "uid": uid}}


class Own:
    """Of one owner. Only the first apply of a process looks first; from then on the object's uid goes with each, so
    that one deleted meanwhile, with its owner perhaps, is not made again by a turn that does not know of it."""

    def __init__(self, cluster: Cluster, owner: Owner):
        self._cluster = cluster
        self._owner = owner
        self._uids: dict[tuple[Kind, str], str | None] = {}

    async def apply(self, obj: JsonObject) -> JsonObject:
        """Raises Invalid where another owner has that name, and Conflict while one of ours of old is being removed, or
        after it was deleted; the next apply makes it again."""
        kind, name = kind_of(obj), obj["metadata"]["name"]
        if (kind, name) not in self._uids:
            have = await self._cluster.get(kind, self._owner.namespace, name)
            if have is not None:
                self._check(kind, have)
            self._uids[kind, name] = have["metadata"]["uid"] if have else None
        uid = self._uids[kind, name]
        try:
            applied = await self._cluster.apply(of_uid(obj, uid) if uid else obj, WORKLOAD)
        except Conflict:
            del self._uids[kind, name]
            raise
        self._uids[kind, name] = applied["metadata"]["uid"]
        return applied

    async def create_once(self, obj: JsonObject) -> JsonObject:
        """For objects that must not change once they are there. Raises as `apply` does."""
        kind = kind_of(obj)
        have = await self._cluster.get(kind, self._owner.namespace, obj["metadata"]["name"])
        if have is None:
            have = await self._cluster.create_once(obj, WORKLOAD)
        self._check(kind, have)
        return have

    def _check(self, kind: Kind, have: JsonObject) -> None:
        meta = have["metadata"]
        if is_controlled_by(have, self._owner.uid):
            return
        where = f"{kind.kind} {meta['namespace']}/{meta['name']}"
        owners = [ref for ref in meta.get("ownerReferences", []) if ref.get("controller")]
        is_predecessor = any(ref["kind"] == self._owner.kind.kind and ref["name"] == self._owner.name for ref in owners)
        if is_predecessor:  # the owner was deleted and made again; garbage collection is on its way
            raise Conflict(f"{where} belongs to an earlier {self._owner.name} and is still being removed")
        raise Invalid(
            f"{where} exists and is not ours: delete or rename it, or name the InferenceDeployment differently"
        )
