"""`tkcc tier`: one tier engine with its HTTP API."""

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path

from tkcc.cli.command import CommandError

COMMAND = "tier"
SUMMARY = "run a tier engine: builds, contains and measures candidate forward passes"
DESCRIPTION = """Loads the weights once and serves the tier API: candidates are built, run in contained processes,
judged and measured against the incumbent. Every call needs the bearer token in --token-file. TKCC_CPUS (such as 1 or
0-3) pins it to cores.

examples:
  tkcc tier --model DIR --tier slow --layers all --token-file token
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face model directory")
    parser.add_argument("--tier", choices=("fast", "slow"), required=True)
    parser.add_argument("--layers", default="all", metavar="N|all", help="the model's first layers (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=0, help="of a forward pass (default: all cores it may use)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="0: any free port, printed")
    parser.add_argument("--token-file", type=Path, required=True, help="holds the bearer token of this run")
    parser.add_argument("--cache-dir", type=Path, help="for builds (default: a temporary directory)")
    parser.add_argument("--build-s", type=float, default=180.0, metavar="S", help="a build's deadline (default 180)")
    parser.add_argument("--spares", type=int, default=1, help="warm runners ahead of need (default %(default)s)")
    parser.add_argument(
        "--allow-unconfined",
        action="store_true",
        help="run although this kernel cannot contain candidates: only for candidates that you trust",
    )


def run(args: argparse.Namespace) -> int:
    from tkcc.engine.host import pin_to_cpus
    from tkcc.engine.tier.config import TierConfig, TierLimits

    token = _read_token(args.token_file)
    try:
        layers = 0 if args.layers == "all" else int(args.layers)
    except ValueError:
        raise CommandError(f"--layers: a number or `all` is expected, not {args.layers!r}") from None
    if layers < 0 or args.threads < 0 or args.spares < 0:
        raise CommandError("--layers, --threads and --spares must not be negative")
    try:
        pin_to_cpus()
    except ValueError as err:
        raise CommandError(str(err)) from err
    with tempfile.TemporaryDirectory(prefix="tkcc-tier-") as scratch:
        config = TierConfig(
            model_dir=args.model,
            tier=args.tier,
            num_layers=layers,
            dtype=args.dtype,
            num_threads=args.threads or len(os.sched_getaffinity(0)),
            token=token,
            cache_dir=(args.cache_dir or Path(scratch)).absolute(),
            judge_entry="tkcc.verify.main:main",
            num_spares=args.spares,
            is_confined=not args.allow_unconfined,
            limits=TierLimits(build_s=args.build_s),
        )
        return asyncio.run(_serve(config, args.host, args.port))


async def _either(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as err:
        raise CommandError(f"--token-file {path}: {err.strerror}") from err
    if len(token) < 16:
        raise CommandError(f"--token-file {path}: a token of at least 16 characters is expected")
    return token


async def _serve(config: object, host: str, port: int) -> int:
    from aiohttp import web

    from tkcc.engine.tier.config import TierConfig
    from tkcc.engine.tier.records import TierError
    from tkcc.engine.tier.server import make_app
    from tkcc.engine.tier.supervisor import Supervisor

    assert isinstance(config, TierConfig)
    supervisor = Supervisor(config)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(make_app(supervisor), access_log=None)
    try:
        await supervisor.start()
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        address = runner.addresses[0]
        print(f"tkcc tier {config.tier}: http://{address[0]}:{address[1]}", flush=True)
        await _either(stop, supervisor.broken)
        if not stop.is_set():
            raise TierError(supervisor.failure)
        return 0
    except TierError as err:
        raise CommandError(str(err)) from err
    except OSError as err:
        raise CommandError(f"cannot listen on {host}:{port}: {err.strerror}") from err
    finally:
        await runner.cleanup()
        await supervisor.stop()
