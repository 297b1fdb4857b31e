"""Parsed ConfigMaps by (uid, resourceVersion): their content is read again only when it changed.

Artifacts and results hold whole source files; a turn needs what they say, not their bytes.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from tkcc.kube.cluster import Cluster
from tkcc.kube.resources import CONFIG_MAP, JsonObject

T = TypeVar("T")


class Parsed(Generic[T]):
    def __init__(self, cluster: Cluster, parse: Callable[[JsonObject], T]):
        self._cluster = cluster
        self._parse = parse
        self._known: dict[str, tuple[str, T]] = {}  # uid -> (resourceVersion, value)

    async def value(self, meta: JsonObject) -> T | None:
        """Of the ConfigMap with this metadata; None where it has gone."""
        uid, version = meta["uid"], meta["resourceVersion"]
        known = self._known.get(uid)
        if known and known[0] == version:
            return known[1]
        obj = await self._cluster.get(CONFIG_MAP, meta["namespace"], meta["name"])
        if obj is None:
            return None
        value = self._parse(obj)
        self._known[obj["metadata"]["uid"]] = (obj["metadata"]["resourceVersion"], value)
        return value

    def keep(self, uids: set[str]) -> None:
        """Forget those that are not listed any more."""
        self._known = {uid: known for uid, known in self._known.items() if uid in uids}
