"""What serves: the Service, one Deployment per role, and who may reach which port."""

from tkcc.api.fields import BASELINE
from tkcc.api.spec import Spec
from tkcc.kube.resources import DEPLOYMENT, NETWORK_POLICY, POD_DISRUPTION_BUDGET, SERVICE, JsonObject
from tkcc.shell.render.names import (
    ADMIN_PORT,
    ARTIFACT_ANNOTATION,
    DEPLOYMENT_LABEL,
    ROLE_LABEL,
    SERVING_LABEL,
    SERVING_PORT,
    STABLE,
    Owner,
    labels,
    owned,
    serving_name,
)
from tkcc.shell.render.pod import (
    ARTIFACT_DIR,
    engine_env,
    engine_volumes,
    model_path,
    pod_template,
    resources,
    scheduling,
)
from tkcc.shell.settings import Settings

COMPONENT = "serving"
_STARTUP_PROBES = 900  # x 2 s: half an hour to read weights and compile


def service(owner: Owner) -> JsonObject:
    """The share of traffic of a role is its share of the ready pods that carry the serving label."""
    return owned(
        SERVICE,
        owner,
        owner.name,
        labels(owner.name, COMPONENT),
        spec={
            "selector": {DEPLOYMENT_LABEL: owner.name, SERVING_LABEL: "true"},
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    )


def disruption_budget(owner: Owner) -> JsonObject:
    """A node drain takes one serving pod at a time."""
    return owned(
        POD_DISRUPTION_BUDGET,
        owner,
        owner.name,
        labels(owner.name, COMPONENT),
        spec={
            "maxUnavailable": 1,
            "selector": {"matchLabels": {DEPLOYMENT_LABEL: owner.name, SERVING_LABEL: "true"}},
        },
    )


def network_policy(owner: Owner, settings: Settings) -> JsonObject:
    """Requests from anywhere; the admin port from the operator alone; nothing goes out, because candidate code runs
    here. Takes effect only where the cluster's network enforces policies."""
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "tkcc-operator"}},
    }
    return owned(
        NETWORK_POLICY,
        owner,
        f"{owner.name}-serving",
        labels(owner.name, COMPONENT),
        spec={
            "podSelector": {"matchLabels": labels(owner.name, COMPONENT)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"ports": [{"port": SERVING_PORT, "protocol": "TCP"}]},
                {"from": [operator], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
            ],
        },
    )


def deployment(owner: Owner, spec: Spec, settings: Settings, role: str, artifact: str, replicas: int) -> JsonObject:
    """Pods of one role with one artifact (digest or `baseline`). Stable pods are in service from the start; a canary's
    pod is let in one by one, by its label."""
    selector = {DEPLOYMENT_LABEL: owner.name, ROLE_LABEL: role}
    pod_labels = labels(owner.name, COMPONENT, selector)
    return owned(
        DEPLOYMENT,
        owner,
        serving_name(owner.name, role),
        labels(owner.name, COMPONENT, {ROLE_LABEL: role}),
        spec={
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": settings.rolling.max_surge,
                    "maxUnavailable": settings.rolling.max_unavailable,
                },
            },
            "selector": {"matchLabels": selector},
            "template": pod_template(
                labels={**pod_labels, **({SERVING_LABEL: "true"} if role == STABLE else {})},
                annotations={ARTIFACT_ANNOTATION: artifact},
                container=_container(spec, settings, artifact),
                volumes=engine_volumes(spec.model, settings, artifact),
                settings=settings,
                terminationGracePeriodSeconds=settings.drain.accept_s + settings.drain.finish_s + 10,
                **scheduling(spec.pod),
            ),
        },
    )


def _container(spec: Spec, settings: Settings, artifact: str) -> JsonObject:
    return {
        "name": "engine",
        "image": spec.engine.image or settings.images.engine,
        "args": _serve_args(spec, settings, artifact),
        "env": engine_env(spec.engine.cpus),
        "ports": [
            {"name": "http", "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": resources(spec.pod),
        # Loading is slow and may be; a pod that is ready and stops being so leaves the Service within seconds.
        "startupProbe": _probe("/health", period_s=2, failures=_STARTUP_PROBES),
        "readinessProbe": _probe("/health", period_s=2, failures=2),
        "livenessProbe": _probe("/metrics", period_s=10, failures=6),
    }


def _serve_args(spec: Spec, settings: Settings, artifact: str) -> list[str]:
    recording = spec.traffic.recording
    args = ["serve", "--model", model_path(spec.model), "--wait-for-model", "--served-model-name", spec.model.name]
    args += ["--host", "0.0.0.0", "--port", str(SERVING_PORT), "--admin-port", str(ADMIN_PORT)]
    args += ["--dtype", spec.engine.dtype]
    args += ["--device", "cuda"] if spec.pod.has_gpu else []
    args += ["--threads", str(spec.engine.threads)] if spec.engine.threads else []
    args += ["--record", str(recording.max_requests)] if recording.enabled else []
    args += ["--drain-accept-s", str(settings.drain.accept_s), "--drain-finish-s", str(settings.drain.finish_s)]
    args += ["--artifact", ARTIFACT_DIR] if artifact != BASELINE else []
    return [*args, *spec.engine.args]


def _probe(path: str, *, period_s: int, failures: int) -> JsonObject:
    return {
        "httpGet": {"path": path, "port": "admin"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
