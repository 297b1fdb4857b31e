"""Artifacts A and B on workloads A and B, against the baseline, interleaved, on the traffic that the cluster recorded.

What an artifact gains on the workload that it was compiled for, its run has sized; on the other one it is sized after
the story, in a slow tier of our own and by the same judge.
"""

import asyncio
import base64
import gzip
import json
import math
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from e2e.cluster.errors import ClusterError
from e2e.demo.facts import Ratio, Story
from e2e.demo.ground import LOGS, Ground
from e2e.demo.setting import Subject
from tkcc.api.candidate import Artifact, Candidate
from tkcc.api.codec import from_dict, from_json, to_dict
from tkcc.api.report import AlphaTicket, Report
from tkcc.api.spec import Spec

PAIRS = 60  # of interleaved timings for each cell of the table
START_DEADLINE_S, CELL_DEADLINE_S = 120.0, 180.0
LOG = LOGS / "cross-tier.log"


class CrossError(RuntimeError):
    """The table could not be measured; the message says why."""


@dataclass(frozen=True)
class Compiled:
    """An artifact of the cluster, and what its run found that it gains on that run's traffic."""

    candidate: Candidate
    gain: dict[str, float]  # median, ciLow and ciHigh: the baseline's time over its own


@dataclass(frozen=True)
class Traffic:
    """What a run replayed: the two bodies of PUT /v1/workload, as the cluster keeps them."""

    workload: dict[str, Any]
    recording: dict[str, Any]


def read_traffic(ground: Ground, namespace: str, run: str) -> Traffic:
    found = json.loads(ground.kubectl("get", "configmap", f"{run}-traffic", "-n", namespace, "-o", "json"))
    recording = gzip.decompress(base64.b64decode(found["binaryData"]["recording.json.gz"]))
    return Traffic(json.loads(found["data"]["workload.json"]), json.loads(recording))


def read_artifact(ground: Ground, namespace: str, digest: str) -> Compiled:
    name = f"tkcc-artifact-{digest[:16]}"
    data = json.loads(ground.kubectl("get", "configmap", name, "-n", namespace, "-o", "json"))["data"]
    candidate = Candidate(data["candidate.py"], from_json(Artifact, data["manifest.json"]).params)
    return Compiled(candidate, json.loads(data["report.json"])["gain"])


async def measure(
    artifacts: Mapping[str, Compiled],
    traffics: Mapping[str, Traffic],
    model_dir: Path,
    spec: Spec,
    say: Callable[[str], None],
) -> list[Ratio]:
    """Each artifact on the workloads that are not its own. Raises CrossError."""
    ratios = []
    async with _slow_tier(model_dir, spec) as tier:
        for workload, traffic in traffics.items():
            body = {"workload": traffic.workload, "recording": traffic.recording, "estimatesOnly": True}
            await _call(tier, "PUT", "/v1/workload", body)  # against the baseline
            for artifact, compiled in artifacts.items():
                if artifact == workload:
                    continue
                report = await _estimate(tier, compiled.candidate)
                low, mid, high = (math.exp(x) for x in (report.log_gain_low, report.log_gain, report.log_gain_high))
                ratios.append(Ratio(artifact, workload, round(mid, 4), round(low, 4), round(high, 4)))
                say(f"artifact {artifact} on workload {workload}: {mid:.3f} [{low:.3f}, {high:.3f}] x the baseline")
    return ratios


async def _estimate(tier: httpx.AsyncClient, candidate: Candidate) -> Report:
    built = await _call(tier, "POST", "/v1/candidates", to_dict(candidate))
    if built["state"] != "BUILT":
        raise CrossError(f"{candidate.digest[:10]}: {built['state']}: {built['reason']}")
    ticket = AlphaTicket(id=secrets.token_hex(8), alpha=0.05, min_gain=0.0, max_pairs=PAIRS)
    body = {"digest": candidate.digest, "ticket": to_dict(ticket), "stage": "estimate"}
    judgement = (await _call(tier, "POST", "/v1/judgements", body))["id"]
    try:
        async with asyncio.timeout(CELL_DEADLINE_S):
            while True:
                response = await tier.get(f"/v1/judgements/{judgement}", params={"waitS": 20}, timeout=60)
                if response.status_code == 200:
                    break
                response.raise_for_status()
    except TimeoutError:
        raise CrossError(f"{candidate.digest[:10]}: no estimate within {CELL_DEADLINE_S:.0f} s") from None
    report = from_dict(Report, response.json())
    if not report.pairs:
        raise CrossError(f"{candidate.digest[:10]}: {report.outcome}: {report.reason}")
    return report


async def _call(tier: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    response = await tier.request(method, path, json=body, timeout=CELL_DEADLINE_S)
    data: dict[str, Any] = response.json()
    if response.status_code >= 400:
        raise CrossError(f"{method} {path}: {data.get('error', response.status_code)}")
    return data


@asynccontextmanager
async def _slow_tier(model_dir: Path, spec: Spec) -> AsyncIterator[httpx.AsyncClient]:
    """A tier engine of all layers on this machine, ended with the block."""
    with TemporaryDirectory(prefix="tkcc-cross-") as scratch:
        token = secrets.token_urlsafe(32)
        token_file = Path(scratch) / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(token)
        tiers = spec.recompilation.tiers
        words = ["tier", "--model", str(model_dir), "--tier", "slow", "--layers", "all", "--port", "0"]
        words += ["--dtype", spec.engine.dtype, "--threads", str(tiers.threads or spec.engine.threads or 1)]
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with LOG.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tkcc", *words, "--token-file", str(token_file)),
                env={**os.environ, **({"TKCC_CPUS": tiers.cpus} if tiers.cpus else {})},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        try:
            url = await asyncio.wait_for(_address(process), START_DEADLINE_S)
            headers = {"Authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
                yield client
        except TimeoutError:
            raise CrossError(f"the tier did not start within {START_DEADLINE_S:.0f} s") from None
        except (httpx.HTTPError, ClusterError) as err:
            raise CrossError(f"the tier does not answer: {err}") from err
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 20)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """The tier prints its address when it is ready."""
    assert process.stdout
    async for line in process.stdout:
        _, _, url = line.decode().strip().partition(": http://")
        if url:
            return f"http://{url}"
    raise CrossError(f"the tier ended with exit code {await process.wait()}, see {LOG}")


async def fill_cross(
    ground: Ground, subject: Subject, story: Story, model_dir: Path, say: Callable[[str], None]
) -> None:
    """Fill the story's cross table, or say in it why it is empty."""
    by_label = {label: digest for digest, label in story.compiled_for.items()}
    run_of = {run.workload: run.name for run in story.runs}
    labels: list[str] = [label for label in ("A", "B") if label in by_label and label in run_of]
    try:
        artifacts = {label: read_artifact(ground, subject.namespace, by_label[label]) for label in labels}
        traffics = {label: read_traffic(ground, subject.namespace, run_of[label]) for label in labels}
        for label, found in artifacts.items():
            story.cross.append(Ratio(label, label, found.gain["median"], found.gain["ciLow"], found.gain["ciHigh"]))
        if len(artifacts) == 2:
            story.cross += await measure(artifacts, traffics, model_dir, subject.spec, say)
    except (CrossError, ClusterError) as err:
        story.cross_note = f"Not measured: {err}."
