"""A serving pod's behaviour over time: batching, prefix hits, cancellation, limits, drain, artifacts, refusals.

Real processes; what is asserted is what clients and the operator can see.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.engine.serve.conftest import ServedProcess
from tests.fakes.manifest import manifest
from tkcc.api.candidate import Candidate
from tkcc.api.codec import from_json, to_json
from tkcc.api.workload import Recording
from tkcc.cli.main import main
from tkcc.engine.artifact import baseline
from tkcc.engine.serve.engine import Limits
from tkcc.models.checkpoint import model_digest

SURE = {"temperature": 0, "ignore_eos": True}  # as many tokens as are asked for, whatever the model says
LONG = {"max_tokens": 400, **SURE}  # some seconds on the tiny model


def until(check, what, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def gather(server, bodies, timeout_s=60):
    """All at once; answers in order."""

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=timeout_s) as client:
            asks = [client.post("/v1/completions", json={"model": server.name, **body}) for body in bodies]
            return await asyncio.gather(*asks)

    return asyncio.run(run())


def write_artifact(directory, model, source=None, **changes):
    source = baseline().source + "\n# another candidate\n" if source is None else source
    fields = {"model_digest": model_digest(model), **changes}
    digest = fields.pop("digest", Candidate(source, {}).digest)
    directory.mkdir()
    (directory / "manifest.json").write_text(to_json(manifest(digest, **fields)))
    (directory / "candidate.py").write_text(source)
    return directory


def test_requests_at_once_get_the_text_they_get_alone(server):
    prompts = [f"Question number {i}: what is {i} times {i}?" for i in range(7)]  # more than --max-batch
    alone = [server.complete(prompt, max_tokens=12)["choices"][0]["text"] for prompt in prompts]
    answers = gather(server, [{"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts])
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone


def test_a_repeated_prefix_is_cached_and_counted_once(server):
    prompt = [(i * i) % 400 + 50 for i in range(70)]
    before = {name: server.metric(f"tkcc_engine_prefix_cache_{name}_tokens_total") for name in ("query", "hit")}
    usages = [server.complete(prompt, max_tokens=2)["usage"] for _ in range(2)]
    other = server.complete([*prompt[:40], 7, *prompt[41:]], max_tokens=2)["usage"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (*usages, other)]
    assert cached == [0, 64, 32]
    after = {name: server.metric(f"tkcc_engine_prefix_cache_{name}_tokens_total") for name in ("query", "hit")}
    assert (after["query"] - before["query"], after["hit"] - before["hit"]) == (210, 96)


def test_what_the_operator_reads(server):
    cursor = server.log()["next"]
    started = server.metric("tkcc_engine_requests_started_total")
    prompt = [300 + i for i in range(35)]
    server.complete(prompt, max_tokens=5, **SURE)
    (entry,) = server.log(cursor)["requests"]
    assert (entry["promptTokens"], entry["outputTokens"], entry["outcome"]) == (35, 5, "ok")
    assert 0 < entry["tpotS"] < entry["ttftS"] * 100 and abs(entry["startedAtMs"] / 1000 - time.time()) < 60
    assert server.metric("tkcc_engine_requests_started_total") == started + 1
    info = httpx.get(f"{server.admin_url}/tkcc/info").json()
    assert info["artifactDigest"] == info["baselineDigest"] == baseline().digest
    assert info["dtype"] == "float32" and info["recording"] is True and info["device"].startswith("cpu: ")
    recording = from_json(Recording, httpx.get(f"{server.admin_url}/tkcc/recording?sinceMs=0&max=1").content)
    assert recording.requests[0].prompt_tokens == 35 and len(recording.requests[0].block_hashes) == 2
    assert server.metric("tkcc_engine_requests_running") == 0 == server.metric("tkcc_engine_kv_usage_ratio")
    assert server.metric('tkcc_engine_cold_start_seconds{phase="total"}') > 0.1


def test_a_probe_is_answered_and_counted_nowhere(server):
    cursor, started = server.log()["next"], server.metric("tkcc_engine_requests_started_total")
    answer = server.post(
        "/v1/completions", {"model": server.name, "prompt": "x", "max_tokens": 2}, headers={"x-tkcc-probe": "1"}
    )
    assert answer.status_code == 200
    assert server.log(cursor)["requests"] == [] and server.metric("tkcc_engine_requests_started_total") == started


@pytest.mark.parametrize("path", ["/tkcc/requests?since=-1", "/tkcc/requests?since=x", "/tkcc/recording?max=1e9"])
def test_a_bad_cursor_is_a_400(path, server):
    assert httpx.get(server.admin_url + path).status_code == 400


def test_the_public_port_has_no_admin_paths(server):
    assert httpx.get(f"{server.url}/tkcc/requests").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place_at_once(stream, server):
    cursor = server.log()["next"]
    body = json.dumps({"model": server.name, "prompt": "Tell me everything.", "stream": stream, **LONG})
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        until(lambda: server.metric("tkcc_engine_requests_running") == 1, "the request runs")
    until(lambda: server.log(cursor)["requests"], "the request is logged")
    (entry,) = server.log(cursor)["requests"]
    assert entry["outcome"] == "cancelled" and entry["outputTokens"] < 400
    assert server.metric("tkcc_engine_kv_usage_ratio") == 0


def test_health_answers_while_steps_run(server):
    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asks = [
                asyncio.create_task(
                    client.post("/v1/completions", json={"model": server.name, "prompt": f"{i}", **LONG})
                )
                for i in range(4)
            ]
            waits = []
            while not all(ask.done() for ask in asks):
                start = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                waits.append(time.monotonic() - start)
                await asyncio.sleep(0.01)
            assert all(ask.result().status_code == 200 for ask in asks)
            return waits

    waits = asyncio.run(run())
    assert len(waits) > 5 and sorted(waits)[len(waits) // 2] < 0.25


def test_a_full_queue_is_a_429_that_says_when_to_come_back(start):
    server = start(max_running=1, limits=Limits(max_waiting=1))
    answers = gather(server, [{"prompt": str(i), **LONG} for i in range(4)])
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["code"] == "queue_full"
    assert server.metric('tkcc_engine_requests_total{outcome="rejected"}') == 2


def test_deadline_body_limit_and_recording_off(start):
    server = start(request_timeout_s=0.3, max_body_bytes=1 << 20)
    body = {"model": server.name, "prompt": "x", **LONG}
    late = server.post("/v1/completions", body)
    assert late.status_code == 504 and "took over 0.3 s" in late.json()["error"]["message"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as streamed:
        last = [line for line in streamed.iter_lines() if line][-1]
    assert streamed.status_code == 200 and "took over 0.3 s" in last  # it had begun
    large = server.post("/v1/completions", {**body, "prompt": "x" * (2 << 20)})
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
    assert server.metric('tkcc_engine_requests_total{outcome="error"}') == 2
    assert httpx.get(f"{server.admin_url}/tkcc/recording").status_code == 403


def test_when_kv_blocks_run_out_texts_stay_the_same(start, model_dir, server):
    # 1 MiB = 128 blocks of this model; five requests of 450 tokens want 145
    small = start(kv_cache_mib=1, max_running=5)
    bodies = [{"prompt": f"Story number {i}", "max_tokens": 440, **SURE} for i in range(5)]
    tight, roomy = (
        [answer.json()["choices"][0]["text"] for answer in gather(target, bodies)] for target in (small, server)
    )
    assert small.metric("tkcc_engine_preemptions_total") >= 1 > server.metric("tkcc_engine_preemptions_total")
    assert tight == roomy


def test_a_drain_is_bounded(start):
    server = start(drain_accept_s=0, drain_finish_s=0.3)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"model": server.name, "prompt": "x", "stream": True, **LONG}
    ) as running:
        lines = running.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        assert "shutting down" in [line for line in lines if line][-1]
    assert server.wait(10) == 0


def test_an_artifact_serves_under_its_own_digest(start, model_dir, tmp_path, server):
    artifact = write_artifact(tmp_path / "artifact", model_dir)
    other = start(artifact=artifact)
    info = httpx.get(f"{other.admin_url}/tkcc/info").json()
    assert info["artifactDigest"] == Candidate((artifact / "candidate.py").read_text(), {}).digest
    assert info["artifactDigest"] != info["baselineDigest"] == baseline().digest
    assert other.complete("x", max_tokens=9)["choices"] == server.complete("x", max_tokens=9)["choices"]


FAILING = """
from tkcc.models import llama

