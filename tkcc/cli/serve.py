"""`tkcc serve`: one serving engine with an OpenAI-compatible API."""

import argparse
import os
from pathlib import Path

from tkcc.cli.command import CommandError
from tkcc.cli.model_init import DTYPES

COMMAND = "serve"
SUMMARY = "serve a model with an OpenAI-compatible API"
DESCRIPTION = """Serves /v1/completions and /v1/chat/completions (streaming too), /v1/models, /health and /metrics on
--port, and what the operator reads on --admin-port. Without --artifact it runs the built-in forward pass.

examples:
  tkcc serve --model "$(tkcc model import smollm2-135m-instruct)"
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"model": "NAME", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'
  TKCC_CPUS=0 tkcc serve --model DIR --artifact ./artifact --threads 1 --record 500

NAME is the model directory's name, unless --served-model-name gives another. TKCC_CPUS (a list like 0 or 1-3)
pins the process to cores. At temperature 0 equal batches give equal tokens; in another batch a sum may be made in
another order, and a near tie between two tokens may fall the other way.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("what to serve")
    model.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face model directory")
    model.add_argument(
        "--wait-for-model",
        action="store_true",
        help="stay, say why on the admin port, and try again while the model cannot be loaded (default: exit)",
    )
    model.add_argument("--artifact", type=Path, metavar="DIR", help="manifest.json and candidate.py of a forward pass")
    model.add_argument("--served-model-name", metavar="NAME", help="(default: the directory's name)")
    model.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: the artifact's, or the model's own"
    )
    model.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default %(default)s)")
    model.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads of the forward pass (default: all cores it may use)"
    )

    network = parser.add_argument_group("where")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    network.add_argument("--port", type=int, default=8000, help="public API (default %(default)s; 0: any free one)")
    network.add_argument("--admin-port", type=int, default=8001, help="for the operator (default %(default)s)")

    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-context", type=int, metavar="TOKENS", help="of prompt and answer (default: what fits)")
    limits.add_argument(
        "--kv-cache-mib", type=int, metavar="MIB", help="(default 1024 on a CPU, else 85 %% of what is free)"
    )
    limits.add_argument("--block-tokens", type=int, default=16, help="tokens in a KV block (default %(default)s)")
    limits.add_argument("--max-batch", type=int, default=16, help="requests in one decode step (default %(default)s)")
    limits.add_argument(
        "--chunk-tokens", type=int, default=512, help="tokens in one prefill step (default %(default)s)"
    )
    limits.add_argument("--max-queue", type=int, default=128, help="waiting requests before 429 (default %(default)s)")
    limits.add_argument("--max-body-mib", type=int, default=16, help="of one request's body (default %(default)s)")
    limits.add_argument("--request-timeout-s", type=float, default=600, help="of one request (default %(default)s)")
    limits.add_argument(
        "--step-timeout-s", type=float, default=300, help="then the process gives up (default %(default)s)"
    )
    limits.add_argument("--drain-accept-s", type=float, default=5, help="accept after SIGTERM (default %(default)s)")
    limits.add_argument("--drain-finish-s", type=float, default=60, help="then finish what runs (default %(default)s)")

    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--record", type=int, default=0, metavar="N", help="keep N requests for replay, without text (default: none)"
    )


def run(args: argparse.Namespace) -> int:
    for name in (
        "threads",
        "max_context",
        "kv_cache_mib",
        "block_tokens",
        "max_batch",
        "chunk_tokens",
        "max_queue",
        "max_body_mib",
    ):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in ("request_timeout_s", "step_timeout_s", "drain_accept_s", "drain_finish_s", "record"):
        if not getattr(args, name) >= 0:
            raise CommandError(f"--{name.replace('_', '-')} must not be negative")
    if not args.model.is_dir() and not args.wait_for_model:
        raise CommandError(f"--model {args.model}: no such directory")
    if args.artifact is not None and not args.artifact.is_dir():
        raise CommandError(f"--artifact {args.artifact}: no such directory")

    from tkcc.engine.host import pin_to_cpus, set_threads, use_one_arena
    from tkcc.engine.serve.cold_start import ColdStart

    try:
        pin_to_cpus()  # before torch counts the cores
    except ValueError as err:
        raise CommandError(str(err)) from err
    use_one_arena()
    cold_start = ColdStart()

    from tkcc.engine.serve.engine import Limits
    from tkcc.engine.serve.options import ServeOptions
    from tkcc.engine.serve.server import serve

    set_threads(args.threads or len(os.sched_getaffinity(0)))
    cold_start.mark("import")
    options = ServeOptions(
        model=args.model,
        artifact=args.artifact,
        served_model_name=args.served_model_name,
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        device=args.device,
        dtype=args.dtype,
        block_tokens=args.block_tokens,
        kv_cache_mib=args.kv_cache_mib,
        max_context=args.max_context,
        max_running=args.max_batch,
        chunk_tokens=args.chunk_tokens,
        limits=Limits(max_waiting=args.max_queue, step_timeout_s=args.step_timeout_s),
        request_timeout_s=args.request_timeout_s,
        max_body_bytes=args.max_body_mib << 20,
        record=args.record,
        drain_accept_s=args.drain_accept_s,
        drain_finish_s=args.drain_finish_s,
        wait_for_model=args.wait_for_model,
    )
    return serve(options, cold_start)
