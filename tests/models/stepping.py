"""Drives a forward pass as the engine does, for tests: one sequence over pages in no order."""

import random
from collections.abc import Sequence

import torch

from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tensors import make_batch, make_kv_cache
from tkcc.models.forward import BuildSpec, ForwardPass, ModelConfig

BLOCK_TOKENS = 16


def build_spec(config: ModelConfig, dtype: torch.dtype = torch.float32, num_blocks: int = 64) -> BuildSpec:
    return BuildSpec(config, dtype, torch.device("cpu"), BLOCK_TOKENS, num_blocks, num_threads=1)


class Stepper:
    """A forward pass with a KV cache of its own. Unused pages hold large values: reading one shows."""

    def __init__(self, forward: ForwardPass, spec: BuildSpec, seed: int = 0) -> None:
        self.forward, self.spec = forward, spec
        self.kv = make_kv_cache(spec)
        self.kv.k_lnksd.fill_(50.0)
        self.kv.v_lnksd.fill_(50.0)
        self._pages = random.Random(seed).sample(range(1, spec.num_blocks), spec.num_blocks - 1)

    def take_pages(self, num_tokens: int) -> tuple[int, ...]:
        count = -(-num_tokens // self.spec.block_tokens)
        taken, self._pages = self._pages[:count], self._pages[count:]
        return tuple(taken)

    def prefill(self, *requests: StepRequest) -> torch.Tensor:
        return self._run(StepKind.PREFILL, requests)

    def decode(self, *requests: StepRequest) -> torch.Tensor:
        return self._run(StepKind.DECODE, requests)

    def all_logits(self, tokens: Sequence[int], batch: int = 64) -> torch.Tensor:
        """[T, V]: one prefill, then every position again as a decode of its own, many in a ragged batch."""
        pages = self.take_pages(len(tokens))
        self.prefill(StepRequest(tuple(tokens), 0, pages))
        parts = [StepRequest((token,), i, pages) for i, token in enumerate(tokens)]
        return torch.cat([self.decode(*parts[i : i + batch]) for i in range(0, len(parts), batch)])

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        pages = self.take_pages(len(tokens) + count)
        out = [int(self.prefill(StepRequest(tuple(tokens), 0, pages)).argmax())]
        while len(out) < count:
            out.append(int(self.decode(StepRequest((out[-1],), len(tokens) + len(out) - 1, pages)).argmax()))
        return out

    def _run(self, kind: StepKind, requests: tuple[StepRequest, ...]) -> torch.Tensor:
        with torch.inference_mode():
            batch = make_batch(StepBatch(kind, requests), self.spec.block_tokens, self.spec.device)
            return (
                self.forward.prefill(batch, self.kv)
                if kind is StepKind.PREFILL
                else self.forward.decode(batch, self.kv)
            )
