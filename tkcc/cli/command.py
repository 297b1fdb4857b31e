"""What a file in tkcc/cli must define to be a command, and the error that ends one with exit code 2.

A command's module imports only the standard library and tkcc.api at its top: `tkcc --help` imports all of them, and
torch takes seconds. The rest is imported inside `run`.

    COMMAND = "model init"          # the words after `tkcc`
    SUMMARY = "write a small ..."   # one line for `tkcc --help`
    DESCRIPTION = '''...'''         # optional: what it does, in a paragraph, then "examples:"
    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...  # the exit code
"""

import argparse
from typing import Protocol


class CommandError(Exception):
    """A refusal that the user can act on: printed as one line, no traceback, exit code 2."""


class Command(Protocol):
    """A module of tkcc.cli, by its contents."""

    COMMAND: str
    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...
