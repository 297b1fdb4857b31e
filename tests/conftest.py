"""A real API server for every test that asks for `plane`: etcd, kube-apiserver and controller manager, started once,
with the chart's CRDs and rights installed. No kubelet: tests.fakes.kubelet stands in for it. And `faulty`, for what the
real one cannot be made to show."""

import asyncio
import itertools
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from kmock import RawHandler, Response

# The same examples each time, and no failure because the machine is busy.
settings.register_profile("tkcc", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tkcc")

REPOSITORY = Path(__file__).parents[1]
SYSTEM = "tkcc-system"
IMAGES = tuple(f"--set=image.{part}.repository=localhost/tkcc-{part}" for part in ("operator", "engine", "worker"))
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane() -> Iterator[Any]:
    from e2e.cluster import toolchain
    from e2e.cluster.controlplane import ControlPlane

    if not (toolchain.bin_dir() / "kube-apiserver").exists():
        pytest.skip("Kubernetes is not built: run `python -m e2e.cluster build --programs-only` (20 minutes, once)")
    with ControlPlane(controller_manager=True) as running:  # a name of its own: two test runs may meet
        running.kubectl("create", "namespace", SYSTEM)
        running.kubectl("apply", "-f", "-", stdin=rendered_chart("crds", "rbac"))
        running.kubectl("wait", "--for=condition=Established", "crd", "--all")
        _wait_served(running, "inferencedeployments", "recompilationruns")
        yield running


def _wait_served(plane: Any, *resources: str, deadline_s: float = 30.0) -> None:
    """Established comes before the storage is ready: until then a list is answered 429."""
    until = time.monotonic() + deadline_s
    for resource in resources:
        while True:
            try:
                plane.get(f"/apis/tkcc.dev/v1alpha1/{resource}")
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)


def rendered_chart(*templates: str) -> str:
    """Some templates of the chart: not the operator's own Deployment, of which no pod could run here."""
    from e2e.cluster import toolchain

    show = [f"--show-only=templates/{name}.yaml" for name in templates]
    helm, chart = str(toolchain.program("helm")), str(REPOSITORY / "charts" / "tkcc")
    argv = [helm, "template", "tkcc", chart, f"--namespace={SYSTEM}", *IMAGES, *show]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def namespace(plane: Any) -> str:
    """A namespace of the test's own, with a claim `weights` that its models are on."""
    name = f"test-{next(_numbers)}"
    plane.kubectl("create", "namespace", name)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights", "namespace": name},
        "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(claim))
    plane.wait_default_account(name)
    return name


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[Any]:
    """A Cluster whose connections are really closed when the test's event loop ends: TLS takes a few rounds for it."""
    from tkcc.kube.cluster import connect

    async with connect(kubeconfig) as cluster:
        yield cluster
    await asyncio.sleep(0.1)


@pytest.fixture
async def admin(plane: Any) -> AsyncIterator[Any]:
    """The API as an administrator."""
    async with connected(plane.kubeconfig) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def operator_kubeconfig(plane: Any) -> Path:
    """Credentials with just the rights that the chart gives the operator."""
    kubeconfig: Path = plane.service_account_kubeconfig(SYSTEM, "tkcc")
    return kubeconfig


@pytest.fixture
async def cluster(operator_kubeconfig: Path) -> AsyncIterator[Any]:
    """The API as the operator."""
    async with connected(operator_kubeconfig) as found:
        yield found


@pytest.fixture
async def faulty(kmock: RawHandler) -> AsyncIterator[Any]:
    """The API of a server that answers as the test has told kmock, and is given up after three attempts."""
    from kubernetes.aio.client import ApiClient, Configuration

    from tkcc.kube.cluster import Cluster
    from tkcc.kube.retry import Backoff

    configuration = Configuration(host=str(kmock.url).rstrip("/"))
    configuration.api_key["BearerToken"] = "bearer s3cret"
    client = ApiClient(configuration)
    yield Cluster(client, timeout_s=0.5, backoff=Backoff(attempts=3, first_s=0.001, cap_s=0.002))
    await client.close()


def refused(code: int, reason: str, message: str = "because") -> Response:
    """A refusal as the API server words it."""
    return Response(status=code, payload={"kind": "Status", "code": code, "reason": reason, "message": message})
