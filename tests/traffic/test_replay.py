"""Replay against a real HTTP server on loopback: pace, connections, limits, and every way a request can end."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tkcc.traffic.prompts import DEFAULT_VOCAB, prompt_ids
from tkcc.traffic.replay import Result, Target, list_models, replay
from tkcc.traffic.shape import PlannedRequest, scale
from tkcc.traffic.trace import read

CHAT = Path(__file__).parents[2] / "examples" / "traces" / "chat.jsonl.gz"


class Server:
    """Speaks as much of the completions API as a client can see, and notes what it was sent."""

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.bodies: list[dict] = []
        self.peers: list[tuple] = []
        self.running = self.most_running = 0
        self.mode = "ok"
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        self.http = TestServer(app)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.peers.append(request.transport.get_extra_info("peername"))
        if self.mode == "refuse":
            return web.json_response({"error": {"message": "max_tokens is too large", "type": "bad"}}, status=400)
        if self.mode == "strict" and "ignore_eos" in body:
            return web.json_response({"error": {"message": "ignore_eos=True is not supported"}}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.stream(request, body)
        finally:
            self.running -= 1

    async def stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(self.token_s)
            await response.write(b'data: {"choices": [{"text": "x"}], "system_fingerprint": "fp"}\n\n')
        if self.mode == "cut":
            request.transport.close()
            return response
        if self.mode == "hang":
            await asyncio.sleep(60)
        if self.mode == "error":
            await response.write(b'data: {"error": {"message": "worker died"}}\n\n')
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": 3}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        if self.mode != "no-done":
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def server():
    one = Server()
    await one.http.start_server()
    yield one
    await one.http.close()


def _target(server: Server, **changes) -> Target:
    return Target(str(server.http.make_url("")), "tiny", DEFAULT_VOCAB, **changes)


def _requests(*arrivals_s: float, output_tokens: int = 3) -> list[PlannedRequest]:
    return [PlannedRequest(i, at, ((7, 16),), 4, output_tokens) for i, at in enumerate(arrivals_s)]


async def _send(server: Server, requests, **options) -> list[Result]:
    results: list[Result] = []
    target = _target(server, **options.pop("target", {}))
    await replay(requests, target, results.append, **options)
    return sorted(results, key=lambda result: result.index)


async def test_each_request_is_sent_as_planned_on_a_connection_of_its_own(server):
    requests = _requests(0.0, 0.0, 0.05)
    results = await _send(server, requests)
    assert [body["prompt"] for body in server.bodies] == [prompt_ids(r, DEFAULT_VOCAB) for r in requests]
    assert {(b["max_tokens"], b["temperature"], b["model"], b["ignore_eos"]) for b in server.bodies} == {
        (3, 0, "tiny", True)
    }
    assert len(set(server.peers)) == 3
    for result in results:
        assert (result.status, result.error, result.is_ok) == (200, "", True)
        assert (result.prompt_tokens, result.cached_tokens, result.output_tokens) == (20, 3, 3)
        assert result.fingerprint == "fp"


async def test_times_are_of_the_first_and_the_following_tokens(server):
    server.token_s = 0.05
    (result,) = await _send(server, _requests(0.0, output_tokens=5))
    assert 0.05 <= result.ttft_s < 0.5
    assert 0.045 <= result.tpot_s < 0.2


async def test_the_pace_is_the_traces_not_the_servers(server):
    server.token_s = 0.3
    results = await _send(server, _requests(0.0, 0.1, 0.2, output_tokens=5))
    due = [result.started_at_s - result.late_s for result in results]
    assert [at_s - due[0] for at_s in due] == pytest.approx([0.0, 0.1, 0.2], abs=0.02)
    assert server.most_running == 3  # a closed loop would have waited 1.5 s for each


async def test_a_full_house_sends_late_and_says_so(server):
    server.token_s = 0.05
    results = await _send(server, _requests(0.0, 0.0, 0.0), target={"max_concurrency": 1})
    assert server.most_running == 1
    assert all(result.late_s >= least for result, least in zip(results, (0.0, 0.14, 0.29), strict=True))


@pytest.mark.parametrize(
    "mode, status, error",
    [
        ("refuse", 400, "max_tokens is too large"),
        ("cut", 200, "RemoteProtocolError"),
        ("error", 200, "worker died"),
        ("no-done", 200, "the stream ended before [DONE]"),
        ("hang", 200, "no end within 0.5 s"),
    ],
)
async def test_a_request_that_goes_wrong_is_counted_not_raised(server, mode, status, error):
    server.mode = mode
    (result,) = await _send(server, _requests(0.0), target={"request_timeout_s": 0.5})
    assert result.status == status and error in result.error and not result.is_ok


async def test_a_server_that_is_not_there(server):
    target = Target("http://127.0.0.1:9", "tiny", DEFAULT_VOCAB)
    results: list[Result] = []
    await replay(_requests(0.0), target, results.append)
    assert (results[0].status, results[0].ttft_s) == (0, None) and "ConnectError" in results[0].error


async def test_it_ends_with_the_time_given_and_finishes_what_is_in_flight(server):
    server.token_s = 0.05
    results = await _send(server, _requests(0.0, 0.1, 5.0), duration_s=1.0)
    assert [result.is_ok for result in results] == [True, True]


async def test_a_stop_ends_sending_even_while_it_waits_for_a_place(server):
    server.token_s = 0.1
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    results = await _send(server, _requests(0.0, 0.0, 0.0), target={"max_concurrency": 1}, stop=stop)
    assert [result.index for result in results] == [0]


async def test_a_server_that_does_not_know_ignore_eos_is_asked_without_it(server):
    server.mode = "strict"
    results = await _send(server, _requests(0.0, 0.3))
    assert all(result.is_ok for result in results)
    assert ["ignore_eos" in body for body in server.bodies] == [True, False, False]


async def test_the_only_model_is_found(server):
    assert await list_models(str(server.http.make_url(""))) == ["tiny"]


async def _command(server: Server, *options: str, cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tkcc.cli.main", "traffic", "replay", str(CHAT), "--length-factor", "0.05"),
        *("--url", str(server.http.make_url("")), "--out", "results.jsonl", *options),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_the_command_prints_both_factors_and_writes_a_line_per_request(server, tmp_path):
    process = await _command(server, "--time-factor", "0.01", "--duration-s", "2", cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err
    plan = scale(read(CHAT), 0.05, 0.01)
    due = [request for request in plan.requests if request.arrival_s <= 2]
    assert f"length factor 0.05, time factor 0.01: {len(plan.requests)} requests" in out.decode()
    assert f"{len(due)} requests ended, 0 failed" in out.decode()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {line["index"] for line in lines} == {request.index for request in due}


async def test_ctrl_c_stops_cleanly_with_a_summary(server, tmp_path):
    server.token_s = 0.2
    process = await _command(server, "--time-factor", "1", cwd=tmp_path)
    while not server.bodies:
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130 and b"requests ended, 0 failed" in out
    assert b"Traceback" not in err


async def test_failures_are_the_exit_code(server, tmp_path):
    server.mode = "refuse"
    process = await _command(server, "--time-factor", "0.01", "--duration-s", "0.5", cwd=tmp_path)
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1 and b"failed: max_tokens is too large" in out
