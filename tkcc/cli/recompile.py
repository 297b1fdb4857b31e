"""`tkcc recompile`: the whole search on one machine, without a cluster."""

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tkcc.cli.command import CommandError

if TYPE_CHECKING:
    from tkcc.api.workload import Recording, Workload
    from tkcc.worker.campaign import Result

COMMAND = "recompile"
SUMMARY = "search a faster forward pass for a trace's traffic, on this machine"
DESCRIPTION = """Starts a fast tier (a few layers) and a slow tier (all) of the model, proposes rewritten forward
passes, measures each against the one in service on the trace's traffic, and writes the accepted one to --out:
manifest.json, candidate.py, report.json. Needs no root and no cluster. TKCC_CPUS pins both tiers to cores. The same
command with the same --out goes on where it was interrupted.

examples:
  tkcc recompile --model DIR --trace examples/traces/chat.jsonl.gz --budget 10m --out build/recompile
  tkcc serve --model DIR --artifact build/recompile
"""
BLOCK_TOKENS = 16  # as `tkcc serve` has by default
# A guess of the serving pod's pace, for the workload's concurrency alone; cells come from the tiers' own simulation.
PREFILL_TOKENS_PER_S, TPOT_S = 400.0, 0.05
_UNITS = {"s": 1, "m": 60, "h": 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face model directory")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a trace, or a recording (JSON)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="journal, artifact and report")
    parser.add_argument("--budget", default="10m", metavar="T", help="time, such as 90s, 10m, 1h (default 10m)")
    parser.add_argument("--length-factor", type=float, default=0.125, metavar="F", help="of a trace's lengths (1/8)")
    parser.add_argument("--time-factor", type=float, default=1.0, metavar="F", help="of a trace's gaps (1)")
    parser.add_argument("--max-requests", type=int, default=500, metavar="N", help="of the trace, from its start (500)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers of the fast tier (4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of a forward pass (1)")
    parser.add_argument("--incumbent", type=Path, metavar="DIR", help="artifact to beat (default: the baseline)")
    parser.add_argument("--script", type=Path, metavar="DIR", help="try the *.py files in DIR instead of searching")
    parser.add_argument("--max-candidates", type=int, default=200, metavar="N", help="to try at most (200)")
    parser.add_argument("--min-gain", type=float, default=0.005, metavar="R", help="share of time to save (0.005)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow-unconfined", action="store_true", help="see `tkcc tier --help`")


def run(args: argparse.Namespace) -> int:
    from tkcc.agents.scripted import ScriptedProposer, ScriptError
    from tkcc.agents.search import OfflineProposer
    from tkcc.api.candidate import read_artifact
    from tkcc.worker import job
    from tkcc.worker.campaign import Budget, log_gain_of
    from tkcc.worker.files import DirectorySink
    from tkcc.worker.journal import Journal
    from tkcc.worker.local_tiers import tiers
    from tkcc.worker.table import Table
    from tkcc.worker.tiers import TierGoneError

    budget_s = _seconds(args.budget)
    if args.max_candidates < 1:
        raise CommandError("--max-candidates must be at least 1")
    if not 0 <= args.min_gain < 1:
        raise CommandError("--min-gain must be a share of the time: at least 0, below 1")
    _refuse_missing_model(args.model)
    recording, workload = _traffic(args)
    incumbent = None
    try:
        if args.incumbent:
            _, incumbent = read_artifact(args.incumbent)
    except (OSError, ValueError) as err:
        raise CommandError(f"--incumbent {args.incumbent}: {err}") from err
    budget = Budget(duration_s=budget_s, max_candidates=args.max_candidates, min_gain=log_gain_of(args.min_gain))
    work = job.Work(workload, recording, incumbent, budget, args.seed)
    try:
        proposer = ScriptedProposer(args.script) if args.script else OfflineProposer(args.seed)
        sink = DirectorySink(args.out)
    except ScriptError as err:
        raise CommandError(str(err)) from err
    except OSError as err:
        raise CommandError(f"--out {args.out}: {err.strerror}") from err

    def observe(journal: Journal) -> Table:
        return Table(budget_s, journal.started_at_s)

    with tempfile.TemporaryDirectory(prefix="tkcc-recompile-") as scratch:
        try:
            with tiers(_commands(args), Path(scratch)) as addresses:
                result = job.run(work, addresses, proposer, sink, observe, lambda text: print(text, flush=True))
        except (TierGoneError, ValueError) as err:
            raise CommandError(str(err)) from err
    _conclude(result, args.out)
    return 0


def _commands(args: argparse.Namespace) -> dict[str, list[str]]:
    common = [sys.executable, "-m", "tkcc", "tier", "--model", str(args.model), "--dtype", args.dtype]
    common += ["--threads", str(args.threads)] + (["--allow-unconfined"] if args.allow_unconfined else [])
    return {
        "fast": [*common, "--tier", "fast", "--layers", str(args.layers)],
        "slow": [*common, "--tier", "slow", "--layers", "all"],
    }


def _conclude(result: "Result", out: Path) -> None:
    from tkcc.worker.outcome import counts

    n = counts(result.tried)
    print(f"{result.outcome}: {result.message}")
    print(f"{n.evaluated} candidates evaluated, {n.accepted} accepted, {n.refused} refused; report: {out}/report.json")
    if result.winner is not None:
        print(f"artifact {result.winner.candidate.digest[:16]} in {out}: tkcc serve --model DIR --artifact {out}")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not match or not float(match[1]):
        raise CommandError(f"--budget {text}: a time such as 90s, 10m or 1h is expected")
    return float(match[1]) * _UNITS[match[2]]


def _traffic(args: argparse.Namespace) -> "tuple[Recording, Workload]":
    from tkcc.api.codec import from_json
    from tkcc.api.workload import Recording
    from tkcc.traffic import shape
    from tkcc.traffic.prompts import to_recording
    from tkcc.traffic.trace import TraceError, read
    from tkcc.traffic.workload import workload_of

    try:
        if args.trace.suffix == ".json":
            recording = from_json(Recording, args.trace.read_bytes())
        else:
            plan = shape.scale(read(args.trace), args.length_factor, args.time_factor)
            recording = to_recording(replace(plan, requests=plan.requests[: args.max_requests]), BLOCK_TOKENS)
            factors = f"lengths x {args.length_factor:g}, gaps x {args.time_factor:g}"
            print(f"{args.trace}: {len(recording.requests)} requests, {factors}", flush=True)
        return recording, workload_of(recording, PREFILL_TOKENS_PER_S, TPOT_S)
    except TraceError as err:
        raise CommandError(str(err)) from err
    except OSError as err:
        raise CommandError(f"--trace {args.trace}: {err.strerror}") from err
    except ValueError as err:
        raise CommandError(f"--trace {args.trace}: {err}") from err


def _refuse_missing_model(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise CommandError(f"--model {directory}: no config.json in it: not a Hugging Face model directory")
