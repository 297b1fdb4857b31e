"""Sends a trace from inside the cluster: a pod that runs `tkcc traffic replay` against the Service, and its results
as they come.

In a pod, because a Service's address means something there alone, on whatever cluster.
"""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.errors import ClusterError
from e2e.demo.ground import Ground, manifest
from tkcc.traffic.replay import Result

_MOUNT = "/traces"
_STOP_GRACE_S = 60  # for what is in flight when the replay is told to stop
_RESULT = re.compile(r"^\{.*\}$")


@dataclass(frozen=True)
class Load:
    """One replay."""

    workload: str  # "A" or "B"
    trace: Path
    length_factor: float
    time_factor: float
    max_duration_s: float

    @property
    def pod(self) -> str:
        return f"traffic-{self.workload.lower()}"


def traces_config_map(namespace: str, loads: list[Load]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "traffic-traces", "namespace": namespace, "labels": {"app": "traffic"}},
        "binaryData": {load.trace.name: base64.b64encode(load.trace.read_bytes()).decode() for load in loads},
    }


def pod_of(load: Load, namespace: str, image: str, url: str) -> Mapping[str, Any]:
    words = ["tkcc", "traffic", "replay", f"{_MOUNT}/{load.trace.name}", "--url", url, "--out", "-", "--repeat"]
    words += ["--length-factor", str(load.length_factor), "--time-factor", str(load.time_factor)]
    words += ["--duration-s", str(load.max_duration_s)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": load.pod, "namespace": namespace, "labels": {"app": "traffic"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": _STOP_GRACE_S,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "replay",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": words,
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "traces", "mountPath": _MOUNT, "readOnly": True}],
                }
            ],
            "volumes": [{"name": "traces", "configMap": {"name": "traffic-traces"}}],
        },
    }


@asynccontextmanager
async def sending(
    ground: Ground,
    load: Load,
    namespace: str,
    url: str,
    on_result: Callable[[Result], None],
    say: Callable[[str], None],
) -> AsyncIterator["asyncio.Task[None]"]:
    """The replay runs inside the block. At its end it stops sending and what is in flight is waited for; a block that
    is broken off waits for nothing."""
    ground.kubectl("delete", "pod", load.pod, "-n", namespace, "--ignore-not-found", "--now")
    ground.kubectl("apply", "-f", "-", stdin=manifest(pod_of(load, namespace, ground.images["worker"], url)))
    await _started(ground, load, namespace)
    task = asyncio.create_task(_follow(ground, load, namespace, on_result, say))
    delete = ("delete", "pod", load.pod, "-n", namespace, "--ignore-not-found")
    try:
        yield task
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # its kubectl must be gone before the loop is
        with suppress(ClusterError):
            ground.kubectl(*delete, "--now", "--wait=false", deadline_s=10)
        raise
    with suppress(ClusterError):
        await asyncio.to_thread(ground.kubectl, *delete)
    try:
        await asyncio.wait_for(task, 15)
    except TimeoutError:
        task.cancel()


async def _started(ground: Ground, load: Load, namespace: str, deadline_s: float = 90.0) -> None:
    until_s = asyncio.get_running_loop().time() + deadline_s
    while True:
        phase = await asyncio.to_thread(
            ground.kubectl, "get", "pod", load.pod, "-n", namespace, "-o", "jsonpath={.status.phase}"
        )
        if phase in ("Running", "Succeeded", "Failed"):
            return
        if asyncio.get_running_loop().time() > until_s:
            raise ClusterError(f"pod {load.pod} does not start: kubectl -n {namespace} describe pod {load.pod}")
        await asyncio.sleep(0.5)


async def _follow(
    ground: Ground, load: Load, namespace: str, on_result: Callable[[Result], None], say: Callable[[str], None]
) -> None:
    """Read the pod's log to its end. A log that breaks off is read again from its start, and known lines skipped."""
    known: set[int] = set()
    told: set[str] = set()
    while True:
        process = await asyncio.create_subprocess_exec(
            *ground.follow("logs", "-f", load.pod, "-n", namespace),
            env=ground.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert process.stdout
            async for raw in process.stdout:
                line = raw.decode(errors="replace").strip()
                if _RESULT.match(line):
                    result = Result(**json.loads(line))
                    if result.index not in known:
                        known.add(result.index)
                        on_result(result)
                elif line and line not in told:
                    told.add(line)
                    say(line)
        finally:
            await _end(process)
        if not await asyncio.to_thread(_is_running, ground, load, namespace):
            return
        await asyncio.sleep(1.0)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let it exit by itself first: a signal to one that just has would steal its exit status from asyncio."""
    try:
        await asyncio.wait_for(process.wait(), 2)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _is_running(ground: Ground, load: Load, namespace: str) -> bool:
    found = ground.kubectl(
        "get", "pod", load.pod, "-n", namespace, "--ignore-not-found", "-o", "jsonpath={.status.phase}"
    )
    return found == "Running"
