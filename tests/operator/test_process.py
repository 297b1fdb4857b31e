"""The operator's process as it is shipped: `kopf run operator/main.py`, with the chart's rights, and its accidents."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import REPOSITORY, SYSTEM, connected
from tests.fakes.kubelet import FakeKubelet
from tests.shell.conftest import QUICK, Traffic, World
from tkcc.api.status import Phase, Status
from tkcc.kube.errors import ClusterError
from tkcc.kube.resources import DEPLOYMENT, INFERENCE_DEPLOYMENT, LEASE, RECOMPILATION_RUN, SERVICE

pytestmark = [pytest.mark.shell, pytest.mark.timeout(180)]

MAX_RSS_KB = 150_000
KOPF = str(Path(sys.executable).with_name("kopf"))


class Operator:
    """One process; it is started and killed as often as a test wants."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, identity: str, **env: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self._argv = [KOPF, "run", "--namespace", namespace, str(REPOSITORY / "operator" / "main.py")]
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TKCC_")},
            "KUBECONFIG": str(kubeconfig),
            "TKCC_IMAGES": "{engine: engine:1, worker: worker:1}",
            "TKCC_OPERATOR_NAMESPACE": SYSTEM,
            "TKCC_LEASE_NAME": "tkcc",
            "TKCC_LEASE_DURATION_S": "5",
            "TKCC_IDENTITY": identity,
            "TKCC_HTTP_PORT": str(self.port),
            "TKCC_TICK_S": "0.3",
            **env,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Operator":
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, env=self._env, stdout=log, stderr=subprocess.STDOUT, cwd="/")
        return self

    def kill(self) -> None:
        """As a node that loses power does it."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def rss_kb(self) -> int:
        assert self.process
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    async def get(self, path: str) -> tuple[int, str]:
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                answer = await http.get(f"http://127.0.0.1:{self.port}{path}", timeout=2)
            except httpx.HTTPError as err:
                return 0, str(err)
        return answer.status_code, answer.text

    async def until(self, path: str, is_wanted: Callable[[int, str], bool], deadline_s: float = 20) -> str:
        async with asyncio.timeout(deadline_s):
            while True:
                code, text = await self.get(path)
                if is_wanted(code, text):
                    return text
                await asyncio.sleep(0.1)


@pytest.fixture
async def operator(operator_kubeconfig: Path, namespace: str, tmp_path: Path) -> AsyncIterator[Callable[..., Operator]]:
    """Makes operators for the test's namespace; their log is shown when the test fails."""
    made: list[Operator] = []

    def make(identity: str = "operator-0", **env: str) -> Operator:
        made.append(Operator(operator_kubeconfig, namespace, tmp_path / f"{len(made)}.log", identity, **env))
        return made[-1].start()

    yield make
    for one in made:
        one.kill()
        print(one.log.read_text()[-6000:])


@pytest.fixture
async def user(plane: Any, namespace: str) -> AsyncIterator[World]:
    """A user of the test's namespace. Its turns are not run: the operator's process runs them."""
    async with connected(plane.kubeconfig) as admin, httpx.AsyncClient() as http:
        yield World(admin, admin, namespace, http)


@pytest.fixture
async def pods(user: World) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(user.admin, user.namespace) as running:
        yield running


async def until(
    user: World, is_wanted: Callable[[Status], bool], name: str = "llama", deadline_s: float = 60
) -> Status:
    status = Status()
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    status = await user.status(name)
                    if is_wanted(status):
                        return status
                except ClusterError:
                    pass  # the API server may be down on purpose
                await asyncio.sleep(0.05)
    except TimeoutError:
        told = "\n".join(f"{c.type} {c.status} {c.reason}: {c.message}" for c in status.conditions)
        raise AssertionError(f"not within {deadline_s} s; {status.phase}, {status.rollout}\n{told}") from None


