"""A tiny random model, and real `tkcc serve` processes on free loopback ports."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tkcc.models.random_model import Shape, write_random_model

START_TIMEOUT_S = 90
READY = re.compile(r"serving (\S+) on http://([\d.]+):(\d+), admin port (\d+)")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(directory, Shape(layers=2, max_positions=512), seed=11)
    return directory


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen
    url: str
    admin_url: str
    name: str
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None  # of the process's stderr, into `lines`

    def post(self, path, body, **kwargs):
        return httpx.post(self.url + path, json=body, timeout=60, **kwargs)

    def complete(self, prompt, **fields):
        body = {"model": self.name, "prompt": prompt, "temperature": 0, **fields}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name):
        """One sample of /metrics, labels written out."""
        for line in httpx.get(self.admin_url + "/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def log(self, since=0):
        return httpx.get(f"{self.admin_url}/tkcc/requests?since={since}").json()

    def stop(self, timeout_s=30):
        self.process.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s=30):
        """The exit code; all that was printed is in `lines` then."""
        code = self.process.wait(timeout_s)
        self.reader.join(timeout_s)
        self.process.stderr.close()
        return code

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        if not self.process.stderr.closed:
            self.wait()


def start_server(model, *options, environment=(), wait=True):
    command = [sys.executable, "-m", "tkcc", "serve", "--model", str(model), "--port", "0", "--admin-port", "0"]
    command += ["--threads", "1", "--kv-cache-mib", "8", "--drain-accept-s", "0.2", *map(str, options)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONWARNINGS": "default", **dict(environment)},
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    if not wait:
        reader.start()
        return Served(process, "", "", "", lines, reader)
    deadline = time.monotonic() + START_TIMEOUT_S
    for line in process.stderr:
        lines.append(line)
        if found := READY.search(line):
            name, host, port, admin_port = found.groups()
            reader.start()
            return Served(process, f"http://{host}:{port}", f"http://{host}:{admin_port}", name, lines, reader)
        if time.monotonic() > deadline:
            break
    process.kill()
    process.communicate()
    raise AssertionError(f"the server did not start: {''.join(lines)}")


@pytest.fixture(scope="session")
def server(model_dir):
    """One server for all tests that leave it as it was."""
    served = start_server(model_dir, "--record", 200, "--max-batch", 4)
    yield served
    assert served.stop() == 0, served.lines


@pytest.fixture
def start(model_dir):
    """Servers of a test's own: start(*options). Those still running at the end are killed."""
    started = []

    def go(*options, model=model_dir, **kwargs):
        started.append(start_server(model, *options, **kwargs))
        return started[-1]

    yield go
    for served in started:
        served.kill()
