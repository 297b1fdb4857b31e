"""A tiny random model, and servers for it on free loopback ports.

`server` is a real `tkcc serve` process. `start` runs the same Server with other settings in a thread: a process pays
seconds to import torch, and nothing but signals and exit codes differs.
"""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tkcc.engine.serve.cold_start import ColdStart
from tkcc.engine.serve.options import ServeOptions
from tkcc.engine.serve.server import Server
from tkcc.models.random_model import Shape, write_random_model

START_TIMEOUT_S = 100
READY = re.compile(r"serving (\S+) on http://([\d.]+):(\d+), admin port (\d+)")
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(directory, Shape(layers=2, max_positions=512), seed=11)
    return directory


@dataclass
class Served:
    """A running server, as its clients and its operator see it."""

    lines: list[str] = field(default_factory=list)  # what it said to people
    url: str = ""
    admin_url: str = ""
    name: str = ""

    def say(self, line):
        self.lines.append(line)
        if found := READY.search(line):
            self.name, host, port, admin_port = found.groups()
            self.admin_url = f"http://{host}:{admin_port}"
            self.url = f"http://{host}:{port}"

    def post(self, path, body, **kwargs):
        return httpx.post(self.url + path, json=body, timeout=60, **kwargs)

    def complete(self, prompt, **fields):
        body = {"model": self.name, "prompt": prompt, "temperature": 0, **fields}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name):
        """One sample of /metrics, labels written out."""
        for line in httpx.get(self.admin_url + "/metrics", timeout=60).text.splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def log(self, since=0):
        return httpx.get(f"{self.admin_url}/tkcc/requests?since={since}", timeout=60).json()

    def wait_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.url:
            assert time.monotonic() < deadline and self.is_alive(), self.lines
            time.sleep(0.02)
        return self


@dataclass
class ServedProcess(Served):
    process: subprocess.Popen | None = None

    @classmethod
    def start(cls, model, *options):
        command = [sys.executable, "-m", "tkcc", "serve", "--model", model, "--port", 0, "--admin-port", 0]
        command += ["--threads", 1, "--kv-cache-mib", 8, "--drain-accept-s", 0.1, *options]
        process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
        served = cls(process=process)
        served.reader = threading.Thread(target=lambda: [served.say(line) for line in process.stderr], daemon=True)
        served.reader.start()
        return served

    def is_alive(self):
        return self.process.poll() is None

    def wait(self, timeout_s=30):
        """The exit code; all that was said is in `lines` then."""
        code = self.process.wait(timeout_s)
        self.reader.join(timeout_s)
        self.process.stderr.close()
        return code


@dataclass
class ServedThread(Served):
    code: int | None = None

    @classmethod
    def start(cls, options):
        served = cls()
        served.loop = asyncio.new_event_loop()
        served.server = Server(options, ColdStart(), served.say)
        served.thread = threading.Thread(target=served._run)
        served.thread.start()
        return served

    def _run(self):
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            self.code = runner.run(self.server.run())

    def is_alive(self):
        return self.thread.is_alive()

    def signal(self, number):
        if self.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop, number)

    def wait(self, timeout_s=30):
        """The exit code."""
        self.thread.join(timeout_s)
        assert not self.is_alive(), f"not ended within {timeout_s} s: {self.lines}"
        return self.code


@pytest.fixture(scope="session")
def server(model_dir):
    """One process for all tests that leave it as it was."""
    served = ServedProcess.start(model_dir, "--record", 200, "--max-batch", 4).wait_ready()
    yield served
    served.process.terminate()
    assert served.wait() == 0, served.lines
    assert any("draining" in line for line in served.lines)


@pytest.fixture
def start(model_dir):
    """Servers of a test's own: start(max_running=1, ...). Those still running at the end are stopped."""
    started = []

    def go(**options):
        settings = {"kv_cache_mib": 8, "drain_accept_s": 0.1, **options}
        started.append(ServedThread.start(ServeOptions(model_dir, port=0, admin_port=0, **settings)))
        return started[-1].wait_ready()

    yield go
    for served in started:
        served.signal(signal.SIGINT)
        served.wait()
