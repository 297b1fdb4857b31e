"""`tkcc traffic replay`: send a trace to an OpenAI-compatible server."""

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tkcc.cli.command import CommandError

if TYPE_CHECKING:
    from tkcc.traffic.replay import Result, Target
    from tkcc.traffic.shape import Plan

COMMAND = "traffic replay"
SUMMARY = "send a trace's requests to a server, scaled in length and time"
DESCRIPTION = """Sends the requests of a trace to an OpenAI-compatible server, each when it is due and on a connection
of its own. One factor scales all lengths, one all gaps; both are printed. Prompts are token ids made from the trace's
prefix blocks, so the server's prefix cache is hit as the recorded one was. Ctrl-C stops sending, waits for what is in
flight and prints the summary; a second Ctrl-C drops it. Exit code 1 if any request failed.

examples:
  tkcc traffic replay examples/traces/chat.jsonl.gz --url http://127.0.0.1:8000 --length-factor 0.125 --time-factor 1
  tkcc traffic replay big.parquet --block-tokens 512 --url http://infer --sessions-fraction 0.1 --out results.jsonl
"""
_PROGRESS_EVERY_S = 10.0  # without a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--url", required=True, metavar="URL", help="base address of the server, without /v1")
    parser.add_argument("--length-factor", type=float, default=1.0, metavar="F", help="for all lengths (default 1)")
    parser.add_argument("--time-factor", type=float, default=1.0, metavar="F", help="for all gaps; 2 is half as fast")
    parser.add_argument("--max-prompt", type=int, metavar="N", help="leave out prompts longer than N tokens as sent")
    parser.add_argument(
        "--sessions-fraction", type=float, default=1.0, metavar="F", help="keep this share of the sessions"
    )
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens of a prefix block, if the file does not say"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the only one that the server offers")
    parser.add_argument("--vocab", default="1000:48000", metavar="A:B", help="token ids to use (default %(default)s)")
    parser.add_argument("--duration-s", type=float, metavar="S", help="stop sending after S seconds")
    parser.add_argument(
        "--repeat", action="store_true", help="start over at the end, with fresh prefixes; needs --duration-s"
    )
    parser.add_argument("--max-concurrency", type=int, default=64, metavar="N", help="requests in flight (default 64)")
    parser.add_argument("--request-timeout-s", type=float, default=120.0, metavar="S", help="default 120")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write one JSON line per request; - is stdout")


def run(args: argparse.Namespace) -> int:
    from tkcc.traffic import replay, shape
    from tkcc.traffic.prompts import VocabRange
    from tkcc.traffic.trace import TraceError, read

    if args.repeat and args.duration_s is None:
        raise CommandError("--repeat needs --duration-s, or it would never end")
    if args.max_concurrency < 1 or args.request_timeout_s <= 0:
        raise CommandError("--max-concurrency and --request-timeout-s must be positive")
    try:
        first, _, last = args.vocab.partition(":")
        vocab = VocabRange(int(first), int(last))
        trace = shape.thin(read(args.file, args.block_tokens), args.sessions_fraction)
        plan = shape.scale(trace, args.length_factor, args.time_factor, args.max_prompt)
    except TraceError as err:
        raise CommandError(str(err)) from err
    except ValueError as err:
        raise CommandError(f"--vocab {args.vocab}: expected two token ids such as 1000:48000") from err
    model = args.model or _only_model(args.url)
    _describe(plan)
    target = replay.Target(args.url, model, vocab, args.max_concurrency, args.request_timeout_s)
    try:
        with _open(args.out) as out:
            return asyncio.run(_replay(plan, target, args.duration_s, args.repeat, out))
    except OSError as err:
        raise CommandError(f"--out {args.out}: {err.strerror}") from err


def _open(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None or str(path) == "-":
        return nullcontext(sys.stdout if path else None)
    return path.open("w", encoding="utf-8")


def _only_model(url: str) -> str:
    import httpx

    from tkcc.traffic.replay import list_models

    try:
        models = asyncio.run(list_models(url))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as err:
        raise CommandError(f"{url} does not answer as an OpenAI-compatible server: {err}") from err
    if len(models) != 1:
        raise CommandError(f"{url} offers {len(models)} models ({', '.join(models)}): choose one with --model")
    return models[0]


def _describe(plan: "Plan") -> None:
    from tkcc.traffic.shape import HIT_RATIO_TOLERANCE

    print(
        f"length factor {plan.length_factor:g}, time factor {plan.time_factor:g}: {len(plan.requests)} requests over "
        f"{plan.span_s:.0f} s, mean prompt {plan.mean_prompt_tokens:.0f}, output {plan.mean_output_tokens:.0f} tokens, "
        f"infinite-cache hit ratio {plan.hit_ratio:.3f} (the trace's: {plan.source_hit_ratio:.3f})"
    )
    if abs(plan.hit_ratio - plan.source_hit_ratio) > HIT_RATIO_TOLERANCE:
        print(f"note: leaving out long prompts moved the hit ratio by more than {HIT_RATIO_TOLERANCE}", file=sys.stderr)


async def _replay(plan: "Plan", target: "Target", duration_s: float | None, again: bool, out: TextIO | None) -> int:
    from tkcc.traffic.replay import replay
    from tkcc.traffic.shape import repeat

    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    results: list[Result] = []
    show = _progress(None if again else len(plan.requests))

    def interrupt() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    def note(result: "Result") -> None:
        results.append(result)
        if out is not None:
            print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)
        show(results)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    requests = (request for one in repeat(plan) for request in one.requests) if again else iter(plan.requests)
    dropped = False
    try:
        await replay(requests, target, note, duration_s=duration_s, stop=stop)
    except asyncio.CancelledError:
        dropped = True
    _summarise(results, dropped)
    if stop.is_set():
        return 130
    return 1 if any(not result.is_ok for result in results) else 0


def _progress(num_planned: int | None) -> "Callable[[list[Result]], None]":
    started_s = time.monotonic()
    shown_s = started_s

    def show(results: "list[Result]") -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        is_terminal = sys.stderr.isatty()
        if now_s - shown_s < (0.2 if is_terminal else _PROGRESS_EVERY_S):
            return
        shown_s = now_s
        failed = sum(not result.is_ok for result in results)
        done = f"{len(results)}/{num_planned}" if num_planned else f"{len(results)}"
        line = f"{now_s - started_s:5.0f} s  {done} requests, {failed} failed"
        print(f"\r\033[K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)

    return show


def _summarise(results: "list[Result]", dropped: bool) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    failed = [result for result in results if not result.is_ok]
    ttft = sorted(result.ttft_s for result in results if result.is_ok and result.ttft_s is not None)
    tpot = sorted(result.tpot_s for result in results if result.is_ok and result.tpot_s is not None)
    told = [result for result in results if result.cached_tokens is not None]
    print(f"{len(results)} requests ended, {len(failed)} failed" + (", the rest was dropped" if dropped else ""))
    for name, values in (("TTFT", ttft), ("TPOT", tpot)):
        if values:
            p50, p99 = (values[min(len(values) - 1, len(values) * pct // 100)] for pct in (50, 99))
            print(f"{name} p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    if told:
        tokens = sum(result.prompt_tokens for result in told)
        print(f"prefix-cache hit ratio as the server reports it {sum(r.cached_tokens or 0 for r in told) / tokens:.3f}")
    late_s = max((result.late_s for result in results), default=0.0)
    if late_s > 1:
        print(f"sent up to {late_s:.1f} s late: the server is slower than the trace; raise --time-factor")
    for error in list(dict.fromkeys(result.error for result in failed))[:5]:
        print(f"failed: {error}")
