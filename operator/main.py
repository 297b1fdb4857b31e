"""The operator's entry point for kopf: `kopf run operator/main.py`. It registers handlers and decides nothing.

Watch events wake tkcc.shell's drivers, which read everything afresh. kopf keeps no state on our objects: no finalizer,
no annotation, no Event; a Lease of our own, not peering, keeps two operators from acting at once.
"""

import logging
import os
from typing import Any

import aiohttp
import kopf
import prometheus_client

from tkcc.kube.errors import ClusterError
from tkcc.shell import process as shell
from tkcc.shell import settings as tkcc_settings
from tkcc.shell.render.names import MANAGED_BY

WATCH_SERVER_S = 60  # how often a watch is opened anew; three in a row must fail before the liveness probe does
MANAGED = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())

for chatty in ("httpx", "kopf.objects"):  # a line for every scrape, and for every watch event
    logging.getLogger(chatty).setLevel(logging.WARNING)
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
try:
    process = shell.Process(tkcc_settings.load())
except ValueError as err:
    raise SystemExit(f"tkcc operator: {err}") from None


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # our kinds are there before us, or the liveness probe has us started again
    settings.watching.server_timeout = WATCH_SERVER_S
    settings.watching.client_timeout = WATCH_SERVER_S + 15
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = WATCH_SERVER_S + 10
    settings.networking.request_timeout = 30
    settings.process.ultimate_exiting_timeout = shell.STOP_S + 10
    for resource in (("apps", "v1", "deployments"), ("batch", "v1", "jobs"), ("", "v1", "pods")):
        settings.watching.label_selectors[resource] = MANAGED
    try:
        await process.start()
    except (ClusterError, OSError) as err:  # no credentials, a port that is taken: say so and end
        raise SystemExit(f"tkcc operator: {err}") from None


@kopf.on.cleanup()
async def stop(**_: Any) -> None:
    await process.stop()


@kopf.on.login(errors=kopf.ErrorsMode.PERMANENT)
async def login(**kwargs: Any) -> kopf.AiohttpSession:
    """The usual credentials in a session that also tells when a watch was last answered."""
    found = None
    if not os.environ.get("KUBECONFIG"):
        found = kopf.login_with_service_account(**kwargs)
    found = found or kopf.login_with_kubeconfig(**kwargs)
    if found is None:
        raise kopf.LoginError("no service account and no kubeconfig; set KUBECONFIG or run in a pod")
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
        headers=found.as_http_headers(),
        trace_configs=[process.watches.trace()],
    )
    return kopf.AiohttpSession(
        server=_server() or found.server,
        default_namespace=found.default_namespace,
        expiration=found.expiration,
        aiohttp_session=session,
    )


def _server() -> str:
    """The API server by address: kopf names it, and a cluster may have no DNS. Empty outside a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or os.environ.get("KUBECONFIG"):
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


@kopf.on.event("tkcc.dev", "v1alpha1", "inferencedeployments")
@kopf.on.event("tkcc.dev", "v1alpha1", "recompilationruns")
@kopf.on.event("apps", "v1", "deployments")
@kopf.on.event("batch", "v1", "jobs")
@kopf.on.event("", "v1", "pods")
async def wake(body: kopf.Body, resource: kopf.Resource, **_: Any) -> None:
    process.saw(resource.plural, dict(body))
