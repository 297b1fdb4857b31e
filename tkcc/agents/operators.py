"""Rewrite operators: named moves on the genes of a composed forward pass, each with the reason why it may pay.

An operator applies only where the result differs; whether it pays is measured, never assumed. Order is a prior: what
moves most of the time on most machines comes first, and what touches only the phase that has less of the workload's
time somewhat later.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tkcc.agents.compose import Genes, canonical
from tkcc.agents.proposer import Context


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    hypothesis: str
    rewrite: Callable[[Genes], Genes]
    is_possible: Callable[[Context], bool]
    phase: str = ""  # "decode" or "prefill" where it touches that one alone

    def apply(self, genes: Genes) -> Genes | None:
        """The rewritten genes; None where the rewrite changes nothing."""
        changed = canonical(self.rewrite(genes))
        return changed if changed != canonical(genes) else None


def _on_cpu(context: Context) -> bool:
    return context.device == "cpu"


def _native_is_possible(context: Context) -> bool:
    """The C step is for float32 and bfloat16, and one thread."""
    return _on_cpu(context) and context.dtype in ("float32", "bfloat16") and context.threads == 1


def _native_in(dtype: str) -> Callable[[Context], bool]:
    return lambda context: _native_is_possible(context) and context.dtype == dtype


def _set(
    name: str, hypothesis: str, is_possible: Callable[[Context], bool], *, phase: str = "", **genes: object
) -> Operator:
    return Operator(name, hypothesis, lambda g: replace(g, **genes), is_possible, phase)  # type: ignore[arg-type]


OPERATORS: tuple[Operator, ...] = (
    _set(
        "native-decode",
        "decode in one call of C: attention reads pages in place, no tensor is made between operations, and products"
        " of few rows stream packed weights instead of calling a matrix library",
        _native_is_possible,
        decode="native",
        phase="decode",
    ),
    _set(
        "native-prefill",
        "prefill in one call of C: packed weights stay in cache for a block of rows, attention never copies pages; in"
        " bfloat16 two products an instruction, summed in float32",
        _native_is_possible,
        prefill="native",
        phase="prefill",
    ),
    _set(
        "bf16-weights",
        "weights of a bfloat16 checkpoint are exact in 16 bits: kept so and widened in registers, half the bytes are"
        " read for the same result",
        _native_in("float32"),
        weight_bits=16,
    ),
    _set(
        "fma-decode",
        "steps of few rows wait for memory, not for products: their inputs can stay in float32",
        _native_in("bfloat16"),
        dot_rows=8,
        phase="decode",
    ),
    _set(
        "packed-linear",
        "oneDNN's own weight layout, made once: a product of few rows need not reorder its weights each time",
        _on_cpu,
        linear="packed",
    ),
    _set("fuse-qkv", "one product for q, k and v: fewer calls, wider outputs", lambda _: True, fuse_qkv=True),
    _set("fuse-gate-up", "one product for gate and up: the input is read once", lambda _: True, fuse_gate_up=True),
    _set(
        "huge-pages", "weights in 2 MiB pages: fewer address translations while they stream", _on_cpu, huge_pages=True
    ),
    _set(
        "row-block-48",
        "fewer rows at a time: activations stay in the inner cache",
        _on_cpu,
        row_block=48,
        phase="prefill",
    ),
    _set(
        "row-block-192",
        "more rows at a time: weights pass the cache less often",
        _on_cpu,
        row_block=192,
        phase="prefill",
    ),
    _set("prefetch-none", "the hardware's prefetcher alone: fewer instructions", _on_cpu, prefetch_bytes=0),
    _set("prefetch-far", "weights asked for 8 KiB ahead: more reads in flight", _on_cpu, prefetch_bytes=8192),
    _set("chunk-64", "context in chunks of 64: scores and keys stay in the innermost cache", _on_cpu, chunk=64),
    _set("chunk-256", "context in chunks of 256: fewer rescalings of the softmax", _on_cpu, chunk=256),
    _set(
        "inductor-mlp",
        "norm, gate, up and down of each layer compiled by Inductor at the workload's own shapes",
        lambda _: True,
        compile=True,
    ),
    _set("torch-decode", "decode in torch operations after all", lambda _: True, decode="torch", phase="decode"),
    _set(
        "torch-prefill",
        "prefill in torch operations after all: the library's product may win",
        lambda _: True,
        prefill="torch",
        phase="prefill",
    ),
    _set(
        "f32-weights",
        "weights in 32 bits: nothing to widen where products are compute-bound",
        _native_in("float32"),
        weight_bits=32,
    ),
    _set(
        "dot-all-rows",
        "products of bfloat16 pairs for every number of rows: half the instructions",
        _native_in("bfloat16"),
        dot_rows=1,
    ),
)


LATER = 1.5  # places, for an operator of the lighter phase


def by_promise(context: Context) -> list[Operator]:
    """Those that are possible, the most promising first."""
    share = {phase: sum(c.weight_ratio for c in context.cells if c.phase == phase) for phase in ("decode", "prefill")}
    lighter = "decode" if share["decode"] < share["prefill"] else "prefill"
    places = {o.name: i + LATER * (o.phase == lighter) for i, o in enumerate(OPERATORS)}
    return sorted((o for o in OPERATORS if o.is_possible(context)), key=lambda o: places[o.name])