async def test_it_serves_answers_its_probes_stays_small_and_leaves_in_order(user, pods, operator):
    running = operator()
    await user.apply(replicas=2, **QUICK)
    await until(user, lambda status: status.ready_replicas == 2)
    assert (await running.get("/healthz"))[0] == 200
    assert (await running.get("/readyz"))[0] == 200
    page = await running.until("/metrics", lambda code, text: 'result="done"' in text)
    assert "tkcc_is_leader 1.0" in page
    for resource in ("inferencedeployments", "recompilationruns", "deployments", "pods", "jobs"):
        assert f'tkcc_watch_last_event_timestamp_seconds{{resource="{user.namespace}/{resource}"}}' in page
    async with Traffic(user.admin, user.namespace, pods, prompt=100):
        await until(user, lambda status: bool(status.drift.plans))
    rss_kb = running.rss_kb()
    figures = re.findall(
        r'_duration_seconds_(sum|count){kind="InferenceDeployment"} (\S+)', (await running.get("/metrics"))[1]
    )
    total = {name: float(value) for name, value in figures}
    print(
        f"RSS {rss_kb / 1000:.0f} MB; {1000 * total['sum'] / total['count']:.0f} ms a turn, {total['count']:.0f} turns"
    )
    assert rss_kb < MAX_RSS_KB
    assert "torch" not in Path(f"/proc/{running.process.pid}/maps").read_text()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(10) == 0
    lease = await user.admin.get(LEASE, SYSTEM, "tkcc")
    assert lease["spec"].get("holderIdentity", "") == "", "given up, so that a successor starts at once"
    assert "Traceback" not in running.log.read_text()
    obj = await user.get()
    assert "finalizers" not in obj["metadata"] and "annotations" not in obj["metadata"]


async def test_killed_on_entry_to_each_phase_it_goes_on_and_makes_nothing_twice(user, pods, operator):
    digest = await user.artifact("def build(): ...\n")
    running = operator()
    await user.apply(replicas=2, **QUICK)
    await until(user, lambda status: status.ready_replicas == 2)
    uids = await _uids(user)
    async with Traffic(user.admin, user.namespace, pods, prompt=100):
        await user.apply(replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}})
        for phase in (Phase.WARMING, Phase.CANARY, Phase.PROMOTING):
            await until(user, lambda status, phase=phase: status.phase is phase)
            running.kill()
            running.start()
        status = await until(user, lambda status: status.phase is Phase.SERVING and status.stable.artifact == digest)
    assert status.rolled_back == ()
    assert uids.items() <= (await _uids(user)).items()


async def test_an_api_server_that_restarts_in_mid_canary_is_waited_for(plane, user, pods, operator):
    digest = await user.artifact("def build(): ...\n")
    running = operator()
    await user.apply(replicas=2, **QUICK)
    await until(user, lambda status: status.ready_replicas == 2)
    async with Traffic(user.admin, user.namespace, pods, prompt=100):
        await user.apply(replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}})
        await until(user, lambda status: status.phase is Phase.CANARY)
        await asyncio.to_thread(plane.kill_apiserver)
        await asyncio.sleep(1.5)
        # From the main thread: the kernel ties the new process to the thread that starts it.
        plane.start_apiserver()
        await until(
            user, lambda status: status.phase is Phase.SERVING and status.stable.artifact == digest, deadline_s=90
        )
    assert running.process.poll() is None, "it lived through it"


async def test_a_delete_while_it_is_down_leaves_nothing_and_blocks_nothing(plane, user, pods, operator):
    running = operator()
    await user.apply(replicas=1, **QUICK)
    await until(user, lambda status: status.ready_replicas == 1)
    running.kill()
    command = ["delete", "infdep", "llama", "-n", user.namespace, "--timeout=10s"]
    await asyncio.to_thread(plane.kubectl, *command)
    async with asyncio.timeout(30):
        while await user.admin.get(SERVICE, user.namespace, "llama") or await user.admin.list(
            DEPLOYMENT, user.namespace
        ):
            await asyncio.sleep(0.1)
    running.start()
    await running.until("/readyz", lambda code, text: code == 200)
    await user.apply("other", replicas=1, **QUICK)
    await until(user, lambda status: status.ready_replicas == 1, "other")
    assert "Traceback" not in running.log.read_text()


