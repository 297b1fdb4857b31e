"""`tkcc judge`: the judge's process of a tier; `tkcc tier` starts it."""

import argparse

COMMAND = "judge"
SUMMARY = "the judge's process of a tier engine (started by `tkcc tier`)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--channel-fd", type=int, required=True, help="the channel to the supervisor")


def run(args: argparse.Namespace) -> int:
    from tkcc.verify import main

    return main.main(args.channel_fd)
