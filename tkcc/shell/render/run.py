"""One RecompilationRun and everything it owns: token, traffic, result, the Job and its rights, the tier engines."""

import base64
import gzip

from tkcc.api.codec import canonical_json, to_dict, to_json
from tkcc.api.fields import BASELINE
from tkcc.api.run import RunSpec, RunStatus
from tkcc.api.spec import PodSettings, ProposerType
from tkcc.api.workload import Recording
from tkcc.kube.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    GROUP,
    JOB,
    NETWORK_POLICY,
    RECOMPILATION_RUN,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    JsonObject,
)
from tkcc.shell.render.names import (
    COMPONENT_LABEL,
    RUN_LABEL,
    TIER_LABEL,
    TIER_PORT,
    Owner,
    artifact_name,
    labels,
    owned,
    result_name,
    tier_name,
    token_name,
    traffic_name,
)
from tkcc.shell.render.pod import (
    TOKEN_DIR,
    TOKEN_FILE,
    Volumes,
    engine_env,
    engine_volumes,
    env,
    model_path,
    pod_template,
    resources,
    scheduling,
)
from tkcc.shell.settings import Settings

TIER, WORKER = "tier", "worker"  # components
RUN_DIR, INCUMBENT_DIR, SCRIPT_DIR = "/run/tkcc/run", "/run/tkcc/incumbent", "/run/tkcc/script"
JOB_GRACE_S = 600  # beyond the run's budget, for images to be pulled and tiers to start
BAD_INPUT_EXIT = 2  # of the worker: trying again gives the same
_STARTUP_PROBES = 1800  # x 2 s: a tier loads weights and does its A/A run


def recompilation_run(owner: Owner, name: str, spec: RunSpec) -> JsonObject:
    """Owned by its InferenceDeployment."""
    return owned(RECOMPILATION_RUN, owner, name, labels(owner.name, "run"), spec=to_dict(spec))


def status_patch(old: RunStatus, new: RunStatus) -> JsonObject:
    """Merge patch from one status to the other; empty if they are equal. The worker writes to the same status: what it
    wrote is passed on as it was read, and a conflict says when it wrote meanwhile."""
    have, want = to_dict(old), to_dict(new)
    return {name: want.get(name) for name in have | want if have.get(name) != want.get(name)}


def token(run: Owner, spec: RunSpec, secret_token: str) -> JsonObject:
    """The random bearer token by which the Job is known to the tiers."""
    encoded = base64.b64encode(secret_token.encode()).decode()
    meta = _labels(run, spec, WORKER)
    return owned(SECRET, run, token_name(run.name), meta, type="Opaque", immutable=True, data={"token": encoded})


def traffic(run: Owner, spec: RunSpec, recording: Recording | None) -> JsonObject:
    """The workload, and the recording where there is one. `order` is applied beside them later."""
    body: JsonObject = {"data": {"workload.json": to_json(spec.workload)}}
    if recording is not None:
        # mtime 0: equal recordings give equal bytes
        packed = gzip.compress(to_json(recording).encode(), mtime=0)
        body["binaryData"] = {"recording.json.gz": base64.b64encode(packed).decode()}
    return owned(CONFIG_MAP, run, traffic_name(run.name), _labels(run, spec, WORKER), **body)


def order(run: Owner, spec: RunSpec, tier_ips: dict[str, str]) -> JsonObject:
    """The key `run.json` of the traffic ConfigMap: what the worker is to do. Tiers are named by address, because
    nothing of ours needs cluster DNS."""
    text = canonical_json(
        {
            "run": run.name,
            "namespace": run.namespace,
            "uid": run.uid,
            "spec": to_dict(spec),
            "tiers": {tier: f"http://{_host(ip)}:{TIER_PORT}" for tier, ip in tier_ips.items()},
            "incumbentDir": INCUMBENT_DIR if spec.incumbent != BASELINE else "",
            "scriptDir": SCRIPT_DIR if spec.proposer.type is ProposerType.SCRIPTED else "",
        }
    )
    return owned(CONFIG_MAP, run, traffic_name(run.name), _labels(run, spec, WORKER), data={"run.json": text})


def result(run: Owner, spec: RunSpec) -> JsonObject:
    """Empty: the Job alone writes it."""
    return owned(CONFIG_MAP, run, result_name(run.name), _labels(run, spec, WORKER))


def service_account(run: Owner, spec: RunSpec) -> JsonObject:
    meta = _labels(run, spec, WORKER)
    return owned(SERVICE_ACCOUNT, run, run.name, meta, automountServiceAccountToken=False)


def role(run: Owner, spec: RunSpec) -> JsonObject:
    """All that a worker may do in the cluster: its own run's status, its own result."""
    rules = [
        {
            "apiGroups": [GROUP],
            "resources": ["recompilationruns/status"],
            "resourceNames": [run.name],
            "verbs": ["patch"],
        },
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [result_name(run.name)],
            "verbs": ["get", "patch"],
        },
    ]
    return owned(ROLE, run, run.name, _labels(run, spec, WORKER), rules=rules)


def role_binding(run: Owner, spec: RunSpec) -> JsonObject:
    return owned(
        ROLE_BINDING,
        run,
        run.name,
        _labels(run, spec, WORKER),
        roleRef={"apiGroup": ROLE.group, "kind": ROLE.kind, "name": run.name},
        subjects=[{"kind": SERVICE_ACCOUNT.kind, "name": run.name, "namespace": run.namespace}],
    )


