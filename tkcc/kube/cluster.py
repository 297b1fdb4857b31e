"""`Cluster`: get, list, apply, create, patch, delete; each with a time limit and bounded retries.

Retries are safe: reads and deletes repeat harmlessly, apply and merge patches carry absolute values, and a create that
is repeated after a lost answer meets AlreadyExists, which `create_once` takes for success.
"""

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.dynamic import DynamicClient, Resource

from tkcc.kube.errors import AlreadyExists, ClusterError, Conflict, Forbidden, Invalid, NotFound, NotLeader, Unavailable
from tkcc.kube.resources import JsonObject, Kind, kind_of
from tkcc.kube.retry import DEFAULT_BACKOFF, Backoff, retrying

# One field manager per concern, so that `kubectl get --show-managed-fields` tells who owns a field and why.
WORKLOAD = "tkcc/workload"
TRAFFIC = "tkcc/traffic"
STATUS = "tkcc/status"
WORKER = "tkcc/worker"

_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE = 250  # objects an answer
_PERMANENT = (400, 405, 413, 415, 422)


class Cluster:
    """Calls to one API server. Objects go in and come out as plain JSON mappings."""

    def __init__(
        self,
        api: ApiClient,
        *,
        timeout_s: float = 10.0,
        backoff: Backoff = DEFAULT_BACKOFF,
        may_write: Callable[[], bool] = lambda: True,
    ):
        """`may_write` is asked before every call that changes something; a no raises NotLeader."""
        self._api = api
        self._may_write = may_write
        self._dynamic = DynamicClient(api)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._backoff = backoff
        self._resources: dict[Kind, Resource] = {}

    def gated(self, may_write: Callable[[], bool]) -> "Cluster":
        """The same door for a process that may not always write, like an operator without its lease."""
        timeout_s = self._timeout.total or 0.0
        return Cluster(self._api, timeout_s=timeout_s, backoff=self._backoff, may_write=may_write)

    async def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """The object, or None where it is not there."""
        try:
            return await self._request("get", self._path(kind, namespace, name))
        except NotFound:
            return None

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        *,
        metadata_only: bool = False,
    ) -> list[JsonObject]:
        """All objects of a kind with these labels, in one namespace or (None) in all; a consistent read, so that no
        decision rests on a view older than our own last write. `metadata_only` spares the bodies."""
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        params: dict[str, Any] = {"label_selector": selector} if selector else {}
        if metadata_only:
            params["header_params"] = {"Accept": _METADATA_LIST}
        items: list[JsonObject] = []
        while True:
            page = await self._request("get", self._path(kind, namespace), limit=_PAGE, **params)
            # Items of a list carry neither kind nor apiVersion; whoever gets one alone should not have to guess.
            items += [{**item, "apiVersion": kind.api_version, "kind": kind.kind} for item in page["items"] or ()]
            token = page["metadata"].get("continue")
            if not token:
                return items
            params["_continue"] = token

    async def apply(self, obj: JsonObject, manager: str) -> JsonObject:
        """Server-side apply of an object that we own, over whoever changed our fields. Returns it as stored."""
        kind, namespace, name = _identity(obj)
        return await self._request(
            "patch",
            self._path(kind, namespace, name),
            body=obj,
            content_type="application/apply-patch+yaml",
            field_manager=manager,
            force_conflicts=True,
        )

    async def apply_status(self, obj: JsonObject, manager: str) -> JsonObject:
        """Server-side apply of `status`. With `metadata.resourceVersion` in it, raises Conflict if the object was
        written since; without, the last writer wins."""
        kind, namespace, name = _identity(obj)
        return await self._request(
            "patch",
            self._path(kind, namespace, name) + "/status",
            body=obj,
            content_type="application/apply-patch+yaml",
            field_manager=manager,
            force_conflicts=True,
        )

    async def create(self, obj: JsonObject, manager: str) -> JsonObject:
        """Raises AlreadyExists."""
        kind, namespace, _ = _identity(obj)
        return await self._request("post", self._path(kind, namespace), body=obj, field_manager=manager)

    async def create_once(self, obj: JsonObject, manager: str) -> JsonObject:
        """Create it, or return the one that is there, whatever it holds."""
        kind, namespace, name = _identity(obj)
        try:
            return await self.create(obj, manager)
        except AlreadyExists:
            have = await self.get(kind, namespace, name)
            if have is None:
                raise Conflict(f"{kind} {namespace}/{name} was deleted while it was being created") from None
            return have

    async def replace(self, obj: JsonObject, manager: str) -> JsonObject:
        """Write the whole object. With `metadata.resourceVersion` in it, raises Conflict if it was written since."""
        kind, namespace, name = _identity(obj)
        return await self._request("put", self._path(kind, namespace, name), body=obj, field_manager=manager)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: JsonObject, manager: str) -> JsonObject:
        """JSON merge patch. With `metadata.resourceVersion` in it, raises Conflict if the object was written since."""
        return await self._request(
            "patch",
            self._path(kind, namespace, name),
            body=patch,
            content_type="application/merge-patch+json",
            field_manager=manager,
        )

    async def merge_status(
        self, kind: Kind, namespace: str, name: str, version: str, patch: JsonObject, manager: str
    ) -> JsonObject:
        """JSON merge patch of fields of `status`, over the resourceVersion read: raises Conflict if the object was
        written since. For a status that two processes write, each some fields of it."""
        return await self._request(
            "patch",
            self._path(kind, namespace, name) + "/status",
            body={"metadata": {"resourceVersion": version}, "status": patch},
            content_type="application/merge-patch+json",
            field_manager=manager,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str | None = None) -> bool:
        """Delete it and, in the background, what it owns. False where it was not there. With `uid`, raises Conflict
        if the name now belongs to another object."""
        options: JsonObject = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._request("delete", self._path(kind, namespace, name), body=options)
        except NotFound:
            return False
        return True

    def _path(self, kind: Kind, namespace: str | None, name: str | None = None) -> str:
        if kind not in self._resources:
            self._resources[kind] = Resource(
                prefix="apis" if kind.group else "api",
                group=kind.group,
                api_version=kind.version,
                kind=kind.kind,
                name=kind.plural,
                namespaced=True,
                client=self._dynamic,
            )
        path: str = self._resources[kind].path(name=name, namespace=namespace)
        return path

    async def _request(self, method: str, path: str, **params: Any) -> JsonObject:
        return await retrying(lambda: self._request_once(method, path, **params), self._backoff)

    async def _request_once(self, method: str, path: str, **params: Any) -> JsonObject:
        call = f"{method} {path}"
        if method != "get" and not self._may_write():
            raise NotLeader(f"{call}: not made: another process holds the lease")
        try:
            data: JsonObject = await self._dynamic.request(
                method, path, _request_timeout=self._timeout, serializer=_as_is, **params
            )
        except ApiException as err:
            raise _typed(err, call) from None  # the original's text holds the request's headers
        except ValueError as err:
            raise Unavailable(f"{call}: the answer is not JSON: {err}") from err
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            raise Unavailable(f"{call}: {type(err).__name__}: {err}") from err
        return data


