"""How many processes and threads a candidate may have: a pids cgroup, where one can be made.

Root, who is exempt from RLIMIT_NPROC, can make one; for everybody else there is the rlimit (see `sandbox`).
"""

import contextlib
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")


class PidLimit:
    """A cgroup that holds one candidate's process and all that it starts. Nothing, where none can be made."""

    def __init__(self, name: str, most: int) -> None:
        self._path: Path | None = None
        for parent in _own_cgroups():
            path = parent / name
            try:
                path.mkdir()
                (path / "pids.max").write_text(str(most))
            except OSError:
                with contextlib.suppress(OSError):
                    path.rmdir()
                continue
            self._path = path
            return

    def hold(self, pid: int) -> None:
        """From now on it, and what it starts, counts."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # it has ended already
                (self._path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Once all of them have ended."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.rmdir()


def _own_cgroups() -> list[Path]:
    """This process's cgroups that can limit pids: version 1's, then version 2's."""
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "pids" in controllers.split(","):
            found.insert(0, _V1 / path.strip("/"))
        elif not controllers and (_V2 / "cgroup.controllers").exists():
            found.append(_V2 / path.strip("/"))
    return found
