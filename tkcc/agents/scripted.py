"""A proposer that reads its candidates from a directory: for tests of the loop, and for trying one's own code.

Files `NAME.py` in the order of their names; `NAME.json` beside one holds its parameters.
"""

import json
from pathlib import Path

from tkcc.agents.proposer import Context
from tkcc.api.candidate import Candidate
from tkcc.api.report import Report


class ScriptError(Exception):
    """The directory cannot be used as a script; the message says why."""


class ScriptedProposer:
    """See `tkcc.agents.proposer.Proposer`."""

    def __init__(self, directory: Path) -> None:
        """Raises ScriptError."""
        if not directory.is_dir():
            raise ScriptError(f"{directory}: no such directory")
        paths = sorted(directory.glob("*.py"))
        if not paths:
            raise ScriptError(f"{directory}: no *.py file in it")
        self._candidates = [_read(path) for path in paths]

    def propose(self, context: Context) -> Candidate | None:
        return self._candidates.pop(0) if self._candidates else None

    def observe(self, report: Report) -> None:
        """The script goes on whatever comes of it."""


def _read(path: Path) -> Candidate:
    params_path = path.with_suffix(".json")
    try:
        source = path.read_text()
        params = json.loads(params_path.read_text()) if params_path.exists() else {}
    except (OSError, ValueError) as err:
        raise ScriptError(f"{path}: {err}") from err
    if not isinstance(params, dict) or not all(isinstance(v, int | str | bool) for v in params.values()):
        raise ScriptError(f"{params_path}: an object of numbers, strings and booleans is expected")
    return Candidate(source, params, hypothesis=f"script {path.name}", operators=("script",))
