"""A Kubernetes API without nodes: etcd, kube-apiserver and, on request, the controller manager. Needs no root.

    with ControlPlane(controller_manager=True) as plane:
        run(operator, env={"KUBECONFIG": str(plane.kubeconfig)})

As a fixture: session scope, one plane for all tests, a namespace for each. Everything listens on 127.0.0.1. The
controller manager is what makes ServiceAccounts, empties deleted namespaces and collects garbage by ownerReferences;
without it the API starts a little faster and does none of that.
"""

import http.client
import json
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.cluster import flags, pki, toolchain
from e2e.cluster.errors import ClusterError, with_tail
from e2e.cluster.names import ClusterName, free_ports
from e2e.cluster.process import Daemon

READY_DEADLINE_S = 90.0
STOP_GRACE_S = 20.0


class ControlPlane:
    """One control plane; it stops, and its data goes, when the `with` block ends or the process that started it dies.

    Without a name it gets one of its own, so that test runs side by side do not meet. With one, `start` ends first
    what runs under that name. Start it from the main thread: the kernel ties the daemons' life to the thread that
    started them.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        controller_manager: bool = False,
        node_ip: str | None = None,
        enter: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self.name = ClusterName(name) if name else ClusterName.unique()
        self.run_dir = self.name.run_dir
        self._controller_manager = controller_manager
        self._node_ip = node_ip
        self._enter = enter
        self._layout: flags.ControlPlaneLayout | None = None

    # What a test reads

    @property
    def layout(self) -> flags.ControlPlaneLayout:
        if self._layout is None:
            raise ClusterError(f"control plane {self.name} is not started")
        return self._layout

    @property
    def url(self) -> str:
        return self.layout.url

    @property
    def kubeconfig(self) -> Path:
        """Of a cluster administrator (group system:masters)."""
        return self.layout.kubeconfig("admin")

    @property
    def audit_log(self) -> Path:
        """One audit.k8s.io/v1 Event a line; complete for every request that has been answered."""
        return self.layout.audit_log

    def audit_events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_log.read_text().splitlines()]

    # Life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start afresh, ending first what an earlier one of this name left; returns when /readyz is ok."""
        ClusterName.sweep()
        self.stop()
        try:
            self.launch()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start where nothing of it is there; a failure leaves what was started to `stop`."""
        self.prepare()
        self._start("etcd", flags.etcd(self.layout))
        self.start_apiserver()
        if self._controller_manager:
            self.start_controller_manager()
            self.wait_default_account()

    def prepare(self) -> None:
        """Choose ports and write every file that the daemons read."""
        self._use_ports(free_ports(self.name, 3))
        self._write_files()

    def attach(self) -> None:
        """Use a control plane that another process started under this name."""
        try:
            self._use_ports(json.loads((self.run_dir / "ports.json").read_text()))
        except OSError as error:
            raise ClusterError(f"no control plane {self.name} runs here ({error})") from error

    def _use_ports(self, ports: Sequence[int]) -> None:
        programs = toolchain.program("kube-apiserver").parent
        api, etcd, etcd_peer = ports
        self._layout = flags.ControlPlaneLayout(self.run_dir, programs, api, etcd, etcd_peer, self._node_ip)

    def stop(self) -> None:
        """End every process of it and remove its files; nothing happens where there is none."""
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):  # the API server hangs if etcd leaves first
            self._daemon(name).stop()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # Faults

    def start_apiserver(self) -> None:
        self._start("kube-apiserver", flags.apiserver(self.layout))
        self.wait_ready()

    def restart_apiserver(self) -> None:
        """As a rolling upgrade does it: SIGTERM, up to 20 s to drain, then start again on the same port and data."""
        self._daemon("kube-apiserver").stop(grace_s=STOP_GRACE_S)
        self.start_apiserver()

    def kill_apiserver(self) -> None:
        """SIGKILL; it stays away until `start_apiserver`."""
        self._daemon("kube-apiserver").stop()

    def start_controller_manager(self) -> None:
        self._start("kube-controller-manager", flags.controller_manager(self.layout))

    # Use

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until the API server says it is ready for traffic."""
        daemon = self._daemon("kube-apiserver")
        until = time.monotonic() + deadline_s
        last = "no answer"
        while time.monotonic() < until:
            daemon.check_alive()
            try:
                self.get("/readyz")
                return
            except urllib.error.HTTPError as error:
                last = f"{error.code}: {error.read().decode(errors='replace')[-300:]}"
            except (OSError, http.client.HTTPException) as error:
                last = str(error)
            time.sleep(0.1)
        raise with_tail(f"kube-apiserver of {self.name} is not ready after {deadline_s:.0f} s ({last})", daemon.log)

    def wait_default_account(self, namespace: str = "default", deadline_s: float = 60.0) -> None:
        """Wait for the namespace's ServiceAccount `default`: until it is there, no pod can be created."""
        until = time.monotonic() + deadline_s
        while True:
            try:
                self.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
                return
            except OSError as error:
                if time.monotonic() >= until:
                    log = self._daemon("kube-controller-manager").log
                    raise with_tail(
                        f"no ServiceAccount {namespace}/default after {deadline_s:.0f} s ({error})", log
                    ) from error
            time.sleep(0.05)

    def get(self, path: str, timeout_s: float = 5.0) -> str:
        """GET as administrator; HTTPError and OSError are the caller's to handle."""
        token = json.loads(self.kubeconfig.read_text())["users"][0]["user"]["token"]
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {token}"})
        context = ssl.create_default_context(cafile=str(self.layout.pki / "ca.crt"))
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
            body: bytes = answer.read()
        return body.decode()

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, deadline_s: float = 60.0) -> str:
        """kubectl as administrator; its stdout. With `check`, a failure is a ClusterError that quotes its stderr."""
        argv = [str(self.layout.programs / "kubectl"), f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=deadline_s, check=False)
        if check and done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(args)}: exit {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def service_account_kubeconfig(self, namespace: str, name: str, duration: str = "1h") -> Path:
        """A kubeconfig that acts as a ServiceAccount, so that RBAC applies as it does in a pod."""
        token = self.kubectl("-n", namespace, "create", "token", name, f"--duration={duration}").strip()
        return self._write_kubeconfig(f"{namespace}.{name}", token, namespace)

    # Inside

    def _daemon(self, name: str) -> Daemon:
        return Daemon(name, self.run_dir, str(self.name))

    def _start(self, name: str, argv: Sequence[str]) -> None:
        inside = self._enter() if self._enter else ()  # a sandbox ends what is inside it; alone, the parent's end does
        self._daemon(name).start(argv, enter=inside, die_with_parent=not inside)

    def _write_files(self) -> None:
        at = self.layout
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir.chmod(0o700)
        (self.run_dir / "ports.json").write_text(json.dumps([at.api_port, at.etcd_port, at.etcd_peer_port]))
        service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        addresses = [flags.LOOPBACK, flags.KUBERNETES_SERVICE_IP, *([at.node_ip] if at.node_ip else [])]
        tokens = pki.make(at.pki, addresses=addresses, names=["localhost", *service], node=flags.NODE)
        for user, token in tokens.items():
            self._write_kubeconfig(user, token)
        at.audit_policy.parent.mkdir()
        at.audit_policy.write_text(json.dumps(flags.audit_policy()))

    def _write_kubeconfig(self, user: str, token: str, namespace: str = "default") -> Path:
        path = self.layout.kubeconfig(user)
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(
            json.dumps(flags.kubeconfig(self.url, (self.layout.pki / "ca.crt").read_bytes(), token, namespace))
        )
        return path
