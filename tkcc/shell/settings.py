"""What the operator's installer decides and an InferenceDeployment cannot: images, who may be reached, paces.

One YAML file (`--set` of the chart ends up there), each top-level field of which an environment variable may replace:
`tick_s` is TKCC_TICK_S. Unknown keys and bad values are refused by name.
"""

import os
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from tkcc.api.codec import BORDER, from_dict, to_dict

ENV_PREFIX = "TKCC_"
FILE_VARIABLE = "TKCC_SETTINGS"


@dataclass(frozen=True, config=BORDER)
class Images:
    engine: str = Field(min_length=1)  # serving pods and tiers
    worker: str = Field(min_length=1)  # the recompile Job
    pull_policy: str = Field(default="IfNotPresent", pattern="^(Always|IfNotPresent|Never)$")
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, config=BORDER)
class Drain:
    """How a serving pod leaves: it goes on accepting while endpoints change, then finishes what runs."""

    accept_s: int = Field(default=5, ge=0, le=300)
    finish_s: int = Field(default=120, ge=1, le=3600)


@dataclass(frozen=True, config=BORDER)
class Rolling:
    """How a role's pods are exchanged. Where no spare pod fits (GPUs), use surge 0 and unavailable 1."""

    max_surge: int = Field(default=1, ge=0, le=100)
    max_unavailable: int = Field(default=0, ge=0, le=100)

    def __post_init__(self) -> None:
        if self.max_surge == self.max_unavailable == 0:
            raise ValueError(
                "rolling.maxSurge and rolling.maxUnavailable must not both be 0: no pod could be exchanged"
            )


@dataclass(frozen=True, config=BORDER)
class Scrape:
    timeout_s: float = Field(default=3.0, gt=0, le=60)
    concurrency: int = Field(default=8, ge=1, le=64)  # pods asked at once, per InferenceDeployment
    probe_timeout_s: float = Field(default=30.0, gt=0, le=600)


@dataclass(frozen=True, config=BORDER)
class Settings:
    images: Images
    operator_namespace: str = "tkcc-system"  # of the lease, and whence the admin ports are reached
    identity: str = "tkcc-operator"  # of the lease's holder: the pod's name
    lease_name: str = "tkcc-operator"
    lease_duration_s: int = Field(default=15, ge=3, le=300)
    # A directory of the nodes with torch's site-packages, mounted read-only into engine pods whose image was built
    # with TORCH=mounted. A hostPath: the pods' namespace must allow it (Pod Security `privileged`).
    torch_host_path: str = Field(default="", pattern="^(|/.*)$")
    tick_s: float = Field(default=0.0, ge=0, le=3600)  # between two turns of an object; 0: as its spec asks
    drain: Drain = field(default_factory=Drain)
    rolling: Rolling = field(default_factory=Rolling)
    scrape: Scrape = field(default_factory=Scrape)
    worker_resources: dict[str, dict[str, str]] = field(
        default_factory=lambda: {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    )
    network_policies: bool = True  # made beside the pods; they bind only where the cluster's network enforces them
    http_port: int = Field(default=8080, ge=1, le=65535)
    watch_limit_s: int = Field(default=210, ge=10, le=3600)  # a watch silent for longer fails the liveness probe


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the file that $TKCC_SETTINGS names (none: defaults) under the environment. Raises ValueError that
    names the file, the field and what was expected there."""
    path = environ.get(FILE_VARIABLE, "")
    data: Any = {}
    if path:
        try:
            data = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as err:
            raise ValueError(f"{FILE_VARIABLE}={path}: {err}") from err
        if not isinstance(data, dict):
            raise ValueError(f"{FILE_VARIABLE}={path}: expected a mapping of settings, got {type(data).__name__}")
    for item in fields(Settings):
        variable = ENV_PREFIX + item.name.upper()
        if variable in environ:
            data.pop(item.name, None)
            data[_camel(item.name)] = yaml.safe_load(environ[variable])
    try:
        return from_dict(Settings, data)
    except ValueError as err:
        raise ValueError(f"{path or 'settings'}: {err}") from err


def dump(settings: Settings) -> dict[str, Any]:
    """As the file says it: for start-up logs and tests."""
    return to_dict(settings)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.title() for word in rest)
