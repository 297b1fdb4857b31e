"""`tkcc bench decode`: the decode step of a model against the device's read ceiling and PyTorch baselines, one run.

What is measured, and how, is tkcc.kernels.bench_decode; this is its command line.
"""

import argparse
import sys
from pathlib import Path

from tkcc.cli.command import CommandError

COMMAND = "bench decode"
SUMMARY = "time the persistent decode step against the read ceiling and PyTorch, on one GPU"
DESCRIPTION = """Every candidate decodes the same random bf16 model, batch 1, greedily: 16 dependent steps a run,
embedding and argmax included, the position moving on the device. A row is the median of the runs, per step (prefill:
per prompt).

candidates:
  read_ceiling          one token's weights and keys and values streamed through the multiprocessors, nothing computed
  tkcc                  the persistent kernel, 16 steps a launch
  tkcc_launch_per_step  the same kernel, one step a launch
  cuda_graph            plain PyTorch in a CUDA graph
  compile               plain PyTorch under torch.compile(mode="reduce-overhead")
  static_cache          fused projections, layers compiled, attention over a static cache, in a CUDA graph
  sdpa_compiled         prefill only: compiled layers, causal SDPA and cuBLAS, in a CUDA graph

Needs an NVIDIA GPU of compute capability 9.0, and minutes for the baselines to compile; `--skip` leaves them out.

examples:
  tkcc bench decode --model llama-3.2-1b --contexts 16,512,2048,8192,32768 --json decode.json
  tkcc bench decode --contexts 2048 --prefill "" --skip cuda_graph,compile,static_cache
"""
BASELINES = ("cuda_graph", "compile", "static_cache")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers with commas between") from None
    if any(n < 1 for n in lengths):
        raise argparse.ArgumentTypeError("lengths must be at least 1")
    return lengths


def _baselines(text: str) -> set[str]:
    names = {part for part in text.split(",") if part}
    if unknown := names - set(BASELINES):
        raise argparse.ArgumentTypeError(f"no baseline {', '.join(sorted(unknown))}; there are {', '.join(BASELINES)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.2-1b", metavar="SHAPE", help="(default %(default)s)")
    parser.add_argument(
        "--contexts",
        type=_lengths,
        default="16,512,2048,8192,32768",
        metavar="N,N,...",
        help="positions in the cache before the first step (default %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=_lengths,
        default="512,2048,8192",
        metavar="N,N,...",
        help='tokens of the prompts to prefill; "" for none (default %(default)s)',
    )
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each row (default %(default)s)")
    parser.add_argument(
        "--skip",
        type=_baselines,
        default="",
        metavar="NAME,...",
        help=f"baselines to leave out: {', '.join(BASELINES)}",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--commit", help="what to record as the commit (default: that of the checkout)")


def run(args: argparse.Namespace) -> int:
    import torch

    from tkcc.kernels.bench_decode import bench
    from tkcc.kernels.decode_shape import SHAPES

    if args.model not in SHAPES:
        raise CommandError(f"no shape {args.model!r}; there are {', '.join(SHAPES)}")
    if args.runs < 3 or not args.contexts:
        raise CommandError("at least three runs and one context are needed")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise CommandError("the persistent decode step needs an NVIDIA GPU of compute capability 9.0")
    bench(
        args.model,
        args.contexts,
        args.prefill,
        args.runs,
        args.skip,
        command="tkcc " + " ".join(sys.argv[1:]),
        commit=args.commit,
        json_path=args.json,
    )
    return 0
