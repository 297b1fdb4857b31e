"""What goes wrong with a local cluster, said so that a reader can act: step, reason and the log that explains it."""

from pathlib import Path

TAIL_LINES = 25


class ClusterError(RuntimeError):
    """A step of building or running the local cluster failed; the message says which, why and what to look at."""


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log, indented, or a note that there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 64 * 1024))
            text = log.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return f"    (no log: {error})"
    return "\n".join(f"    {line[:400]}" for line in text) or "    (the log is empty)"


def with_tail(message: str, log: Path) -> ClusterError:
    """`message`, followed by where the log is and how it ends."""
    return ClusterError(f"{message}\n  last lines of {log}:\n{tail(log)}")
