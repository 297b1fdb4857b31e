"""`tkcc traffic info`: what a trace file holds."""

import argparse
import json
from pathlib import Path

from tkcc.cli.command import CommandError

COMMAND = "traffic info"
SUMMARY = "say what a trace holds: lengths, rate, sessions, prefix reuse"
DESCRIPTION = """Reads a trace of requests (.jsonl, .jsonl.gz with the keys of the Mooncake traces, or .parquet) and
prints its lengths, its rate and how much a prefix cache could save. Hit ratios are weighted by tokens.

examples:
  tkcc traffic info examples/traces/chat.jsonl.gz
  tkcc traffic info conversation_trace.jsonl --block-tokens 512 --lru-tokens 1000000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens of a prefix block, if the file does not say"
    )
    parser.add_argument("--lru-tokens", type=int, metavar="N", help="also the hit ratio of an LRU cache of N tokens")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(args: argparse.Namespace) -> int:
    from tkcc.traffic import reuse, trace

    try:
        loaded = trace.read(args.file, args.block_tokens)
    except trace.TraceError as err:
        raise CommandError(str(err)) from err
    num_requests = len(loaded.requests)
    facts: dict[str, object] = {
        "requests": num_requests,
        "span_s": round(loaded.span_s, 3),
        "requests_per_s": round(num_requests / loaded.span_s, 4) if loaded.span_s > 0 else None,
        "prompt_tokens": _spread([request.prompt_tokens for request in loaded.requests]),
        "output_tokens": _spread([request.output_tokens for request in loaded.requests]),
        "sessions": len(set(reuse.sessions(loaded.requests))),
        "block_tokens": loaded.block_tokens,
    }
    if loaded.block_tokens:
        facts["infinite_cache_hit_ratio"] = round(reuse.infinite_hit_ratio(loaded), 4)
        if args.lru_tokens is not None:
            facts["lru_hit_ratio"] = round(reuse.lru_hit_ratio(loaded, args.lru_tokens), 4)
    facts |= loaded.about
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            shown = "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{name.replace('_', ' '):26s} {shown}")
    return 0


def _spread(values: list[int]) -> dict[str, int]:
    ordered = sorted(values)
    at = {f"p{pct}": ordered[min(len(ordered) - 1, len(ordered) * pct // 100)] for pct in (50, 90, 99)}
    return {"mean": round(sum(values) / len(values)), **at, "max": ordered[-1]}
