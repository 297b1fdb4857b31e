"""The parts that all our pods share: Pod Security `restricted`, weights read-only, scratch space, scheduling."""

from collections.abc import Iterable, Mapping

from tkcc.api.codec import to_dict
from tkcc.api.fields import BASELINE
from tkcc.api.spec import ModelSpec, PodSettings, model_claim
from tkcc.kube.resources import JsonObject
from tkcc.shell.render.names import artifact_name
from tkcc.shell.settings import Settings

USER_ID = 10001  # of the images
MODELS_DIR, ARTIFACT_DIR, CACHE_DIR = "/models", "/artifact", "/cache"
TORCH_DIR = "/opt/torch"  # on sys.path in engine images
TOKEN_DIR, TOKEN_FILE = "/run/tkcc/token", "/run/tkcc/token/token"
GROUP_READ = 0o440  # root writes, our group reads


def container_security() -> JsonObject:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security() -> JsonObject:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",  # never walk a tree of weights
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def env(values: Mapping[str, str]) -> list[JsonObject]:
    return [{"name": name, "value": value} for name, value in values.items() if value]


class Volumes:
    """Volumes of a pod and their mounts in its one container, kept in step."""

    def __init__(self) -> None:
        self.volumes: list[JsonObject] = []
        self.mounts: list[JsonObject] = []

    def add(self, name: str, path: str, source: JsonObject, *, read_only: bool = True) -> "Volumes":
        self.volumes.append({"name": name, **source})
        self.mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})
        return self

    def scratch(self, name: str, path: str, *, in_memory: bool = False) -> "Volumes":
        return self.add(name, path, {"emptyDir": {"medium": "Memory"} if in_memory else {}}, read_only=False)

    def config_map(self, name: str, path: str, config_map: str, *, optional: bool = False) -> "Volumes":
        source: JsonObject = {"name": config_map, **({"optional": True} if optional else {})}
        return self.add(name, path, {"configMap": source})

    def secret(self, name: str, path: str, secret: str) -> "Volumes":
        return self.add(name, path, {"secret": {"secretName": secret, "defaultMode": GROUP_READ}})


def engine_volumes(model: ModelSpec, settings: Settings, artifact: str = BASELINE) -> Volumes:
    """Weights, the artifact that is served, room for kernels compiled at load, and torch where the image has none."""
    claim, _ = model_claim(model.uri)
    volumes = Volumes()
    volumes.add("models", MODELS_DIR, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    volumes.scratch("tmp", "/tmp").scratch("cache", CACHE_DIR).scratch("shm", "/dev/shm", in_memory=True)
    if artifact != BASELINE:
        volumes.config_map("artifact", ARTIFACT_DIR, artifact_name(artifact))
    if settings.torch_host_path:
        volumes.add("torch", TORCH_DIR, {"hostPath": {"path": settings.torch_host_path, "type": "Directory"}})
    return volumes


def engine_env(cpus: str) -> list[JsonObject]:
    return env(
        {
            "HOME": CACHE_DIR,
            "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_DIR}/inductor",
            "TRITON_CACHE_DIR": f"{CACHE_DIR}/triton",
            "TKCC_BUILD_CACHE": f"{CACHE_DIR}/build",
            "TKCC_CPUS": cpus,
        }
    )


def model_path(model: ModelSpec) -> str:
    _, path = model_claim(model.uri)
    return f"{MODELS_DIR}/{path}" if path else MODELS_DIR


def scheduling(pod: PodSettings) -> JsonObject:
    """Node selector, tolerations and classes; what is empty is left out, so that the cluster's defaults hold."""
    tolerations = [{k: v for k, v in to_dict(item).items() if v} for item in pod.tolerations]
    fields: JsonObject = {
        "nodeSelector": pod.node_selector,
        "tolerations": tolerations,
        "runtimeClassName": pod.runtime_class_name,
        "priorityClassName": pod.priority_class_name,
    }
    return {name: value for name, value in fields.items() if value}


def resources(pod: PodSettings) -> JsonObject:
    kinds = {"requests": pod.resources.requests, "limits": pod.resources.limits}
    return {kind: {name: str(amount) for name, amount in amounts.items()} for kind, amounts in kinds.items() if amounts}


def pod_template(
    *,
    labels: Mapping[str, str],
    container: JsonObject,
    volumes: Volumes,
    settings: Settings,
    annotations: Mapping[str, str] | None = None,
    **spec: object,
) -> JsonObject:
    """A pod with one container and no service-account token unless `spec` says otherwise."""
    pull_secrets: Iterable[JsonObject] = ({"name": name} for name in settings.images.pull_secrets)
    return {
        "metadata": {"labels": dict(labels), **({"annotations": dict(annotations)} if annotations else {})},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a namespace of many services would flood the environment
            "securityContext": pod_security(),
            **({"imagePullSecrets": list(pull_secrets)} if settings.images.pull_secrets else {}),
            **spec,
            "containers": [
                {
                    "imagePullPolicy": settings.images.pull_policy,
                    "terminationMessagePolicy": "FallbackToLogsOnError",  # its last words go into the pod's status
                    "securityContext": container_security(),
                    "volumeMounts": volumes.mounts,
                    **container,
                }
            ],
            "volumes": volumes.volumes,
        },
    }
