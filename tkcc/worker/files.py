"""A campaign's journal and result in a directory."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


class DirectorySink:
    """See `tkcc.worker.job.Sink`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._journal = directory / "journal.jsonl"

    def read_journal(self) -> Iterable[str]:
        """Whole lines; one that a kill has cut is taken off, or the next would be glued to it."""
        if not self._journal.exists():
            return []
        text = self._journal.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._journal.write_text(whole)
        return whole.splitlines()

    def append_journal(self, line: str) -> None:
        with self._journal.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            scratch = self.directory / f".{name}.new"
            scratch.write_text(text)
            os.replace(scratch, self.directory / name)
