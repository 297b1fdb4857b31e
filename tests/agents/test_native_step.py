"""The C step and every torch option against the baseline, on paged steps of odd shapes."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tkcc.agents.compose import Genes, compose
from tkcc.engine.artifact import load_candidate
from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tensors import make_batch, make_kv_cache
from tkcc.engine.tier.holder import is_norm
from tkcc.models import llama
from tkcc.models.checkpoint import weight_shapes
from tkcc.models.forward import BuildSpec, Cell, ModelConfig

CPU = torch.device("cpu")
S, N = 8, 40  # slots of a block, blocks
SMALL = ModelConfig(3, 48, 6, 2, 16, 80, 203, 1e-5, 10_000.0, 256, True)
WIDE_HEADS = replace(SMALL, num_heads=4, num_kv_heads=4, head_dim=32, tie_word_embeddings=False, qk_norm=True)
MANY_PER_GROUP = replace(SMALL, num_heads=9, num_kv_heads=1, hidden_size=33, intermediate_size=112, vocab_size=64)
CONFIGS = {"small": SMALL, "wide heads, qk norm, own head": WIDE_HEADS, "nine heads a group": MANY_PER_GROUP}
NATIVE = Genes(decode="native", prefill="native")
GENES = {
    "native": NATIVE,
    "native, 16 bits": replace(NATIVE, weight_bits=16, huge_pages=True, chunk=64, row_block=48),
    "native decode only": replace(NATIVE, prefill="torch", chunk=256, prefetch_bytes=0),
    "torch, fused": Genes(fuse_qkv=True, fuse_gate_up=True),
    "torch, packed": Genes(linear="packed", fuse_gate_up=True),
}


@pytest.fixture(scope="module", autouse=True)
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    old = os.environ.get("TKCC_BUILD_CACHE")
    path: Path = tmp_path_factory.mktemp("build-cache")
    os.environ["TKCC_BUILD_CACHE"] = str(path)
    yield
    if old is None:
        del os.environ["TKCC_BUILD_CACHE"]
    else:
        os.environ["TKCC_BUILD_CACHE"] = old


def steps(vocab: int) -> list[StepBatch]:
    """A ragged prefill, a chunk behind a cached prefix that spans several chunks of attention, then decode."""
    rng = torch.Generator().manual_seed(1)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (n,), generator=rng).tolist())

    long, short = tuple(range(1, 22)), (30, 31, 32)
    prefills = [
        StepBatch(StepKind.PREFILL, (StepRequest(tokens(130), 0, long), StepRequest(tokens(5), 0, short))),
        StepBatch(StepKind.PREFILL, (StepRequest(tokens(21), 130, long),)),
    ]
    decodes = [
        StepBatch(StepKind.DECODE, (StepRequest(tokens(1), 5 + i, short), StepRequest(tokens(1), 151 + i, long)))
        for i in range(3)
    ]
    return prefills + decodes


@pytest.mark.parametrize("genes", GENES.values(), ids=GENES.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_composed_pass_computes_what_the_baseline_does(config: ModelConfig, genes: Genes) -> None:
    rng = torch.Generator().manual_seed(2)
    weights = {
        # Exact in bfloat16, as in a checkpoint of that type; norms are never narrowed.
        name: 1 + 0.1 * torch.randn(shape, generator=rng)
        if is_norm(name)
        else (torch.randn(shape, generator=rng) / shape[-1] ** 0.5).bfloat16().float()
        for name, shape in weight_shapes(config)
    }
    candidate = compose(genes, "", (), ())
    spec = BuildSpec(config, torch.float32, CPU, S, N, 1, candidate.params)
    cells = (Cell("decode", 2, 1, 100, 0.5), Cell("prefill", 1, 24, 100, 0.5))
    with torch.inference_mode():
        passes = [
            llama.build(spec, weights, cells),
            load_candidate(candidate.source, candidate.params)(spec, weights, cells),
        ]
        caches = [make_kv_cache(spec) for _ in passes]
        for one, kv in zip(passes, caches, strict=True):
            one.prepare(kv)
            for cache in (kv.k_lnksd, kv.v_lnksd):
                cache.fill_(7.0)  # what is not written must not be read
        for step in steps(config.vocab_size):
            batch = make_batch(step, S, CPU)
            outputs = [
                (one.prefill if step.kind is StepKind.PREFILL else one.decode)(batch, kv)
                for one, kv in zip(passes, caches, strict=True)
            ]
            torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-5, atol=2e-5)
        for a, b in ((caches[0].k_lnksd, caches[1].k_lnksd), (caches[0].v_lnksd, caches[1].v_lnksd)):
            torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)


def test_weights_that_16_bits_cannot_hold_stay_in_32() -> None:
    rng = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=rng) for name, shape in weight_shapes(SMALL)}
    candidate = compose(replace(NATIVE, weight_bits=16), "", (), ())
    spec = BuildSpec(SMALL, torch.float32, CPU, S, N, 1, candidate.params)
    built = load_candidate(candidate.source, candidate.params)(spec, weights, ())
    assert built.bits == 32  # type: ignore[attr-defined]