@asynccontextmanager
async def connect(
    kubeconfig: Path | None = None, *, timeout_s: float = 10.0, backoff: Backoff = DEFAULT_BACKOFF
) -> AsyncIterator[Cluster]:
    """A Cluster by `kubeconfig` or $KUBECONFIG if one is set, else by the pod's service account, else by
    ~/.kube/config. Raises ClusterError where none of them works."""
    configuration = Configuration()
    file = kubeconfig or os.environ.get("KUBECONFIG") or None
    try:
        if not file and _SERVICE_ACCOUNT_TOKEN.exists():
            config.load_incluster_config(client_configuration=configuration)  # reads the token anew every minute
        else:
            await config.load_kube_config(config_file=file and str(file), client_configuration=configuration)
    except config.ConfigException as err:
        raise ClusterError(
            f"no usable cluster credentials: {err}; set KUBECONFIG, or run in a pod with a service account"
        ) from err
    api = ApiClient(configuration)
    try:
        yield Cluster(api, timeout_s=timeout_s, backoff=backoff)
    finally:
        await api.close()


def _as_is(_client: object, data: JsonObject) -> JsonObject:
    return data


def _identity(obj: JsonObject) -> tuple[Kind, str, str]:
    meta = obj["metadata"]
    return kind_of(obj), meta["namespace"], meta["name"]


def _typed(err: ApiException, call: str) -> ClusterError:
    reason, message, after = "", err.reason or "", (err.headers or {}).get("Retry-After")
    try:
        status = json.loads(err.body or b"{}")
        reason, message = status.get("reason", ""), status.get("message", message)
        after = (status.get("details") or {}).get("retryAfterSeconds", after)
    except (ValueError, AttributeError):
        pass  # a proxy or a dying server answers in text; the status code says enough
    text = f"{call}: {err.status} {message}"
    match err.status:
        case 409:
            return AlreadyExists(text) if reason == "AlreadyExists" else Conflict(text)
        case 404 | 410:
            return NotFound(text)
        case 401 | 403:
            return Forbidden(text)
        case code if code in _PERMANENT:
            return Invalid(text)
        case code if code == 429 or code >= 500:
            return Unavailable(text, retry_after_s=float(after) if after and str(after).isdigit() else None)
    return ClusterError(text)
