"""`python -m e2e.demo`: the demo, live. `--clean` removes what it left."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from e2e.demo import ground as grounds
from e2e.demo.clock import Stopwatch
from e2e.demo.cross import fill_cross
from e2e.demo.facts import Story, Told, report
from e2e.demo.page import clock, render_page
from e2e.demo.setting import REPOSITORY, Subject, closing, install, machine, provide_weights, remove
from e2e.demo.story import Plot, StoryError
from tkcc.engine.tier import sandbox

MODEL = "smollm2-135m-instruct"
OUT = REPOSITORY / "build" / "demo"
NO_ROOT = """The demo starts a Kubernetes of its own, and that needs root. Either run `sudo make demo`, or name a
cluster with TKCC_KUBECONFIG and TKCC_IMAGES, or see the recompilation alone, which needs neither:

  .venv/bin/tkcc recompile --model "$(.venv/bin/tkcc model import smollm2-135m-instruct)" \\
    --trace examples/traces/chat.jsonl.gz --budget 10m --out build/recompile"""
OLD_KERNEL = """The demo runs candidates confined, and this kernel cannot do that. It lacks: {missing}.
Boot Linux 6.12 or newer on x86_64, with `landlock` in /sys/kernel/security/lsm (Debian 12: linux-image-amd64 of
bookworm-backports, see "Install" in docs/operator.md), or name a cluster whose nodes have it with TKCC_KUBECONFIG and
TKCC_IMAGES."""
_COLOURS = {2: "\033[1m", 1: "", 0: "\033[2m"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("--clean", action="store_true", help="remove the demo's cluster and its report")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # asked to end: clean up (a shell's background job ignores SIGINT)
        signal.signal(number, signal.default_int_handler)
    refusal = "" if os.environ.get(grounds.KUBECONFIG_VARIABLE) else unfit(is_clean=args.clean)
    if refusal:
        print(refusal, file=sys.stderr)
        return 1
    try:
        return clean() if args.clean else tell()
    except ClusterError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        is_given = grounds.KUBECONFIG_VARIABLE in os.environ
        left = "what it put into the cluster is still there: make demo-clean" if is_given else "nothing is left running"
        print(f"\ninterrupted; {left}", file=sys.stderr)
        return 130


def unfit(*, is_clean: bool) -> str:
    """Why this machine cannot have a cluster of the demo's own, or remove one; empty if it can."""
    if os.geteuid() != 0:
        return NO_ROOT
    missing = [] if is_clean else sandbox.missing_features()
    return OLD_KERNEL.format(missing="; ".join(missing)) if missing else ""


def clean() -> int:
    there = grounds.given()
    if there:
        grounds.provide_programs()
        remove(there, Subject.read())
    else:
        Cluster(grounds.CLUSTER_NAME).down()
    shutil.rmtree(OUT, ignore_errors=True)
    return 0


def tell() -> int:
    watch, story = Stopwatch(), Story(machine=machine())
    subject = Subject.read()
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        with grounds.ground(watch) as ground:
            try:
                model = model_dir()
                install(ground, watch)
                provide_weights(ground, subject, model)
                asyncio.run(Plot(ground, subject, story, watch, _show).play())
                with watch.step("cross"):
                    asyncio.run(fill_cross(ground, subject, story, model, _say))
            except (StoryError, ClusterError) as err:
                story.ended = str(err)
            print(f"\n{closing(ground, subject)}\n", flush=True)
    finally:
        story.timings_s = {**watch.steps_s, "whole": watch.elapsed_s}
        write(story)
    if story.ended:
        print(f"not promoted: {story.ended}", file=sys.stderr)
        return 1
    return 0


def write(story: Story) -> None:
    facts = report(story)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
    (OUT / "story.json").write_text(json.dumps(story.to_dict(), default=str) + "\n")
    (OUT / "report.html").write_text(render_page(story))
    print(f"report: {_relative(OUT / 'report.json')} and {_relative(OUT / 'report.html')}")


def model_dir() -> Path:
    """The demo's weights, imported on first use. In a process of its own: torch would stay in ours."""
    done = subprocess.run(
        [sys.executable, "-m", "tkcc", "model", "import", MODEL],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise StoryError(f"tkcc model import {MODEL} failed, as it says above")
    return Path(done.stdout.strip())


def _show(told: Told) -> None:
    line = f"{clock(told.at_s):>6s}  {told.topic:8s} {told.text}"
    print(f"{_COLOURS[told.weight]}{line}\033[0m" if sys.stdout.isatty() else line, flush=True)


def _say(text: str) -> None:
    print(f"[demo] {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    sys.exit(main())
