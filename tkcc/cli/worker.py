"""`tkcc worker`: the recompile Job of one RecompilationRun."""

import argparse
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tkcc.cli.command import CommandError

if TYPE_CHECKING:
    from tkcc.agents.proposer import Proposer
    from tkcc.api.workload import Recording, Workload

COMMAND = "worker"
SUMMARY = "the recompile Job of one RecompilationRun (started by the operator)"
DESCRIPTION = """Proposes candidates to the run's tier engines and writes verdicts and result to the run's result
ConfigMap and status. A pod that is killed is followed by one that goes on from the journal. Exit code 2: the input is
bad, and trying again gives the same.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="workload.json, run.json, recording")
    parser.add_argument("--token-file", type=Path, required=True, help="holds the bearer token of this run")
    parser.add_argument("--seed", type=int, default=0, help="of the offline proposer")


def run(args: argparse.Namespace) -> int:
    from tkcc.api.candidate import read_artifact
    from tkcc.api.codec import from_dict, from_json
    from tkcc.api.run import RunSpec
    from tkcc.api.workload import Workload
    from tkcc.kube.errors import ClusterError
    from tkcc.worker import job
    from tkcc.worker.campaign import Budget, log_gain_of
    from tkcc.worker.cluster_sink import Both, ClusterSink, RunName
    from tkcc.worker.table import Table
    from tkcc.worker.tiers import TierGoneError

    order = _read_json(args.run_dir / "run.json")
    try:
        spec = from_dict(RunSpec, order["spec"])
        workload = from_json(Workload, _read(args.run_dir / "workload.json"))
        token = _read(args.token_file).decode().strip()
        addresses = {name: job.TierAddress(order["tiers"][name], token) for name in ("fast", "slow")}
        name = RunName(order["namespace"], order["run"], f"{order['run']}-result")
    except KeyError as err:
        raise CommandError(f"run.json lacks {err}") from err
    except ValueError as err:
        raise CommandError(str(err)) from err
    incumbent, directory = None, order.get("incumbentDir", "")
    try:
        if directory:
            _, incumbent = read_artifact(Path(directory))
    except (OSError, ValueError) as err:
        raise CommandError(f"incumbent {directory}: {err}") from err
    proposer = _proposer(order, args.seed)
    duration_s = spec.budget.max_duration.total_seconds()
    budget = Budget(
        duration_s=duration_s,
        max_candidates=spec.budget.max_candidates,
        min_gain=log_gain_of(spec.acceptance.min_gain_milli / 1000),
    )
    work = job.Work(workload, _recording(args.run_dir, workload), incumbent, budget, args.seed)
    try:
        sink = ClusterSink(name)
    except ClusterError as err:
        raise CommandError(str(err)) from err
    try:
        result = job.run(
            work, addresses, proposer, sink,
            lambda journal: Both(sink, Table(duration_s, journal.started_at_s)),
            lambda text: print(text, flush=True),
        )  # fmt: skip
        sink.finish(result.tried, result.message)
    except TierGoneError as err:
        sink.write({"result.json": _tier_failed(str(err))})
        print(f"tkcc worker: {err}", flush=True)
        return 0
    except ValueError as err:
        raise CommandError(str(err)) from err
    finally:
        sink.close()
    print(f"{result.outcome}: {result.message}", flush=True)
    return 0


def _tier_failed(message: str) -> str:
    from tkcc.api.codec import to_json
    from tkcc.api.run import RunOutcome, RunResult

    return to_json(RunResult(RunOutcome.TIER_POD_FAILED, message))


def _proposer(order: dict[str, Any], seed: int) -> "Proposer":
    from tkcc.agents.scripted import ScriptedProposer, ScriptError
    from tkcc.agents.search import OfflineProposer

    directory = order.get("scriptDir", "")
    if not directory:
        return OfflineProposer(seed)
    try:
        return ScriptedProposer(Path(directory))
    except ScriptError as err:
        raise CommandError(str(err)) from err


def _recording(run_dir: Path, workload: "Workload") -> "Recording":
    """What was recorded; where nothing was, requests made up from the workload's quantiles."""
    from tkcc.api.codec import from_json
    from tkcc.api.workload import Recording
    from tkcc.worker.made_up import make_up

    path = run_dir / "recording.json.gz"
    if not path.exists():
        return make_up(workload)
    try:
        return from_json(Recording, gzip.decompress(_read(path)))
    except (ValueError, OSError, EOFError) as err:
        raise CommandError(f"{path}: {err}") from err


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except ValueError as err:
        raise CommandError(f"{path}: not JSON: {err}") from err
    if not isinstance(found, dict):
        raise CommandError(f"{path}: an object is expected")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise CommandError(f"{path}: {err.strerror}") from err
