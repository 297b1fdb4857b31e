"""Traffic to one deployment, from inside the cluster's network: what is sent can be changed at any time, what came of
it is on the record."""

import json
import secrets
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from e2e.cluster.cluster import Cluster
from e2e.stories.client import Answered, Mix

REPOSITORY = Path(__file__).parents[2]
STOP_S = 90.0


class Traffic:
    """Ends with this process: its standard input does."""

    def __init__(self, cluster: Cluster, url: str, model: str, out: Path) -> None:
        self._out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
        self.seed = secrets.randbits(31)  # nobody can have written these lengths down before
        argv = [sys.executable, "-m", "e2e.stories.client", "--url", url, "--model", model]
        argv += ["--seed", str(self.seed), "--out", str(out)]
        self._process = subprocess.Popen(
            cluster.inside(argv), cwd=REPOSITORY, stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def send(self, mix: Mix) -> None:
        """From now on requests are like this."""
        assert self._process.stdin
        print(json.dumps(asdict(mix)), file=self._process.stdin, flush=True)

    def answered(self, *, since_s: float = 0.0) -> list[Answered]:
        """Finished requests that started at or after this unix time, in the order in which they finished."""
        lines = self._out.read_text().splitlines()
        found = [Answered(**json.loads(line)) for line in lines if line.endswith("}")]
        return [one for one in found if one.started_at_s >= since_s]

    def stop(self) -> None:
        """No new requests; back when those in flight are answered."""
        if self._process.poll() is None:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait(STOP_S)

    def end(self) -> None:
        """Whatever is in flight: nobody asks any more."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(STOP_S)
        if self._process.stdin:
            self._process.stdin.close()

    def assert_all_answered(self, at_least: int = 1) -> None:
        answered = self.answered()
        failed = [one for one in answered if one.error]
        assert len(answered) >= at_least, f"only {len(answered)} requests were sent"
        assert not failed, f"{len(failed)} of {len(answered)} requests failed; the first: {failed[0]}"
