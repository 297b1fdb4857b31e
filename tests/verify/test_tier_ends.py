"""What becomes of a tier whose own processes end: it goes on, or says that it cannot and ends."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify.tiny import changed, recording, workload, write_tiny_model
from tkcc.api.report import AlphaTicket, Outcome
from tkcc.worker.local_tiers import tiers
from tkcc.worker.tiers import Setup, Tier, TierGoneError

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    """One of its own, started and not told of a workload."""
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "tkcc", "tier", "--model", str(model), "--tier", "fast", "--threads", "1"]
    with tiers({"fast": command}, tmp_path) as addresses:
        address = addresses["fast"]
        tier = Tier("fast", address.url, address.token, Setup(workload(), recording(), None), address.last_words)
        yield tier
        tier.close()


def kill(name: str) -> None:
    """The youngest process of that name that descends from this one."""
    found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is(pid, name)]
    os.kill(max(found), signal.SIGKILL)


def _is(pid: int, name: str) -> bool:
    try:
        named = Path(f"/proc/{pid}/comm").read_text().strip() == name
        while named and pid > 1:
            if pid == os.getpid():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        pass
    return False


def test_a_judge_that_dies_is_started_again_and_the_verdict_is_given_by_the_next(tier: Tier) -> None:
    tier.prepare()
    ticket = AlphaTicket("t", 0.05, 0.005, 400)
    killed = []

    def progress(state: str, pairs: int) -> None:
        if pairs > 2 and not killed:
            killed.append(pairs)
            kill("tkcc-judge")

    report = tier.judge(changed("    pass  # long"), "estimate", ticket, progress)
    assert killed and report.outcome is Outcome.EXPIRED and "judge" in report.reason
    assert tier.judge(changed("    pass  # short"), "screen", AlphaTicket("u", 0.05, 0.005, 2), print).pairs == 2


def test_a_tier_whose_judge_dies_again_and_again_ends_and_says_why(tier: Tier) -> None:
    with pytest.raises(TierGoneError, match="the fast tier ended: the judge ended 3 times"):
        for _ in range(200):
            with contextlib.suppress(ValueError):  # the next one is about to start
                kill("tkcc-judge")
            time.sleep(0.5)
            tier._refuse_dead()
