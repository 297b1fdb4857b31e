"""How the one node is told to run: containerd, its CNI network, kubelet and kube-proxy, as values. Pure.

The CNI bridge gives each pod an address and nothing more: NetworkPolicy objects are accepted by the API and enforced by
nobody here. There is no cluster DNS; a pod finds a Service by its ClusterIP or its environment.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.flags import LOOPBACK, NODE, NODE_IP, POD_CIDR

NODE_POD_CIDR = "10.244.0.0/24"  # the controller manager gives the first node the first /24 of POD_CIDR
CNI_PLUGINS = "/usr/lib/cni"  # Debian's containernetworking-plugins
RUNC = "/usr/sbin/runc"


@dataclass(frozen=True)
class NodeLayout:
    """Where a node keeps its files; `cgroup` is the path of its pods' cgroup below each hierarchy's mount point."""

    run_dir: Path
    programs: Path
    cgroup: str
    pause_image: str

    @property
    def socket(self) -> Path:
        """Of containerd; a socket's path may have 107 bytes, so it is on the sandbox's own /run."""
        return Path("/run/containerd/containerd.sock")

    @property
    def pod_logs(self) -> Path:
        return self.run_dir / "pod-logs"

    def config(self, name: str) -> Path:
        return self.run_dir / "config" / name


def containerd(at: NodeLayout) -> list[str]:
    return ["containerd", f"--config={at.config('containerd.toml')}"]


def containerd_config(at: NodeLayout) -> str:
    """Version 2 of the format: Debian 12 has containerd 1.6."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "{at.run_dir / "containerd"}"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", \
"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = "{at.socket}"
[{cri}]
sandbox_image = "{at.pause_image}"
stream_server_address = "{LOOPBACK}"
restrict_oom_score_adj = true
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
[{cri}.cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{at.config("cni")}"
[{cri}.containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
BinaryName = "{RUNC}"
SystemdCgroup = false
"""


def cni() -> dict[str, Any]:
    """A bridge for the pods of one node, hairpin so that a pod reaches itself through its Service."""
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": NODE_POD_CIDR}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet(at: NodeLayout, kubeconfig: Path) -> list[str]:
    return [
        str(at.programs / "kubelet"),
        f"--config={at.config('kubelet.json')}",
        f"--kubeconfig={kubeconfig}",
        f"--root-dir={at.run_dir / 'kubelet'}",
        f"--cert-dir={at.run_dir / 'kubelet' / 'pki'}",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_IP}",
    ]


def kubelet_config(at: NodeLayout) -> dict[str, Any]:
    """No authentication on kubelet's own port: only the cluster's network namespace reaches it."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "port": 10250,
        "containerRuntimeEndpoint": f"unix://{at.socket}",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{at.cgroup}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,  # images come from no registry: one that is collected is gone
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        "podLogsDir": str(at.pod_logs),
        "volumePluginDir": str(at.run_dir / "flexvolume"),
        "clusterDNS": ["127.0.0.1"],  # nobody answers, so a pod that needs a name fails at once instead of after 5 s
        "resolvConf": str(at.config("resolv.conf")),
        "nodeStatusUpdateFrequency": "4s",
        "registerNode": True,
        "shutdownGracePeriod": "0s",
    }


def kube_proxy(at: NodeLayout) -> list[str]:
    return [str(at.programs / "kube-proxy"), f"--config={at.config('kube-proxy.json')}"]


def kube_proxy_config(kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": NODE,
        "mode": "nftables",
        "clusterCIDR": POD_CIDR,
        "conntrack": {"maxPerCore": 0, "min": 0},  # 0: leave the host's limits alone
        "bindAddress": NODE_IP,
        "metricsBindAddress": f"{LOOPBACK}:10249",
    }
