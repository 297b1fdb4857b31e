"""What a tier is told at its start, and the limits it holds candidates to."""

from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
MEMORY_FACTOR = 4  # a candidate may keep a few packed copies
MEMORY_FLOOR_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds on one candidate. Times are wall-clock seconds."""

    build_s: float = 180.0  # import, build() and prepare() in the builder, the compiler included
    load_s: float = 60.0  # import and build() in a runner, with everything compiled
    prepare_s: float = 60.0
    judgement_s: float = 900.0  # one judgement, whatever the judge does in it
    memory_bytes: int = 0  # private memory; 0: MEMORY_FACTOR times the weights, plus MEMORY_FLOOR_BYTES
    scratch_bytes: int = 256 * MIB
    processes: int = 64  # and threads, of a runner or builder
    file_bytes: int = 128 * MIB
    log_bytes: int = 4 * MIB  # written to stdout and stderr before it is killed for flooding
    queue: int = 16  # judgements waiting
    known: int = 4096  # candidates and reports remembered; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class TierConfig:
    model_dir: Path
    tier: str  # "fast" or "slow"
    num_layers: int  # the model's first layers; 0 = all
    dtype: str  # "float32" or "bfloat16"
    num_threads: int
    token: str
    cache_dir: Path  # builds, by digest
    judge_entry: str  # "module:function", called with its channel's descriptor; all that the engine knows of the judge
    num_spares: int = 1
    device: str = "cpu"
    is_confined: bool = True
    limits: TierLimits = field(default_factory=TierLimits)