def network_policies(run: Owner, spec: RunSpec) -> list[JsonObject]:
    """Candidates run in the tiers: only the Job may talk to them, and they may talk to nobody. The Job may be talked to
    by nobody; it reaches its tiers, the API server and, with an LLM proposer, HTTPS."""
    tier, worker = _match(run, TIER), _match(run, WORKER)
    port = {"port": TIER_PORT, "protocol": "TCP"}
    https = [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]
    rules: dict[str, JsonObject] = {
        TIER: {"podSelector": tier, "ingress": [{"from": [{"podSelector": worker}], "ports": [port]}]},
        WORKER: {"podSelector": worker, "egress": [{"to": [{"podSelector": tier}], "ports": [port]}, {"ports": https}]},
    }
    return [
        owned(
            NETWORK_POLICY,
            run,
            f"{run.name}-{component}",
            _labels(run, spec, component),
            spec={"policyTypes": ["Ingress", "Egress"], **rule},
        )
        for component, rule in rules.items()
    ]


def tier_service(run: Owner, spec: RunSpec, tier: str) -> JsonObject:
    return owned(
        SERVICE,
        run,
        tier_name(run.name, tier),
        _labels(run, spec, TIER, tier),
        spec={
            "selector": {RUN_LABEL: run.name, TIER_LABEL: tier},
            "ports": [{"name": "tier", "port": TIER_PORT, "targetPort": "tier", "protocol": "TCP"}],
        },
    )


def tier_deployment(run: Owner, spec: RunSpec, settings: Settings, tier: str) -> JsonObject:
    pod = _tier_pod(spec, tier)
    selector = {RUN_LABEL: run.name, TIER_LABEL: tier}
    meta = _labels(run, spec, TIER, tier)
    volumes = engine_volumes(spec.model, settings).secret("token", TOKEN_DIR, token_name(run.name))
    return owned(
        DEPLOYMENT,
        run,
        tier_name(run.name, tier),
        meta,
        spec={
            "replicas": 1,
            "revisionHistoryLimit": 0,
            "strategy": {"type": "Recreate"},  # never two engines on one device
            "selector": {"matchLabels": selector},
            "template": pod_template(
                labels=meta,
                container={
                    "name": "tier",
                    "image": spec.engine.image or settings.images.engine,
                    "args": _tier_args(spec, tier),
                    "env": engine_env(spec.tiers.cpus),
                    "ports": [{"name": "tier", "containerPort": TIER_PORT, "protocol": "TCP"}],
                    "resources": resources(pod),
                    "startupProbe": _probe(failures=_STARTUP_PROBES),
                    "readinessProbe": _probe(failures=3),
                },
                volumes=volumes,
                settings=settings,
                terminationGracePeriodSeconds=10,
                **scheduling(pod),
            ),
        },
    )


def job(run: Owner, spec: RunSpec, settings: Settings) -> JsonObject:
    """`tkcc worker`. A pod that is killed is followed by one that resumes from the journal; bad input ends the Job."""
    meta = _labels(run, spec, WORKER)
    volumes = Volumes().scratch("tmp", "/tmp").config_map("run", RUN_DIR, traffic_name(run.name))
    volumes.secret("token", TOKEN_DIR, token_name(run.name))
    if spec.incumbent != BASELINE:
        volumes.config_map("incumbent", INCUMBENT_DIR, artifact_name(spec.incumbent))
    if spec.proposer.type is ProposerType.SCRIPTED:
        volumes.config_map("script", SCRIPT_DIR, spec.proposer.script_config_map)
    return owned(
        JOB,
        run,
        run.name,
        meta,
        spec={
            "backoffLimit": 4,
            "activeDeadlineSeconds": int(spec.budget.max_duration.total_seconds()) + JOB_GRACE_S,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "worker", "operator": "In", "values": [BAD_INPUT_EXIT]},
                    },
                ]
            },
            "template": pod_template(
                labels=meta,
                container={
                    "name": "worker",
                    "image": settings.images.worker,
                    "args": ["worker", "--run-dir", RUN_DIR, "--token-file", TOKEN_FILE],
                    "env": env({"HOME": "/tmp", "TKCC_NAMESPACE": run.namespace, "TKCC_RUN": run.name}),
                    "resources": settings.worker_resources,
                },
                volumes=volumes,
                settings=settings,
                serviceAccountName=run.name,
                automountServiceAccountToken=True,
                restartPolicy="Never",
            ),
        },
    )


def _labels(run: Owner, spec: RunSpec, component: str, tier: str = "") -> dict[str, str]:
    return labels(spec.deployment, component, {RUN_LABEL: run.name, **({TIER_LABEL: tier} if tier else {})})


def _match(run: Owner, component: str) -> JsonObject:
    return {"matchLabels": {RUN_LABEL: run.name, COMPONENT_LABEL: component}}


def _tier_pod(spec: RunSpec, tier: str) -> PodSettings:
    return spec.tiers.fast.pod if tier == "fast" else spec.tiers.slow.pod


def _tier_args(spec: RunSpec, tier: str) -> list[str]:
    layers = str(spec.tiers.fast.layers) if tier == "fast" else "all"
    threads = spec.tiers.threads or spec.engine.threads
    args = ["tier", "--model", model_path(spec.model), "--layers", layers, "--tier", tier]
    args += ["--host", "0.0.0.0", "--port", str(TIER_PORT), "--token-file", TOKEN_FILE, "--dtype", spec.engine.dtype]
    return args + (["--threads", str(threads)] if threads else [])


def _probe(*, failures: int) -> JsonObject:
    return {
        "httpGet": {"path": "/healthz", "port": "tier"},
        "periodSeconds": 2,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
