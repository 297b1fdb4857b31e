"""The stories' view of the API server, as a cluster administrator: reads that are cheap enough to poll with."""

import base64
import json
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx

from tkcc.kube.resources import Kind

JsonObject = dict[str, Any]

AWAY_S = 30.0


class ApiAway(Exception):
    """The API server does not answer; a story that restarts it expects that for a while."""


class Api:
    """Thread-safe."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        headers = {"Authorization": f"Bearer {user['token']}", "Accept": "application/json"}
        self._http = httpx.Client(base_url=cluster["server"], verify=context, headers=headers, timeout=10.0)

    def close(self) -> None:
        self._http.close()

    def get(self, kind: Kind, namespace: str, name: str) -> JsonObject | None:
        """None where it is not there. Raises ApiAway."""
        return self._read(f"{_collection(kind, namespace)}/{name}")

    def list(self, kind: Kind, namespace: str | None = None, **labels: str) -> list[JsonObject]:
        """Of one namespace, or (None) of all. Raises ApiAway."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        query = f"?{urlencode({'labelSelector': selector})}" if selector else ""
        found = self._read(_collection(kind, namespace) + query)
        return found["items"] if found else []

    def _read(self, path: str) -> JsonObject | None:
        """Another story may restart the API server at any time: that is waited for."""
        until_s = time.monotonic() + AWAY_S
        while True:
            try:
                return self._read_once(path)
            except ApiAway:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.5)

    def _read_once(self, path: str) -> JsonObject | None:
        try:
            answer = self._http.get(path)
        except httpx.TransportError as err:
            raise ApiAway(str(err)) from err
        if answer.status_code == 404:
            return None
        if answer.status_code in (429, 500, 503):
            raise ApiAway(f"{answer.status_code}: {answer.text[:200]}")
        answer.raise_for_status()
        found: JsonObject = answer.json()
        return found


def _collection(kind: Kind, namespace: str | None) -> str:
    root = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
    return f"{root}/namespaces/{namespace}/{kind.plural}" if namespace else f"{root}/{kind.plural}"
