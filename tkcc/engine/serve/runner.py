"""Runs scheduled steps on the device. It holds the forward pass and its KV cache, and knows no queue and no text."""

import torch

from tkcc.engine.serve.request import SampledToken
from tkcc.engine.serve.sampling import sample
from tkcc.engine.serve.scheduler import ScheduledStep
from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tensors import make_batch
from tkcc.models.forward import BuildSpec, ForwardPass, KVCache


class StepRunner:
    """Not thread-safe: one thread runs all steps."""

    def __init__(self, spec: BuildSpec, forward: ForwardPass, kv: KVCache) -> None:
        self.spec = spec
        self._forward = forward
        self._kv = kv

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> list[SampledToken | None]:
        """Forward, sample: a token for each request that gets one. Raises whatever the forward pass raises."""
        logits_bv = self._logits(step.batch)
        rows = [i for i, samples in enumerate(step.samples) if samples]
        if not rows:
            return [None] * len(step.requests)
        if len(rows) < len(step.requests):
            logits_bv = logits_bv[torch.tensor(rows, device=logits_bv.device)]
        tokens: list[SampledToken | None] = [None] * len(step.requests)
        for i, token in zip(rows, sample(logits_bv, [step.requests[i] for i in rows]), strict=True):
            tokens[i] = token
        return tokens

    @torch.inference_mode()
    def warm_up(self, prompt_tokens: int) -> None:
        """Run one prefill and one decode, so that the first request pays for no lazy set-up. Overwrites blocks 1, 2 ...

        Raises whatever the forward pass raises.
        """
        S = self.spec.block_tokens
        prompt_tokens = min(prompt_tokens, (self.spec.num_blocks - 1) * S - 1)
        blocks = tuple(range(1, 1 + -(-(prompt_tokens + 1) // S)))
        self._logits(StepBatch(StepKind.PREFILL, (StepRequest((0,) * prompt_tokens, 0, blocks),)))
        self._logits(StepBatch(StepKind.DECODE, (StepRequest((0,), prompt_tokens, blocks),))).sum().item()  # sync

    def _logits(self, step: StepBatch) -> torch.Tensor:
        batch = make_batch(step, self.spec.block_tokens, self.spec.device)
        if step.kind is StepKind.PREFILL:
            return self._forward.prefill(batch, self._kv)
        return self._forward.decode(batch, self._kv)
