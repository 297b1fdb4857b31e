"""The Helm chart as helm sees it, and what it grants against what the operator does."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import IMAGES, REPOSITORY
from tkcc.api.condition import ConditionType
from tkcc.api.run import RunOutcome
from tkcc.kube import resources
from tkcc.shell import metrics, settings

CHART = REPOSITORY / "charts" / "tkcc"
EVERYTHING = [
    "metrics.serviceMonitor.enabled=true",
    "metrics.prometheusRule.enabled=true",
    "metrics.dashboard.enabled=true",
    "replicas=2",
]
WORKLOADS = ("Deployment",)


@pytest.fixture(scope="session")
def helm() -> str:
    from e2e.cluster import toolchain

    path = toolchain.bin_dir() / "helm"
    if not path.exists():
        pytest.skip("helm is not built: run `python -m e2e.cluster build --programs-only` (20 minutes, once)")
    return str(path)


class Helm:
    def __init__(self, program: str, home: Path):
        self._program = program
        self._env = {f"HELM_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [self._program, *args]
        return subprocess.run(argv, capture_output=True, text=True, env=self._env, timeout=60, check=False)

    def template(self, *sets: str, namespace: str = "tkcc-system", values: str = "") -> list[dict[str, Any]]:
        given = (f"--set={item}" for item in sets)
        args = ["template", "tkcc", str(CHART), f"--namespace={namespace}", *IMAGES, *given]
        if values:
            args.append(f"--values={values}")
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return [doc for doc in yaml.safe_load_all(done.stdout) if doc]


@pytest.fixture
def chart(helm: str, tmp_path: Path) -> Helm:
    return Helm(helm, tmp_path)


def one(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    [found] = [obj for obj in objects if obj["kind"] == kind and (not name or obj["metadata"]["name"] == name)]
    return found


def kinds(objects: list[dict[str, Any]]) -> set[str]:
    return {obj["kind"] for obj in objects}


@pytest.mark.parametrize("sets", [[], EVERYTHING, ["watchNamespaces={a,b}"]], ids=["defaults", "everything", "two"])
def test_it_lints_strictly(chart: Helm, sets: list[str]):
    done = chart.run("lint", str(CHART), "--strict", *IMAGES, *(f"--set={item}" for item in sets))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_crds_are_the_generated_ones_and_stay_on_uninstall(chart: Helm):
    for path in (REPOSITORY / "crds").glob("*.yaml"):
        assert (CHART / "files" / "crds" / path.name).read_text() == path.read_text(), "run `make crds`"
    rendered = [obj for obj in chart.template() if obj["kind"] == "CustomResourceDefinition"]
    made = [yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / "crds").glob("*.yaml"))]
    assert {crd["metadata"]["name"] for crd in rendered} == {crd["metadata"]["name"] for crd in made}
    for crd in rendered:
        assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert crd in made, "nothing was lost on the way through helm"
    assert "CustomResourceDefinition" not in kinds(chart.template("crds.install=false"))


def test_the_operators_pod_is_restricted_and_small(chart: Helm):
    pod = one(chart.template(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"] == "256Mi"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    assert one(chart.template(), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_the_settings_file_is_what_the_operator_reads(chart: Helm, tmp_path: Path):
    objects = chart.template(
        "settings.tickS=2",
        "settings.torchHostPath=/opt/site-packages",
        "image.engine.repository=localhost/tkcc-engine",
        "image.engine.tag=abc",
        "image.pullPolicy=Never",
        "image.pullSecrets={one}",
        "networkPolicy.enabled=false",
    )
    path = tmp_path / "settings.yaml"
    path.write_text(one(objects, "ConfigMap")["data"]["settings.yaml"])
    have = settings.load({"TKCC_SETTINGS": str(path)})
    assert (have.tick_s, have.torch_host_path) == (2, "/opt/site-packages")
    assert have.images.engine == "localhost/tkcc-engine:abc"
    assert (have.images.pull_policy, have.images.pull_secrets) == ("Never", ("one",))
    assert not have.network_policies
    assert have.operator_namespace == "tkcc-system"
    lease = one(objects, "Role", "tkcc-lease")["rules"][0]
    assert lease["resourceNames"] == [have.lease_name], "the lease it may hold is the lease it asks for"
    env = {item["name"]: item for item in _container(objects)["env"]}
    assert env["TKCC_SETTINGS"]["value"] == "/etc/tkcc/settings.yaml"
    assert env["TKCC_IDENTITY"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_the_values_show_every_setting_with_the_operators_own_default(chart: Helm, tmp_path: Path):
    path = tmp_path / "settings.yaml"
    path.write_text(one(chart.template(), "ConfigMap")["data"]["settings.yaml"])
    have = settings.load({"TKCC_SETTINGS": str(path)})
    plain = settings.Settings(have.images, lease_name=have.lease_name)
    assert have == plain
    shown = yaml.safe_load((CHART / "values.yaml").read_text())["settings"]
    elsewhere = {"images", "operatorNamespace", "identity", "leaseName", "networkPolicies", "httpPort"}
    assert set(settings.dump(plain)) - elsewhere == set(shown)


@pytest.mark.parametrize("part", ["operator", "engine", "worker"])
def test_an_image_that_is_not_named_is_asked_for(chart: Helm, part: str):
    done = chart.run("template", "tkcc", str(CHART), *IMAGES, f"--set=image.{part}.repository=")
    assert done.returncode != 0
    assert f"set image.{part}.repository and .tag: no images are published" in done.stderr


def test_the_operator_reaches_the_api_server_where_it_is(chart: Helm):
    def ports(*sets: str) -> list[int]:
        policy = one(chart.template(*sets), "NetworkPolicy")
        return [item["port"] for item in policy["spec"]["egress"][0]["ports"]]

    assert ports() == [443, 6443]
    assert ports("networkPolicy.apiServerPorts={16443}") == [16443]


def test_changed_settings_exchange_the_pod(chart: Helm):
    def checksum(*sets: str) -> str:
        template = one(chart.template(*sets), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]["tkcc.dev/settings-checksum"]

    assert checksum() == checksum() != checksum("settings.tickS=2")


def test_all_namespaces_by_default_or_only_those_named_with_nothing_cluster_wide(chart: Helm):
    everywhere = chart.template()
    assert "ClusterRole" in kinds(everywhere)
    assert "--all-namespaces" in _container(everywhere)["args"]
    two = chart.template("watchNamespaces={a,b}")
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds(two)
    assert {obj["metadata"]["namespace"] for obj in two if obj["kind"] == "Role"} == {"a", "b", "tkcc-system"}
    args = _container(two)["args"]
    assert "--namespace=a" in args and "--namespace=b" in args and "--all-namespaces" not in args


def test_the_grants_are_explicit_and_none_is_for_a_kind_that_the_operator_never_touches(chart: Helm):
    touched = {(kind.group, kind.plural) for kind in resources.ALL}
    for rule in [*one(chart.template(), "ClusterRole")["rules"], *one(chart.template(), "Role", "tkcc-lease")["rules"]]:
        assert "*" not in json.dumps(rule)
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource.removesuffix("/status")) in touched
    granted = {
        (group, resource)
        for rule in one(chart.template(), "ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert not [item for item in touched if item not in granted and item[1] != "leases"]
    secrets = [rule for rule in one(chart.template(), "ClusterRole")["rules"] if "secrets" in rule["resources"]]
    assert not {"list", "watch"} & {verb for rule in secrets for verb in rule["verbs"]}


def test_a_disruption_budget_only_where_there_is_more_than_one(chart: Helm):
    assert "PodDisruptionBudget" not in kinds(chart.template())
    assert "PodDisruptionBudget" in kinds(chart.template("replicas=2"))


def test_network_policies_monitors_alerts_and_dashboard_are_flags(chart: Helm):
    plain = kinds(chart.template("networkPolicy.enabled=false"))
    assert not {"NetworkPolicy", "ServiceMonitor", "PrometheusRule"} & plain
    full = chart.template(*EVERYTHING)
    assert {"NetworkPolicy", "ServiceMonitor", "PrometheusRule"} <= kinds(full)
    assert json.loads(one(full, "ConfigMap", "tkcc-dashboard")["data"]["tkcc.json"])["title"] == "tkcc"


@pytest.mark.parametrize(
    "setting, want",
    [
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("replicas=0", "replicas"),
        ("settings.tick=5", "tick"),
        ("settings.torchHostPath=relative", "torchHostPath"),
        ("settings.rolling.maxSurge=0", "rolling"),
        ("watchNamespaces={Not_A_Name}", "watchNamespaces"),
        ("metrics.serviceMonitor.interval=soon", "interval"),
        ("networkPolicy.apiServerPorts={}", "apiServerPorts"),
        ("unknown=1", "unknown"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(chart: Helm, setting: str, want: str):
    done = chart.run("template", "tkcc", str(CHART), *IMAGES, f"--set={setting}")
    assert done.returncode != 0
    assert want in done.stderr


def _container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    container: dict[str, Any] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return container


def _exported() -> set[str]:
    """Every series name that the operator's page can have."""
    made = metrics.Metrics()
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + suffix for family in made.registry.collect() for suffix in suffixes.get(family.type, ("",))}


