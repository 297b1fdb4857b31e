"""Runs one campaign against two tiers, wherever they and its result live.

It decides the order of things; what is tried is the campaign's matter, where it is kept the sink's.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tkcc.agents.proposer import Proposer
from tkcc.api.candidate import Candidate
from tkcc.api.codec import to_json
from tkcc.api.workload import Recording, Workload
from tkcc.worker import outcome
from tkcc.worker.campaign import Budget, Campaign, Observer, Result, context_of
from tkcc.worker.journal import Journal
from tkcc.worker.tiers import Setup, Tier


class Sink(Protocol):
    """Where a campaign's journal and result are kept."""

    def read_journal(self) -> Iterable[str]: ...

    def append_journal(self, line: str) -> None: ...

    def write(self, files: Mapping[str, str]) -> None:
        """The result, all at once: manifest.json and candidate.py if there is a winner, report.json, result.json."""


@dataclass(frozen=True, slots=True)
class Work:
    """One campaign."""

    workload: Workload
    recording: Recording
    incumbent: Candidate | None
    budget: Budget
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TierAddress:
    url: str
    token: str
    last_words: Callable[[], str] = str  # of a tier that ended; "" while it lives, or where that cannot be seen


def run(
    work: Work,
    addresses: Mapping[str, TierAddress],
    proposer: Proposer,
    sink: Sink,
    make_observer: Callable[[Journal], Observer],
    say: Callable[[str], None],
) -> Result:
    """Search, accept, write. Raises TierGoneError, and ValueError for a journal of another campaign."""
    began_s = time.time()  # the budget counts from here: tiers take their time to calibrate
    setup = Setup(work.workload, work.recording, work.incumbent)
    slow, fast = (
        Tier(name, addresses[name].url, addresses[name].token, setup, addresses[name].last_words)
        for name in ("slow", "fast")
    )
    try:
        for tier in (slow, fast):  # the slow one first: its calibration must not disturb the fast one's timing
            say(f"{tier.name} tier: waiting for it, then calibrating on {len(work.recording.requests)} requests")
            tier.prepare()
            say(_describe(tier.info))
        identity = {
            "model": slow.info["modelDigest"],
            "dtype": slow.info["dtype"],
            "layers": f"{fast.info['layers']}, {slow.info['layers']}",
            "judge": slow.info["judgeSourceHash"],
            "workload": work.workload.digest,
            "incumbent": work.incumbent.digest if work.incumbent else slow.info["baselineDigest"],
            "seed": work.seed,
        }
        journal = Journal.open(sink.read_journal(), sink.append_journal, identity, began_s)
        if journal.num_replayed:
            say(f"going on from a journal of {journal.num_replayed} verdicts")
        context = context_of(fast.info, work.incumbent)
        observer = make_observer(journal)
        campaign = Campaign(proposer, context, fast, slow, journal, work.budget, time.time, observer)
        result = campaign.run()
        seconds = time.time() - journal.started_at_s
        gains: dict[str, float] = getattr(proposer, "operator_gains", dict)()
        report = outcome.report(result, {"fast": fast.info, "slow": slow.info}, seconds, gains)
        sink.write(_files(result, report, work, slow.info))
        return result
    finally:
        slow.close()
        fast.close()


def _files(result: Result, report: dict[str, Any], work: Work, info: Mapping[str, Any]) -> dict[str, str]:
    files = {}
    if result.winner is not None:
        files["manifest.json"] = to_json(outcome.manifest(result, work.workload, work.recording, info))
        files["candidate.py"] = result.winner.candidate.source
    files["report.json"] = json.dumps(report, indent=1)
    files["result.json"] = to_json(outcome.run_result(result))  # last: it says that the rest is there
    return files


def _describe(info: Mapping[str, Any]) -> str:
    cells = ", ".join(
        f"{c['phase']} {c['batch']}x{c['newTokens']} ctx {c['contextTokens']} {100 * c['weightRatio']:.0f} %"
        for c in info["cells"]
    )
    return f"{info['tier']} tier: {info['layers']} layers, noise floor {100 * info['noiseFloor']:.1f} %; cells: {cells}"
