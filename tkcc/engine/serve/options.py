"""The settings of one serving process, as the command line gives them."""

from dataclasses import dataclass, field
from pathlib import Path

from tkcc.engine.serve.engine import Limits


@dataclass(frozen=True, slots=True)
class ServeOptions:
    model: Path
    artifact: Path | None = None
    served_model_name: str | None = None  # None: the model directory's name
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    admin_port: int = 8001
    device: str = "cpu"
    dtype: str = "auto"  # "auto": the artifact's, else the checkpoint's own
    block_tokens: int = 16
    kv_cache_mib: int | None = None  # None: 1024 on a CPU, 85 % of what is free after the weights elsewhere
    max_context: int | None = None  # tokens; None: what the model and the KV cache allow
    max_running: int = 16
    chunk_tokens: int = 512
    limits: Limits = field(default_factory=Limits)
    request_timeout_s: float = 600.0
    max_body_bytes: int = 16 << 20
    record: int = 0  # requests kept for replay; 0: recording is off
    log_requests: int = 10_000
    drain_accept_s: float = 5.0
    drain_finish_s: float = 60.0
    wait_for_model: bool = False  # a checkpoint that cannot be loaded is tried again, not given up