def _expressions() -> Iterator[str]:
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    for panel in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_alerts_and_dashboard_ask_only_for_series_that_exist():
    engine = {"tkcc_engine_time_per_output_token_seconds_bucket"}
    asked = {name for expression in _expressions() for name in re.findall(r"\btkcc_[a-z0-9_]+", expression)}
    assert len(asked) > 12
    assert asked - engine <= _exported()


def test_the_runbook_names_every_metric_every_alert_every_condition_and_every_end_of_a_run():
    text = (REPOSITORY / "docs" / "operator.md").read_text()
    families = {family.name for family in metrics.Metrics().registry.collect()}
    assert not [name for name in families if name not in text]
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert not [rule["alert"] for rule in alerts if rule["alert"] not in text]
    assert not [type_ for type_ in ConditionType if f"**{type_}**" not in text]
    assert not [outcome for outcome in RunOutcome if f"`{outcome}`" not in text]


@pytest.mark.parametrize(
    "argv",
    [
        ["check", "rules", CHART / "files" / "alerts.yaml"],
        ["test", "rules", Path(__file__).parent / "alerts_test.yaml"],
    ],
    ids=["they are rules", "they fire when they should"],
)
def test_the_alerts_as_prometheus_reads_them(argv: list[Any]):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package `prometheus`)")
    done = subprocess.run([promtool, *argv], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.shell
def test_the_api_server_accepts_all_of_it_under_pod_security_restricted(chart: Helm, plane: Any, namespace: str):
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    objects = chart.template("replicas=2", "crds.install=false", namespace=namespace)
    for obj in objects:
        if obj["kind"] in ("ClusterRole", "ClusterRoleBinding"):  # those of the session's own installation
            obj["metadata"]["name"] += f"-{namespace}"
    out = plane.kubectl("apply", "--validate=strict", "-f", "-", stdin=yaml.safe_dump_all(objects))
    assert "deployment.apps/tkcc-operator created" in out
    plane.kubectl("-n", namespace, "wait", "--for=condition=Progressing", "deployment/tkcc-operator", "--timeout=20s")
    pods = ""
    for _ in range(50):  # a pod that pod security refuses is never made
        pods = plane.kubectl("-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name=tkcc-operator", "-o", "name")
        if pods:
            break
    assert pods, plane.kubectl("-n", namespace, "get", "events")
