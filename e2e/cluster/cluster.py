"""A whole Kubernetes on this machine, as root: control plane, one node, and the ways in.

    with Cluster("demo") as cluster:
        cluster.kubectl("apply", "-f", "examples/smollm2.yaml")
        url = cluster.door("10.96.12.7", 80)      # http://127.0.0.1:PORT on the host, the Service inside

The kubeconfig works on the host as it does inside, because the API server's port is the same on both loopbacks. Pods
and ClusterIPs are reached through a door, or by commands that `run` starts in the cluster's network.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from e2e.cluster import cache, flags, images, node, progress, store, toolchain
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.errors import ClusterError, with_tail
from e2e.cluster.names import ClusterName, free_ports
from e2e.cluster.process import Daemon, Process
from e2e.cluster.progress import output
from e2e.cluster.sandbox import Sandbox, host_cgroup_roots

NODE_READY_DEADLINE_S = 90.0
DAEMONS = ("sandbox", *toolchain.DAEMONS, "containerd", "api-door")
DEFAULT_NAME = "tkcc"


class Cluster:
    """The local cluster of one name. Two names are two clusters that know nothing of each other."""

    def __init__(self, name: str = DEFAULT_NAME) -> None:
        self.name = ClusterName(name)
        self.run_dir = self.name.run_dir
        self.sandbox = Sandbox(self.name, toolchain.pause_program())
        self.plane = ControlPlane(name, controller_manager=True, node_ip=flags.NODE_IP, enter=self.sandbox.enter)
        self.node = node.NodeLayout(self.run_dir, toolchain.bin_dir(), self.name.cgroup, images.pause_reference())

    # Life

    def __enter__(self) -> Self:
        self.up(die_with_parent=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self, *, die_with_parent: bool = False) -> None:
        """Start afresh, removing first whatever an earlier cluster of this name left; back when the node is Ready.

        With `die_with_parent` the cluster ends when the thread that called this does, however that comes about.
        """
        require_root()
        toolchain.program("kubelet")
        if self.node.pause_image not in store.images():
            raise ClusterError("no images are built yet: run `python -m e2e.cluster build`")
        with cache.lock(self.name.run_dir.with_name(f".{self.name}.lock")), progress.step(f"start cluster {self.name}"):
            self._remove()
            try:
                self._start(die_with_parent)
            except BaseException:
                self._remove()
                raise

    def down(self) -> None:
        """End and remove everything of it: processes, mounts, networks, cgroups, files. Nothing there is fine."""
        require_root()
        with cache.lock(self.name.run_dir.with_name(f".{self.name}.lock")), progress.step(f"stop cluster {self.name}"):
            self._remove()

    def attach(self) -> Self:
        """Use a cluster that another process started."""
        self.sandbox.process()
        self.plane.attach()
        return self

    def wait_ready(self, deadline_s: float = NODE_READY_DEADLINE_S) -> None:
        """Wait until pods can be created and can reach the API: node Ready, ServiceAccount there, ClusterIPs routed."""
        until = time.monotonic() + deadline_s
        waits: list[tuple[str, str, Callable[[], bool]]] = [
            ("the node is not Ready", "kubelet", self._is_node_ready),
            ("kube-proxy does not route the API server's ClusterIP", "kube-proxy", self._is_service_routed),
        ]
        for complaint, daemon, is_so in waits:
            while not is_so():
                self.daemon(daemon).check_alive()
                if time.monotonic() >= until:
                    raise with_tail(f"{complaint} after {deadline_s:.0f} s", self.daemon(daemon).log)
                time.sleep(0.1)
        self.plane.wait_default_account()

    # Faults: `kill` is SIGKILL, and what was killed stays away until `start`

    def daemon(self, name: str) -> Daemon:
        """One of DAEMONS, with its log and its process."""
        if name not in DAEMONS:
            raise ClusterError(f"no daemon {name!r} in a cluster; there are {', '.join(DAEMONS)}")
        return Daemon(name, self.run_dir, str(self.name))

    def kill(self, name: str) -> None:
        self.daemon(name).stop()

    def start(self, name: str) -> None:
        """Start one daemon that was killed, on the data that it left."""
        self._spawn(name)
        if name == "kube-apiserver":
            self.plane.wait_ready()

    def restart_apiserver(self) -> None:
        """As an upgrade does it: SIGTERM, time to drain, then start again on the same port and data."""
        self.plane.restart_apiserver()

    def pod_processes(self, pod: str, namespace: str = "default") -> list[Process]:
        """The live processes of a pod's containers and of its sandbox, by the host's pids."""
        uid = self.kubectl("-n", namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
        return [process for pid in pod_pids(self.name, uid) if (process := Process.of(pid))]

    # Ways in

    @property
    def kubeconfig(self) -> Path:
        """Of a cluster administrator; works on the host and inside."""
        return self.plane.kubeconfig

    @property
    def audit_log(self) -> Path:
        """One audit.k8s.io/v1 Event a line."""
        return self.plane.audit_log

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, deadline_s: float = 60.0) -> str:
        """kubectl as administrator; its stdout."""
        return self.plane.kubectl(*args, stdin=stdin, check=check, deadline_s=deadline_s)

    def helm(self, *args: str, deadline_s: float = 120.0) -> str:
        """helm as administrator; its stdout."""
        argv = [str(toolchain.program("helm")), f"--kubeconfig={self.kubeconfig}", *args]
        return output(argv, deadline_s=deadline_s)

    def logs(self, pod: str, *args: str, namespace: str = "default") -> str:
        """A pod's log so far; `args` are kubectl's, such as --previous or -c NAME."""
        return self.kubectl("-n", namespace, "logs", pod, *args)

    def inside(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command line that runs in the cluster's network, where pods and ClusterIPs are reached."""
        return [*self.sandbox.enter_network(), *argv]

    def run(self, argv: Sequence[str], *, deadline_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run a command in the cluster's network with KUBECONFIG set; output is captured, the exit code not judged."""
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        return subprocess.run(
            self.inside(argv), capture_output=True, text=True, timeout=deadline_s, env=env, check=False
        )

    def door(self, address: str, port: int) -> str:
        """A URL on the host's loopback that leads to `address`:`port` inside: of a pod, a Service or the node."""
        door = Daemon(f"door-{address}-{port}", self.run_dir, str(self.name))
        opened = self.run_dir / "doors" / f"{address}-{port}"
        if door.process() is None:
            self._open_door(door, listen := free_ports(ClusterName.unique(), 1)[0], f"{address}:{port}")
            opened.parent.mkdir(exist_ok=True)
            opened.write_text(str(listen))
        return f"http://{flags.LOOPBACK}:{opened.read_text()}"

    def service_ip(self, service: str, namespace: str = "default") -> str:
        return self.kubectl("-n", namespace, "get", "service", service, "-o", "jsonpath={.spec.clusterIP}")

    def pod_ip(self, pod: str, namespace: str = "default") -> str:
        return self.kubectl("-n", namespace, "get", "pod", pod, "-o", "jsonpath={.status.podIP}")

    # Images

    def load(self, archives: Iterable[Path]) -> None:
        """Import docker-archive files into the node's containerd: images that are not in the store."""
        for archive in archives:
            with progress.step(f"load {archive.name} into cluster {self.name}"):
                self._ctr("images", "import", "--snapshotter=overlayfs", str(archive))

    def _ctr(self, *args: str) -> str:
        argv = ["ctr", f"--address={self.node.socket}", "--namespace=k8s.io", *args]
        return output([*self.sandbox.enter(), *argv], deadline_s=300)

    # Reports

    def status(self) -> str:
        """A table of daemons with their memory, then nodes and pods; for people."""
        lines = [f"cluster {self.name}  kubeconfig {self.kubeconfig}"]
        for name in DAEMONS:
            process = self.daemon(name).process()
            lines.append(
                f"  {name:24} " + (f"pid {process.pid:<8} {_rss_mib(process):4} MiB" if process else "not running")
            )
        lines.append(self.kubectl("get", "nodes,pods", "-A", "-o", "wide", check=False))
        return "\n".join(lines)

    def keep_logs(self, directory: Path) -> None:
        """Copy the daemons' and the pods' logs and the audit log to `directory`, for a reader after `down`."""
        for source in (self.run_dir / "logs", self.node.pod_logs, self.audit_log.parent):
            if source.is_dir():
                shutil.copytree(source, directory / source.name, dirs_exist_ok=True)

    # Inside

    def _start(self, die_with_parent: bool) -> None:
        self.plane.prepare()
        self._write_config()
        self.sandbox.create(die_with_parent=die_with_parent)
        port = self.plane.layout.api_port
        self._open_door(self.daemon("api-door"), port, f"{flags.LOOPBACK}:{port}")
        self._spawn("etcd")
        self._spawn("kube-apiserver")
        store.copy_to(self.run_dir / "containerd")  # while the API server starts
        self._spawn("containerd")
        self.plane.wait_ready()
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
            self._spawn(name)
        self.wait_ready()

    def _spawn(self, name: str) -> None:
        lines = self._command_lines()
        if name not in lines:
            raise ClusterError(f"{name!r} cannot be started by itself; these can: {', '.join(lines)}")
        self.daemon(name).start(lines[name], enter=self.sandbox.enter())

    def _command_lines(self) -> dict[str, list[str]]:
        control = self.plane.layout
        return {
            "etcd": flags.etcd(control),
            "kube-apiserver": flags.apiserver(control),
            "kube-controller-manager": flags.controller_manager(control),
            "kube-scheduler": flags.scheduler(control),
            "containerd": node.containerd(self.node),
            "kubelet": node.kubelet(self.node, control.kubeconfig("node")),
            "kube-proxy": node.kube_proxy(self.node),
        }

    def _write_config(self) -> None:
        (self.run_dir / "config" / "cni").mkdir(parents=True)
        self.node.pod_logs.mkdir()
        texts = {
            "containerd.toml": node.containerd_config(self.node),
            "cni/10-pods.conflist": json.dumps(node.cni()),
            "kubelet.json": json.dumps(node.kubelet_config(self.node)),
            "kube-proxy.json": json.dumps(node.kube_proxy_config(self.plane.layout.kubeconfig("proxy"))),
            "resolv.conf": "# no cluster DNS: nothing here needs names\n",
        }
        for name, text in texts.items():
            self.node.config(name).write_text(text)

    def _open_door(self, door: Daemon, listen: int, target: str) -> None:
        script = Path(__file__).with_name("forward.py")
        anchor = self.sandbox.process().pid
        door.start([sys.executable, "-I", str(script), f"--anchor={anchor}", f"--listen={listen}", f"--to={target}"])
        _wait_listening(door, listen)

    def _is_node_ready(self) -> bool:
        said = self.kubectl("get", "node", flags.NODE, "-o", "jsonpath={.status.conditions}", check=False)
        return any(c["type"] == "Ready" and c["status"] == "True" for c in json.loads(said or "[]"))

    def _is_service_routed(self) -> bool:
        listed = subprocess.run(
            self.inside(["nft", "list", "map", "ip", "kube-proxy", "service-ips"]),
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return flags.KUBERNETES_SERVICE_IP in listed.stdout

    def _remove(self) -> None:
        self.sandbox.destroy()
        output(["rm", "-rf", "--one-file-system", str(self.run_dir)], deadline_s=120)  # rmtree takes twice as long


def require_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "a local cluster needs root (namespaces, cgroups, overlay mounts); without it use `tkcc recompile`, "
            "which needs none"
        )


def pod_pids(name: ClusterName, uid: str) -> list[int]:
    """The pids in the cgroups of the pod with this uid."""
    pids: set[int] = set()
    for root, _ in host_cgroup_roots():
        for group in (root / name.cgroup).glob(f"**/pod{uid}/**/cgroup.procs"):
            with suppress(OSError):
                pids.update(int(pid) for pid in group.read_text().split())
    return sorted(pids)


def _wait_listening(daemon: Daemon, port: int, deadline_s: float = 10.0) -> None:
    until = time.monotonic() + deadline_s
    while True:
        daemon.check_alive()
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((flags.LOOPBACK, port)) == 0:
                return
        if time.monotonic() >= until:
            raise with_tail(f"{daemon.name} does not listen on port {port} after {deadline_s:.0f} s", daemon.log)
        time.sleep(0.02)


def _rss_mib(process: Process) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0