async def test_a_delete_in_mid_rollout_returns_and_all_goes(plane, user, pods, operator):
    digest = await user.artifact("def build(): ...\n")
    operator()
    await user.apply(replicas=2, **QUICK)
    await until(user, lambda status: status.ready_replicas == 2)
    await user.apply(replicas=2, **{**QUICK, "rollout": {**QUICK["rollout"], "artifact": digest}})
    await until(user, lambda status: status.phase in (Phase.WARMING, Phase.CANARY))
    await asyncio.to_thread(plane.kubectl, "delete", "infdep", "llama", "-n", user.namespace, "--timeout=10s")
    async with asyncio.timeout(30):
        while await user.admin.list(DEPLOYMENT, user.namespace):
            await asyncio.sleep(0.1)


async def test_of_two_operators_one_acts_and_the_other_takes_over(user, pods, operator):
    first = operator("operator-a")
    await first.until("/metrics", lambda code, text: "tkcc_is_leader 1.0" in text)
    second = operator("operator-b")
    await second.until("/readyz", lambda code, text: code == 200)
    await user.apply(replicas=1, **QUICK)
    await until(user, lambda status: status.ready_replicas == 1)
    page = (await second.get("/metrics"))[1]
    assert "tkcc_is_leader 0.0" in page and not re.search(r'result="cluster_error"} [^0]', page)
    assert 'name="llama"' not in page, "one object has the series of one operator"
    first.kill()
    await user.apply("later", replicas=1, **QUICK)
    await second.until("/metrics", lambda code, text: "tkcc_is_leader 1.0" in text)
    await until(user, lambda status: status.ready_replicas == 1, "later")


async def test_a_silent_watch_fails_the_liveness_probe_by_name(plane, user, operator):
    running = operator(TKCC_WATCH_LIMIT_S="10")
    await user.apply(replicas=1, **QUICK)
    await until(user, lambda status: bool(status.conditions))
    assert (await running.get("/healthz"))[0] == 200
    await asyncio.to_thread(plane.kill_apiserver)
    try:
        text = await running.until("/healthz", lambda code, text: code == 503, deadline_s=20)
    finally:
        plane.start_apiserver()
    assert f"the watch of {user.namespace}/inferencedeployments has been silent" in text
    await running.until("/healthz", lambda code, text: code == 200, deadline_s=60)


@pytest.mark.parametrize(
    "env, want",
    [
        ({"TKCC_IMAGES": "{engine: e}"}, "images.worker: Field required"),
        ({"TKCC_SETTINGS": "/nowhere.yaml"}, "No such file"),
        ({"TKCC_TICK_S": "-1"}, "tickS: Input should be greater"),
        ({"KUBECONFIG": "/nowhere"}, "no usable cluster credentials"),
    ],
)
def test_what_it_cannot_start_with_is_said_without_a_traceback(env: dict[str, str], want: str):
    argv = [KOPF, "run", "--all-namespaces", str(REPOSITORY / "operator" / "main.py")]
    full = {**os.environ, "TKCC_IMAGES": "{engine: e, worker: w}", **env}
    done = subprocess.run(argv, env=full, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert want in done.stderr and "Traceback" not in done.stderr


async def _uids(user: World) -> dict[str, str]:
    found = {}
    for kind in (DEPLOYMENT, SERVICE, INFERENCE_DEPLOYMENT, RECOMPILATION_RUN):
        for obj in await user.admin.list(kind, user.namespace):
            found[f"{kind.kind} {obj['metadata']['name']}"] = obj["metadata"]["uid"]
    return json.loads(json.dumps(found))
