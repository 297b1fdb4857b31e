"""`tkcc model init`: a small random model, for tests and trials."""

import argparse
from pathlib import Path

from tkcc.cli.command import CommandError

COMMAND = "model init"
SUMMARY = "write a small random model, for tests and trials"
DESCRIPTION = """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json with random weights
of the given sizes. The same seed gives the same model.

examples:
  tkcc model init --out /tmp/tiny
  tkcc model init --out /tmp/odd --layers 3 --hidden 120 --heads 5 --kv-heads 1 --head-dim 24 --intermediate 77
"""
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, help="default: hidden / heads")
    parser.add_argument("--intermediate", type=int, default=176)
    parser.add_argument("--vocab", type=int, default=512, help="at least 259: 256 bytes and 3 special tokens")
    parser.add_argument("--max-positions", type=int, default=2048)
    parser.add_argument("--untied", action="store_true", help="an output head of its own")
    parser.add_argument("--qk-norm", action="store_true", help="a Qwen3 instead of a Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    sizes = ("layers", "hidden", "heads", "kv_heads", "intermediate", "max_positions")
    for name in sizes:
        if getattr(args, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1")
    if args.vocab < 259:
        raise CommandError("--vocab must be at least 259: 256 bytes and 3 special tokens")
    if args.out.exists() and any(args.out.iterdir()):
        raise CommandError(f"{args.out} exists and is not empty")

    import torch

    from tkcc.models.checkpoint import CheckpointError
    from tkcc.models.random_model import Shape, write_random_model

    shape = Shape(
        **{name: getattr(args, name) for name in sizes},
        head_dim=args.head_dim,
        vocab=args.vocab,
        tied=not args.untied,
        qk_norm=args.qk_norm,
    )
    try:
        write_random_model(args.out, shape, args.seed, getattr(torch, args.dtype))
    except CheckpointError as err:
        raise CommandError(str(err)) from err
    print(args.out)
    return 0
