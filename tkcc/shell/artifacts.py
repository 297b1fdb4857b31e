"""Who keeps an artifact: every InferenceDeployment that puts it into its pods is an owner, so it goes with the last of
them. The first one, whose run found it, is its controller.

Artifacts that somebody made by hand are theirs: they get no owner, and stay.
"""

from tkcc.api.fields import BASELINE
from tkcc.kube.cluster import WORKLOAD, Cluster
from tkcc.kube.resources import CONFIG_MAP, JsonObject
from tkcc.shell.render.names import MANAGED_BY, Owner, artifact_name


class Artifacts:
    """Of one owner. Remembers which it holds, so that only the first use of a process looks."""

    def __init__(self, cluster: Cluster, owner: Owner):
        self._cluster = cluster
        self._owner = owner
        self._held: set[str] = set()

    async def hold(self, artifact: str) -> None:
        """Be one of its owners. Raises Conflict where somebody else becomes one at the same time."""
        if artifact == BASELINE or artifact in self._held:
            return
        have = await self._cluster.get(CONFIG_MAP, self._owner.namespace, artifact_name(artifact))
        if have is None:
            return  # the core tells that it is missing; pods that have it go on
        owners = _owners(have)
        if _is_ours_to_keep(have) and all(ref["uid"] != self._owner.uid for ref in owners):
            await self._write(have, [*owners, {**self._owner.reference, "controller": False}])
        self._held.add(artifact)

    async def let_go(self, artifact: str) -> None:
        """Be none of its owners any more; the last one deletes it."""
        self._held.discard(artifact)
        name = artifact_name(artifact)
        have = await self._cluster.get(CONFIG_MAP, self._owner.namespace, name)
        if have is None:
            return
        others = [ref for ref in _owners(have) if ref["uid"] != self._owner.uid]
        if others:
            await self._write(have, others)
        else:
            await self._cluster.delete(CONFIG_MAP, self._owner.namespace, name, have["metadata"]["uid"])

    async def _write(self, have: JsonObject, owners: list[JsonObject]) -> None:
        meta = have["metadata"]
        patch = {"metadata": {"resourceVersion": meta["resourceVersion"], "ownerReferences": owners}}
        await self._cluster.merge(CONFIG_MAP, meta["namespace"], meta["name"], patch, WORKLOAD)


def _owners(have: JsonObject) -> list[JsonObject]:
    return list(have["metadata"].get("ownerReferences", []))


def _is_ours_to_keep(have: JsonObject) -> bool:
    labels = have["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in MANAGED_BY.items())
