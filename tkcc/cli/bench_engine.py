"""`tkcc bench engine`: the baseline forward pass beside transformers', interleaved in one process on one machine.

Each round runs every implementation once, in random order, so that a neighbour's load falls on all of them alike; a
row's ratio is the median over rounds of (transformers / tkcc), with a bootstrap interval, by CPU time on one thread and
by wall time elsewhere. transformers runs with the faster of its "sdpa" and "eager" attention, the KV cache on, and
logits of the last token only.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tkcc.cli.command import CommandError
from tkcc.cli.model_init import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

COMMAND = "bench engine"
SUMMARY = "time the baseline forward pass against transformers, prefill and decode"
DESCRIPTION = """Rows: prefill of 128, 512 and 1024 tokens; decode steps of batch 1 and 8 at a context of 512.
Both sides run in this process, interleaved, with the same threads and the same settings of malloc as `tkcc serve`.
Needs transformers (pip install 'tkcc[dev]').

examples:
  tkcc bench engine
  tkcc bench engine --model DIR --dtype float32 --rounds 7 --json bench.json
"""

# (phase, batch, new tokens per request, context before the step)
ROWS = (
    ("prefill", 1, 128, 0),
    ("prefill", 1, 512, 0),
    ("prefill", 1, 1024, 0),
    ("decode", 1, 1, 512),
    ("decode", 8, 1, 512),
)
OURS = "tkcc"
BLOCK_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="(default: SmolLM2-135M-Instruct, imported)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch's CPU threads (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="runs of each implementation per row (default %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    import torch

    from tkcc.engine.host import keep_freed_memory, use_one_arena
    from tkcc.models.catalogue import import_model
    from tkcc.models.checkpoint import CheckpointError

    if args.rounds < 3:
        raise CommandError("--rounds must be at least 3")
    use_one_arena()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    # Where others use the cores too, wall time tells who was disturbed, CPU time who works less.
    clock = "cpu" if args.device == "cpu" and args.threads == 1 else "wall"
    rows = []
    try:
        args.model = args.model or import_model("smollm2-135m-instruct")
        with torch.inference_mode():
            for phase, batch, new_tokens, context in ROWS:
                runners, difference = _runners(args, phase, batch, new_tokens, context, rng)
                seconds = _measure(runners, args.rounds, rng)
                rows.append(_row(phase, batch, new_tokens, context, seconds, clock, difference, rng))
                print(_line(rows[-1]), flush=True)
    except CheckpointError as err:
        raise CommandError(str(err)) from err
    except ModuleNotFoundError as err:
        raise CommandError(f"{err.name} is not installed: pip install 'tkcc[dev]'") from err
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**_environment(args), "metrics": {"rows": rows}}, indent=2) + "\n")
    slower = [row for row in rows if row["ratio_high"] < 1.0]
    print(f"{len(slower)} of {len(rows)} rows slower than transformers (the whole interval below 1)")
    return 1 if slower else 0


def _runners(
    args: argparse.Namespace, phase: str, batch: int, new_tokens: int, context: int, rng: random.Random
) -> tuple[dict[str, Callable[[], object]], float]:
    """One call per implementation that runs the row's step, and the largest difference between their logits."""
    import torch

    from tkcc.models.checkpoint import load_config

    vocab = load_config(args.model).vocab_size
    tokens = torch.tensor([[rng.randrange(vocab) for _ in range(context + new_tokens)] for _ in range(batch)])
    ours = _our_step(args, phase, tokens, context, rng)
    theirs = {f"transformers {kind}": _their_step(args, kind, tokens, context) for kind in ("sdpa", "eager")}
    mine_bv = ours().float()
    difference = max(float((step().float() - mine_bv).abs().max()) for step in theirs.values())
    return {OURS: ours, **theirs}, difference


