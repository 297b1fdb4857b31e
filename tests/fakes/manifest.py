"""An artifact's manifest with every field filled in, for tests that are about some of them."""

from typing import Any

from tkcc.api.candidate import Artifact
from tkcc.api.workload import Quantiles, Workload

NINE = Quantiles(9, 9, 9, 9)
WORKLOAD = Workload(NINE, NINE, Quantiles(1, 1, 1, 1), 500, 60, 60, 60)


def manifest(digest: str, workload: Workload = WORKLOAD, **changes: Any) -> Artifact:
    fields: dict[str, Any] = {
        "digest": digest,
        "params": {},
        "model_digest": "m" * 64,
        "engine_version": "0.1.0",
        "device": "cpu: fake",
        "dtype": "float32",
        "workload": workload,
        "workload_digest": workload.digest,
        "verdict": "Unjudged",
        "judge_version": "0",
        "judge_source_hash": "0",
        "traffic_source": "synthetic",
    }
    return Artifact(**{**fields, **changes})