class Failing(llama.Llama):
    steps = 0
    def decode(self, batch, kv):
        Failing.steps += 1
        {fault}
        return super().decode(batch, kv)

def build(spec, weights, cells):
    return Failing(spec, weights)
"""


def test_one_failed_step_fails_its_requests_only(start, model_dir, tmp_path):
    source = FAILING.format(fault="if Failing.steps == 3: raise RuntimeError('the third step')")
    server = start(artifact=write_artifact(tmp_path / "artifact", model_dir, source))
    body = {"model": server.name, "prompt": "x", "max_tokens": 9, **SURE}
    failed = server.post("/v1/completions", body)
    assert failed.status_code == 500 and "the third step" in failed.json()["error"]["message"]
    assert server.post("/v1/completions", body).status_code == 200
    assert server.metric('tkcc_engine_requests_total{outcome="error"}') == 1
    assert server.metric("tkcc_engine_kv_usage_ratio") == 0


def test_weights_that_come_late_are_waited_for(model_dir, tmp_path):
    late = tmp_path / "late"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = ServedProcess.start(late, "--wait-for-model", "--admin-port", port)

    def load_error():
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/tkcc/info")
        except httpx.ConnectError:
            return ""
        return answer.json()["loadError"] if answer.status_code == 503 else ""

    try:
        until(lambda: "no such model directory" in load_error(), "it says why", timeout_s=100)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
        shutil.copytree(model_dir, late)
        server.wait_ready()
        assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert sum("no such model directory" in line for line in server.lines) == 1, "said once"
    finally:
        server.process.terminate()
        assert server.wait() == 0


def test_draining_finishes_what_runs_and_refuses_what_comes(start, model_dir, tmp_path):
    slow = FAILING.format(fault="import time; time.sleep(0.01)")  # 400 tokens take 4 s
    server = start(drain_accept_s=1.5, artifact=write_artifact(tmp_path / "artifact", model_dir, slow))
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"model": server.name, "prompt": "x", "stream": True, **LONG}
    ) as running:
        lines = running.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "health turns", timeout_s=1)
        accepted = server.post("/v1/completions", {"model": server.name, "prompt": "x", "max_tokens": 1})
        assert accepted.status_code == 200 and accepted.headers["connection"] == "close"
        until(
            lambda: server.post("/v1/completions", {"model": server.name, "prompt": "x"}).status_code == 503,
            "new requests are refused",
        )
        assert "data: [DONE]" in list(lines)
    assert server.wait() == 0 and any("draining, 1 running" in line for line in server.lines)


@pytest.mark.parametrize(
    "case, fault, want",
    [
        (
            "it fails again and again",
            "if Failing.steps > 1: raise RuntimeError('no')",
            "3 decode steps failed in a row",
        ),
        (
            "it makes no numbers",
            "if Failing.steps > 1: return kv.k_lnksd.new_full((1, 512), float('nan'))",
            "not finite",
        ),
        ("it hangs", "if Failing.steps > 1: import time; time.sleep(4)", "decode step took over 1 s"),
    ],
)
def test_a_forward_pass_that_cannot_go_on_ends_the_process(case, fault, want, start, model_dir, tmp_path):
    source = FAILING.format(fault=fault)
    server = start(artifact=write_artifact(tmp_path / "artifact", model_dir, source), limits=Limits(step_timeout_s=1))
    body = {"model": server.name, "prompt": "x", "max_tokens": 9, **SURE}
    for _ in range(3):
        try:
            assert server.post("/v1/completions", body).status_code == 500
        except httpx.TransportError:
            break  # it ended in the meantime
    assert server.wait(20) == 1
    assert any(want in line for line in server.lines) and not any("Traceback" in line for line in server.lines)


@pytest.fixture
def refused(capfd):
    """Runs `tkcc serve` with these options, in this process; gives the one line that it ends with."""

    def run(*options):
        code = main(["serve", "--port", "0", "--admin-port", "0", *map(str, options)])
        said = capfd.readouterr().err.strip().splitlines()
        assert code == 2 and len(said) == 1, (code, said)
        return said[0]

    return run


@pytest.mark.parametrize(
    "case, spoil, want",
    [
        ("another model's", {"model_digest": "0" * 64}, "was judged on model 0000000000000000"),
        ("another dtype's", {"dtype": "bfloat16"}, "was judged in bfloat16, not float32: pass --dtype bfloat16"),
        ("another digest", {"digest": "1" * 64}, "the manifest says 1111111111111111"),
        ("not Python", {"source": "def build("}, "does not import: SyntaxError"),
        ("no build", {"source": "x = 1\n"}, "defines no function `build"),
        (
            "fails to build",
            {"source": "def build(spec, weights, cells): return 1 / 0\n"},
            "does not build: ZeroDivision",
        ),
    ],
)
def test_an_artifact_that_does_not_match_is_refused(case, spoil, want, model_dir, tmp_path, refused):
    artifact = write_artifact(tmp_path / "artifact", model_dir, **spoil)
    assert want in refused("--model", model_dir, "--artifact", artifact, "--dtype", "float32", "--threads", 1)


@pytest.mark.parametrize(
    "case, arrange, want",
    [
        ("no model", lambda tmp, model: ["--model", tmp / "nowhere"], "no such directory"),
        ("an empty model directory", lambda tmp, model: ["--model", tmp], "config.json is missing"),
        ("no artifact", lambda tmp, model: ["--model", model, "--artifact", tmp / "no"], "no such directory"),
        ("an empty artifact", lambda tmp, model: ["--model", model, "--artifact", tmp], "No such file"),
        ("no such device", lambda tmp, model: ["--model", model, "--device", "cuda"], "--device cuda"),
        (
            "no room for KV",
            lambda tmp, model: ["--model", model, "--kv-cache-mib", 1, "--block-tokens", 2048],
            "too small",
        ),
        ("a nonsensical number", lambda tmp, model: ["--model", model, "--threads", 0], "--threads must be at least 1"),
    ],
)
def test_a_start_that_cannot_work_is_one_line_and_exit_code_2(case, arrange, want, model_dir, tmp_path, refused):
    assert want in refused(*arrange(tmp_path, model_dir))


def test_a_port_in_use_is_named(model_dir, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused("--model", model_dir, "--port", port)


def test_a_wrong_list_of_cores_is_refused(model_dir, refused, monkeypatch):
    monkeypatch.setenv("TKCC_CPUS", "zero")
    assert "TKCC_CPUS=zero" in refused("--model", model_dir)


def test_the_process_is_pinned_to_its_cores(tmp_path):
    core = str(min(os.sched_getaffinity(0)))
    code = "import os; from tkcc.engine.host import pin_to_cpus; pin_to_cpus(); print(os.sched_getaffinity(0))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "TKCC_CPUS": core})
    assert done.stdout.strip() == f"{{{core}}}"


def test_a_real_process_ends_by_itself_when_its_engine_is_broken(model_dir, tmp_path):
    source = FAILING.format(fault="import time; time.sleep(300)")
    artifact = write_artifact(tmp_path / "artifact", model_dir, source.replace("def decode", "def prefill"))
    # A thread that hangs must not keep the process alive.
    server = ServedProcess.start(model_dir, "--artifact", artifact, "--step-timeout-s", 1)
    server.process.terminate()
    assert server.wait(60) in (0, -signal.SIGTERM)  # stopped while loading, or before it could listen to signals
