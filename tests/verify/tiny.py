"""A small random model, its tier, and candidates as the tests write them."""

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tkcc.api.candidate import Candidate
from tkcc.api.report import AlphaTicket, Report
from tkcc.api.workload import Quantiles, RecordedRequest, Recording, Workload
from tkcc.worker.local_tiers import tiers
from tkcc.worker.tiers import Setup, Tier

BUILD_S = 12.0


def write_tiny_model(directory: Path) -> Path:
    import torch

    from tkcc.models.random_model import Shape, write_random_model

    shape = Shape(
        layers=3, hidden=64, heads=4, kv_heads=2, intermediate=176, max_positions=2048, head_dim=16, vocab=512,
        tied=True, qk_norm=False,
    )  # fmt: skip
    write_random_model(directory, shape, 0, torch.float32)
    return directory


def recording(num_requests: int = 40) -> Recording:
    """Mixed lengths, some sharing a prefix."""
    rng = random.Random(0)
    requests = []
    for i in range(num_requests):
        prompt = rng.randint(8, 160)
        shared = rng.random() < 0.5 and prompt > 40
        hashes = tuple(range(1, 3)) if shared else tuple(1000 + 100 * i + k for k in range(prompt // 16))
        requests.append(RecordedRequest(30 * i, prompt, rng.randint(4, 24), 32 if shared and i > 5 else 0, hashes))
    return Recording(16, "synthetic", tuple(requests))


def workload() -> Workload:
    q = Quantiles(80, 80, 150, 160)
    return Workload(q, q, Quantiles(2, 2, 3, 4), 200, 600, 60, 40)


@dataclass(frozen=True)
class TinyTier:
    tier: Tier
    model_dir: Path
    norm_sum: float  # of the last norm's true weights

    def judge(self, candidate: Candidate, pairs: int = 4, stage: str = "screen") -> Report:
        ticket = AlphaTicket(candidate.digest[:8], 0.05, 0.005, pairs)
        return self.tier.judge(candidate, stage, ticket, lambda state, count: None)


@contextlib.contextmanager
def start_tiny_tier(scratch: Path) -> Iterator[TinyTier]:
    model_dir = write_tiny_model(scratch / "model")
    command = [sys.executable, "-m", "tkcc", "tier", "--model", str(model_dir), "--tier", "fast"]
    with tiers({"fast": [*command, "--build-s", str(BUILD_S)]}, scratch) as addresses:
        address = addresses["fast"]
        tier = Tier("fast", address.url, address.token, Setup(workload(), recording(), None), address.last_words)
        try:
            tier.prepare()
            yield TinyTier(tier, model_dir, _norm_sum(model_dir))
        finally:
            tier.close()


def _norm_sum(model_dir: Path) -> float:
    import torch

    from tkcc.models.checkpoint import load_weights

    return float(load_weights(model_dir, "cpu", torch.float32)["model.norm.weight"].sum())


PRELUDE = '''
import torch
from tkcc.models import llama
from tkcc.models.forward import KVCache


class Wrapped:
    """The baseline, with whatever a test changes."""

    def __init__(self, spec, weights, cells):
        self.spec, self.weights = spec, weights
        self.inner = llama.build(spec, weights, cells)

    def prepare(self, kv):
        self.inner.prepare(kv)

    def prefill(self, batch, kv):
        return self.inner.prefill(batch, kv)

    def decode(self, batch, kv):
        return self.inner.decode(batch, kv)
'''

BUILD = """
def build(spec, weights, cells):
    return Changed(spec, weights, cells)
"""


def changed(body: str, imports: str = "") -> Candidate:
    """A candidate that is the baseline but for the methods in `body`."""
    return Candidate(f"{imports}\n{PRELUDE}\n\nclass Changed(Wrapped):\n{body}\n\n{BUILD}", {})
