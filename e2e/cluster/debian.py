"""The Debian packages that the local cluster needs on its host: installed where missing, their services not started."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import cache, progress
from e2e.cluster.errors import ClusterError

PACKAGES = {
    "containerd": "runs pods",
    "runc": "runs containers",
    "containernetworking-plugins": "gives pods their network",
    "nftables": "kube-proxy's rules",
    "conntrack": "kube-proxy's connection tracking",
    "iptables": "the portmap plugin",
    "iproute2": "makes the cluster's network",
    "kmod": "loads the kernel's bridge filter where it is a module",
    "util-linux": "nsenter, unshare, setpriv",
    "openssl": "makes certificates",
    "mmdebstrap": "makes the base image",
    "buildah": "builds images",
    "skopeo": "copies images out of buildah's store",
    "gcc": "builds the pause program, and forward passes in C where a tier runs beside the cluster",
    "g++": "builds what Inductor writes there",
    "libpython3-dev": "the headers which that includes",
    "libc6-dev": "builds the pause program",
    "ca-certificates": "fetches packages into images",
}
_POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """Those of PACKAGES that are not installed."""
    if shutil.which("dpkg-query") is None:
        raise ClusterError(
            f"the local cluster is made for Debian 12; elsewhere install the like of {', '.join(PACKAGES)}"
        )
    argv = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *PACKAGES]
    listed = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout
    installed = {line.split()[0] for line in listed.splitlines() if line.endswith(" installed")}
    return [package for package in PACKAGES if package not in installed]


def install() -> None:
    """Install what is missing; needs root only then."""
    wanted = missing()
    if not wanted:
        return
    if os.geteuid() != 0:
        raise ClusterError(f"as root, run: apt-get install --no-install-recommends {' '.join(wanted)}")
    apt = ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=300"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = cache.root() / "logs" / "apt.log"
    with _services_stay_off():
        progress.run("update Debian's package lists", [*apt, "update"], log, deadline_s=300, env=env)
        title = f"install {len(wanted)} Debian packages"
        argv = [*apt, "install", "--no-install-recommends", *wanted]
        progress.run(title, argv, log, deadline_s=900, env=env)


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """Debian asks policy-rc.d before it starts a service; where the host has none, one that says no, for a while."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
