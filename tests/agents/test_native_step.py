"""The C step and every torch option against the baseline, on paged steps of odd shapes."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tkcc.agents import templates
from tkcc.agents.compose import Genes, compose
from tkcc.engine.artifact import load_candidate
from tkcc.engine.step import StepBatch, StepKind, StepRequest
from tkcc.engine.tensors import make_batch, make_kv_cache
from tkcc.engine.tier.holder import is_norm
from tkcc.kernels import native
from tkcc.models import llama
from tkcc.models.checkpoint import weight_shapes
from tkcc.models.forward import BuildSpec, Cell, ModelConfig

CPU = torch.device("cpu")
S, N = 8, 40  # slots of a block, blocks
SMALL = ModelConfig(3, 48, 6, 2, 16, 80, 203, 1e-5, 10_000.0, 256, True)
WIDE_HEADS = replace(SMALL, num_heads=4, num_kv_heads=4, head_dim=32, tie_word_embeddings=False, qk_norm=True)
MANY_PER_GROUP = replace(SMALL, num_heads=9, num_kv_heads=1, hidden_size=33, intermediate_size=112, vocab_size=64)
# No width is a multiple of a vector, and an odd number of inputs leaves half a pair of 16-bit weights.
ODD = replace(SMALL, num_heads=4, head_dim=20, hidden_size=45, intermediate_size=75, qk_norm=True)
CONFIGS = {
    "small": SMALL,
    "wide heads, qk norm, own head": WIDE_HEADS,
    "nine heads a group": MANY_PER_GROUP,
    "odd widths": ODD,
}
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


def checkpoint(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights in float32; all but norms are exact in bfloat16, as in a checkpoint of that type."""
    rng = torch.Generator().manual_seed(2)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=rng)
        if is_norm(name)
        else (torch.randn(shape, generator=rng) / shape[-1] ** 0.5).bfloat16().float()
        for name, shape in weight_shapes(config)
    }


@pytest.mark.parametrize("genes", GENES.values(), ids=GENES.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_composed_pass_computes_what_the_baseline_does(config: ModelConfig, genes: Genes) -> None:
    weights = checkpoint(config)
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


@pytest.mark.parametrize("dot_rows", [1, 3])
@pytest.mark.parametrize("config", [WIDE_HEADS, ODD], ids=["wide heads", "odd widths"])
def test_in_bfloat16_it_is_nearer_to_float32_than_the_baseline_is(config: ModelConfig, dot_rows: int) -> None:
    exact = {name: w.bfloat16().float() for name, w in checkpoint(config).items()}
    narrow = {name: w.bfloat16() for name, w in exact.items()}
    candidate = compose(replace(NATIVE, dot_rows=dot_rows), "", (), ())
    cells = (Cell("decode", 2, 1, 100, 1.0),)
    wide_spec = BuildSpec(config, torch.float32, CPU, S, N, 1, candidate.params)
    spec = replace(wide_spec, dtype=torch.bfloat16)
    with torch.inference_mode():
        truth = llama.build(wide_spec, exact, cells)
        both = [
            llama.build(spec, narrow, cells),
            load_candidate(candidate.source, candidate.params)(spec, narrow, cells),
        ]
        true_kv, kvs = make_kv_cache(wide_spec), [make_kv_cache(spec) for _ in both]
        for kv in (true_kv, *kvs):
            kv.k_lnksd.fill_(7.0), kv.v_lnksd.fill_(7.0)
        errors: list[list[torch.Tensor]] = [[], []]
        written: set[int] = set()
        for step in [*steps(config.vocab_size), *many_decodes(config.vocab_size)]:
            batch = make_batch(step, S, CPU)
            # Padding of page tables is not content: more of it must change nothing.
            batch = replace(batch, pages_bp=torch.nn.functional.pad(batch.pages_bp, (0, 3)))
            written |= set(batch.slots_t.tolist())
            true_bv = (truth.prefill if step.kind is StepKind.PREFILL else truth.decode)(batch, true_kv)
            for one, kv, found in zip(both, kvs, errors, strict=True):
                logits_bv = (one.prefill if step.kind is StepKind.PREFILL else one.decode)(batch, kv)
                assert logits_bv.dtype == torch.bfloat16
                found.append((logits_bv.float() - true_bv).abs().amax(-1))
    baseline_n, native_n = (torch.cat(found) for found in errors)
    assert len(baseline_n) > 60 and baseline_n.median() > 0
    assert native_n.median() <= baseline_n.median()
    assert native_n.quantile(0.99) <= 1.5 * baseline_n.quantile(0.99)
    for name in ("k_lnksd", "v_lnksd"):
        baseline_error, native_error = ((getattr(kv, name).float() - getattr(true_kv, name)).abs() for kv in kvs)
        assert native_error.mean() <= baseline_error.mean() and native_error.max() <= 1.5 * baseline_error.max()
        untouched_n = sorted(set(range(N * S)) - written)
        slots = getattr(kvs[1], name).transpose(2, 3).flatten(1, 2)  # [L, N * S, K, D]
        assert bool((slots[:, untouched_n] == 7.0).all()) and bool((slots[:, sorted(written)] != 7.0).any(-1).all())


def many_decodes(vocab: int) -> list[StepBatch]:
    """Behind `steps`: seven requests at a time, the last blocks their own."""
    rng = torch.Generator().manual_seed(4)

    def request(i: int, n: int, start: int) -> StepRequest:
        return StepRequest(tuple(torch.randint(0, vocab, (n,), generator=rng).tolist()), start, (33 + i,))

    prefill = StepBatch(StepKind.PREFILL, tuple(request(i, 1 + i % 3, 0) for i in range(7)))
    decodes = [
        StepBatch(StepKind.DECODE, tuple(request(i, 1, 1 + i % 3 + step) for i in range(7))) for step in range(5)
    ] * 2
    return [prefill, *decodes]


def test_values_are_narrowed_bit_by_bit_as_torch_does() -> None:
    flags = {"MODEL_BITS": 16, "WEIGHT_BITS": 16, "DOT_ROWS": 1, "HEAD_DIM": 16, "ROW_BLOCK": 8, "PREFETCH_BYTES": 0}
    flags |= {"CHUNK": 32, "QK_NORM": 0}
    probe = (
        "void probe(const float *x, element *y, long n) { for (long i = 0; i < n; i += 16) store(y + i, LOAD(x + i)); }"
    )
    options = (*native.FLAGS, "-O1", *(f"-D{name}={value}" for name, value in flags.items()))
    library = native.load(templates.read("step.c") + probe, options)
    rng = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=rng).to(torch.int32)
    ties = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16) + 0x8000
    x = torch.cat((bits, ties, ties - 1, ties + 1)).view(torch.float32)  # denormals, infinities and NaN among them
    y = torch.empty(len(x), dtype=torch.bfloat16)
    library.probe(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(len(x)))
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
