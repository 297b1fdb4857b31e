"""The `tkcc` command: finds the commands in this package, parses, runs one. It decides nothing itself.

A new command is a new file beside this one (see tkcc.cli.command); nothing is registered here but the words that
group several commands.
"""

import argparse
import importlib
import pkgutil
import signal
import sys
import threading
from collections.abc import Sequence
from typing import cast

import tkcc
import tkcc.cli
from tkcc.cli.command import Command, CommandError

GROUPS = {
    "bench": "measure a part of tkcc, and write the figures as JSON",
    "model": "make model directories: import, or random ones",
    "traffic": "look into recorded traffic and replay it",
}

DESCRIPTION = """Keeps an LLM deployment's forward pass compiled for the traffic it has now.

Start here, on one machine and without a cluster:
  tkcc model import smollm2-135m-instruct     # prints the model's directory
  tkcc serve --model DIR                      # OpenAI-compatible, on port 8000
"""


def commands() -> dict[str, Command]:
    """Every module of this package that defines COMMAND, by its words, sorted."""
    found = {}
    for info in pkgutil.iter_modules(tkcc.cli.__path__):
        if info.name in ("main", "command"):
            continue
        module = importlib.import_module(f"tkcc.cli.{info.name}")
        if hasattr(module, "COMMAND"):
            found[module.COMMAND] = cast(Command, module)
    return dict(sorted(found.items()))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tkcc", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tkcc {tkcc.__version__}")
    top = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for words, command in commands().items():
        group, _, name = words.rpartition(" ")
        if group and group not in groups:
            summary = GROUPS[group]
            groups[group] = top.add_parser(group, help=summary, description=summary).add_subparsers(
                title="commands", metavar="COMMAND", required=True
            )
        sub = (groups[group] if group else top).add_parser(
            name,
            help=command.SUMMARY,
            description=getattr(command, "DESCRIPTION", command.SUMMARY),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        # Asked to end: clean up as after ^C. A command that does more (drain, say) puts its own handler in place.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(args.run(args))
    except CommandError as err:
        print(f"tkcc: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