def _our_step(
    args: argparse.Namespace, phase: str, tokens: "Tensor", context: int, rng: random.Random
) -> Callable[[], "Tensor"]:
    """A step of the baseline, from host integers to logits [B, V]."""
    import torch

    from tkcc.engine.step import StepBatch, StepKind, StepRequest
    from tkcc.engine.tensors import make_batch, make_kv_cache
    from tkcc.models.checkpoint import load_config, load_weights
    from tkcc.models.forward import BuildSpec
    from tkcc.models.llama import build

    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    batch, length = tokens.shape
    num_pages = -(-length // BLOCK_TOKENS)
    spec = BuildSpec(load_config(args.model), dtype, device, BLOCK_TOKENS, 1 + batch * num_pages, args.threads)
    blocks = rng.sample(range(1, spec.num_blocks), batch * num_pages)  # pages in no order, as after hours of serving
    pages = [tuple(blocks[b * num_pages : (b + 1) * num_pages]) for b in range(batch)]
    kv, forward = make_kv_cache(spec), build(spec, load_weights(args.model, device, dtype), ())
    forward.prepare(kv)

    def step(kind: StepKind, start: int, end: int) -> torch.Tensor:
        requests = tuple(StepRequest(tuple(tokens[b, start:end].tolist()), start, pages[b]) for b in range(batch))
        made = make_batch(StepBatch(kind, requests), BLOCK_TOKENS, device)
        return forward.prefill(made, kv) if kind is StepKind.PREFILL else forward.decode(made, kv)

    if context:
        step(StepKind.PREFILL, 0, context)
    return lambda: step(StepKind(phase), context, length)


def _their_step(args: argparse.Namespace, attention: str, tokens: "Tensor", context: int) -> Callable[[], "Tensor"]:
    """The same step by transformers: its own KV cache, logits of the last token only."""
    import torch
    import transformers

    model = _their_model(args.model, args.dtype, attention, args.device)
    tokens = tokens.to(args.device)

    def forward(cache: Any, start: int) -> torch.Tensor:
        logits: torch.Tensor = model(tokens[:, start:], cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    cache = transformers.DynamicCache(config=model.config)
    if context:
        model(tokens[:, :context], cache=cache, use_cache=True, logits_to_keep=1)

    def step() -> torch.Tensor:
        if not context:
            return forward(transformers.DynamicCache(config=model.config), 0)
        logits = forward(cache, context)
        cache.crop(context - cache.get_seq_length())  # back to where it was: each step sees the same context
        return logits

    return step


@cache
def _their_model(path: Path, dtype: str, attention: str, device: str) -> Any:
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention).to(device)


def _measure(
    runners: dict[str, Callable[[], object]], rounds: int, rng: random.Random
) -> dict[str, list[tuple[float, float]]]:
    """(Wall, CPU) seconds of each run, by implementation; index = round. Busy neighbours move CPU time little."""
    import torch

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for index in range(rounds + 1):
        for name in rng.sample(sorted(runners), len(runners)):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            runners[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if index:  # the first round warms up
                seconds[name].append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    return seconds


def _row(
    phase: str,
    batch: int,
    new_tokens: int,
    context: int,
    seconds: dict[str, list[tuple[float, float]]],
    clock: str,
    difference: float,
    rng: random.Random,
) -> dict[str, Any]:
    """A row of the result. `clock` ("wall" or "cpu") is the one that the ratio and the best of transformers go by."""
    column = {"wall": 0, "cpu": 1}
    medians_s = {
        kind: {name: statistics.median(pair[i] for pair in pairs) for name, pairs in seconds.items()}
        for kind, i in column.items()
    }
    best = min((name for name in seconds if name != OURS), key=medians_s[clock].__getitem__)
    theirs_s, ours_s = ([pair[column[clock]] for pair in seconds[name]] for name in (best, OURS))
    ratio, low, high = _ratio(theirs_s, ours_s, rng)
    return {
        "phase": phase,
        "batch": batch,
        "new_tokens": new_tokens,
        "context_tokens": context + new_tokens,
        "wall_ms_median": {name: round(1e3 * value, 3) for name, value in medians_s["wall"].items()},
        "cpu_ms_median": {name: round(1e3 * value, 3) for name, value in medians_s["cpu"].items()},
        "clock": clock,
        "best_transformers": best,
        "ratio": ratio,  # best transformers / tkcc: above 1, tkcc is faster
        "ratio_low": low,  # 95 % interval
        "ratio_high": high,
        "logit_difference_max": round(difference, 5),
    }


def _ratio(theirs: list[float], ours: list[float], rng: random.Random) -> tuple[float, float, float]:
    """Median over rounds of theirs / ours, and its 95 % bootstrap interval."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    draws = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return round(statistics.median(ratios), 4), round(draws[25], 4), round(draws[975], 4)


def _line(row: dict[str, Any]) -> str:
    clock = row["clock"]
    times = ", ".join(f"{name} {value:.1f}" for name, value in row[f"{clock}_ms_median"].items())
    return (
        f"{row['phase']:8} batch {row['batch']} x {row['new_tokens']:4} tokens, context {row['context_tokens']:4}:"
        f" {clock} ms {times}; {row['ratio']:.3f} x [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
    )


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from tkcc.engine.host import device_name

    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "environment": {
            "device": device_name(torch.device(args.device)),
            "threads": args.threads,
            "dtype": args.dtype,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "command": "tkcc " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(),
    }
