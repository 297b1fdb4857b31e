"""Where the story takes place: a local cluster of our own, or one that TKCC_KUBECONFIG names; and the commands to
reach it."""

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import debian, images, toolchain
from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from e2e.demo.clock import Stopwatch

CLUSTER_NAME = "demo"
LOGS = Path(__file__).parents[2] / "build" / "demo" / "logs"  # of the local cluster, for a reader afterwards
KUBECONFIG_VARIABLE = "TKCC_KUBECONFIG"
IMAGES_VARIABLE = "TKCC_IMAGES"
TORCH_VARIABLE = "TKCC_TORCH_PATH"  # site-packages with torch on the given cluster's nodes, if images lack it
PARTS = ("operator", "engine", "worker")
PROGRAMS = ("kubectl", "helm")
COMMAND_DEADLINE_S = 120.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # a node's status has its own


@dataclass(frozen=True)
class Ground:
    kubeconfig: Path
    images: Mapping[str, str]  # part -> reference that the cluster can pull or has
    torch_host_path: str = ""  # of the nodes, for engine images without torch
    is_given: bool = False

    def kubectl(self, *words: str, stdin: str | None = None, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        return _run([self._program("kubectl"), *words], self._environment, stdin, deadline_s)

    def helm(self, *words: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        return _run([self._program("helm"), *words], self._environment, None, deadline_s)

    def follow(self, *words: str) -> list[str]:
        """The command line of a kubectl that goes on until it is ended; run it with `environment`."""
        return [self._program("kubectl"), *words]

    def runs_here(self) -> bool:
        """Are all nodes this very machine, so that its files are theirs?"""
        here = BOOT_ID.read_text().strip()
        nodes = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return all(node["status"]["nodeInfo"]["bootID"] == here for node in nodes)

    def _program(self, name: str) -> str:
        """A given cluster's user may have their own, which fits it; ours is of the local cluster's version."""
        return (self.is_given and shutil.which(name)) or str(toolchain.program(name))

    @property
    def environment(self) -> dict[str, str]:
        return dict(self._environment)

    @property
    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}


def image_values(ground: Ground) -> dict[str, Any]:
    """The chart's values for the ground's images."""
    parts = {}
    for part in PARTS:
        repository, _, tag = ground.images[part].rpartition(":")
        parts[part] = {"repository": repository, "tag": tag}
    settings = {"torchHostPath": ground.torch_host_path} if ground.torch_host_path else {}
    return {"image": parts, "settings": settings}


def parse_images(text: str) -> dict[str, str]:
    """`operator=REF:TAG,engine=...,worker=...` as TKCC_IMAGES has it. Raises ClusterError that says what is missing."""
    found = dict(pair.split("=", 1) for pair in text.replace(" ", "").split(",") if "=" in pair)
    bad = [part for part in PARTS if ":" not in found.get(part, "").rpartition("/")[2]]
    if bad:
        example = ",".join(f"{part}=registry.example/tkcc/{part}:1" for part in PARTS)
        raise ClusterError(f"{IMAGES_VARIABLE} has no image with a tag for {', '.join(bad)}: write {example}")
    return {part: found[part] for part in PARTS}


def given() -> Ground | None:
    """The cluster that the environment names, if it does. Raises ClusterError for what is missing beside it."""
    kubeconfig = os.environ.get(KUBECONFIG_VARIABLE)
    if not kubeconfig:
        return None
    if not Path(kubeconfig).is_file():
        raise ClusterError(f"{KUBECONFIG_VARIABLE}={kubeconfig}: no such file")
    references = parse_images(os.environ.get(IMAGES_VARIABLE, ""))
    return Ground(Path(kubeconfig).resolve(), references, os.environ.get(TORCH_VARIABLE, ""), is_given=True)


def provide_programs() -> None:
    """kubectl and helm for a given cluster: from PATH, or as a part of Kubernetes, whose build takes minutes."""
    if not all(shutil.which(name) for name in PROGRAMS):
        toolchain.build()


@contextmanager
def ground(watch: Stopwatch) -> Iterator[Ground]:
    """The given cluster, which goes on afterwards, or a local one that ends with the block."""
    there = given()
    if there:
        with watch.step("build"):
            provide_programs()
        yield there
        return
    with watch.step("build"):
        debian.install()
        toolchain.build()
        built = images.build_all()
    cluster = Cluster(CLUSTER_NAME)
    with watch.step("cluster"):
        cluster.up(die_with_parent=True)
    try:
        yield Ground(cluster.kubeconfig, built, sysconfig.get_paths()["purelib"])
    finally:
        with suppress(OSError):
            shutil.rmtree(LOGS, ignore_errors=True)
            cluster.keep_logs(LOGS)
        cluster.down()


def _run(argv: list[str], environment: Mapping[str, str], stdin: str | None, deadline_s: float) -> str:
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=deadline_s, env=dict(environment), check=False
        )
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"{' '.join(argv[:4])}: no answer in {deadline_s:.0f} s") from late
    if done.returncode != 0:
        raise ClusterError(f"{Path(argv[0]).name} {' '.join(argv[1:5])}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def manifest(*objects: Mapping[str, Any]) -> str:
    """Objects as kubectl takes them on stdin."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
