"""Tiers of a recompile on one machine end with it, however it ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIER = "import os, time; print(f'tkcc tier fast: http://127.0.0.1:{os.getpid()}', flush=True); time.sleep(60)"
RECOMPILE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tkcc.cli import main as cli
from tkcc.worker.local_tiers import tiers

def run(args):
    with tiers({"fast": [sys.executable, "-c", sys.argv[1]]}, Path(sys.argv[2])) as addresses:
        print(addresses["fast"].url.rpartition(":")[2], flush=True)
        sys.stdin.read()
    return 0

cli.make_parser = lambda: SimpleNamespace(parse_args=lambda argv: SimpleNamespace(run=run))
sys.exit(cli.main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_tier_outlives_its_recompile(number: signal.Signals, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RECOMPILE, TIER, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as recompile:
        assert recompile.stdout
        tier = int(recompile.stdout.readline())
        assert _is_running(tier)
        recompile.send_signal(number)
        assert recompile.wait(30) == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    until = time.monotonic() + 10
    while _is_running(tier):
        assert time.monotonic() < until, "the tier lives on"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
