"""`tkcc model import`: a GGUF file, or a model known by name, becomes a Hugging Face model directory."""

import argparse
import sys
from pathlib import Path

from tkcc.cli.command import CommandError
from tkcc.cli.model_init import DTYPES

COMMAND = "model import"
SUMMARY = "make a model directory from a GGUF file, or fetch a model known by name"
DESCRIPTION = """Dequantises the weights, rebuilds the tokenizer and writes a directory that `tkcc serve` and
transformers read. Prints the directory. A model known by name is cached under ~/.cache/tkcc/models and made only once.

examples:
  tkcc model import smollm2-135m-instruct
  tkcc model import ./some-llama.Q4_K_M.gguf --out ./some-llama
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="NAME|FILE", help="smollm2-135m-instruct, or the path of a .gguf file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the directory to write (needed for a FILE)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the weights written (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from tkcc.models.catalogue import CATALOGUE, import_model
    from tkcc.models.checkpoint import CheckpointError
    from tkcc.models.gguf_import import import_gguf

    dtype: torch.dtype = getattr(torch, args.dtype)
    try:
        if args.source in CATALOGUE:
            print(import_model(args.source, args.out, dtype, say=lambda text: print(text, file=sys.stderr)))
            return 0
        path = Path(args.source)
        if not path.is_file():
            raise CommandError(f"{path}: no such file, and no model known by that name ({', '.join(CATALOGUE)})")
        if args.out is None:
            raise CommandError("--out DIR is needed to import a file")
        if args.out.exists() and any(args.out.iterdir()):
            raise CommandError(f"{args.out} exists and is not empty")
        import_gguf(path, args.out, dtype)
        print(args.out)
    except CheckpointError as err:
        raise CommandError(str(err)) from err
    return 0
