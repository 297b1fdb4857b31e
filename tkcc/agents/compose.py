"""Genes become a candidate: one readable module, composed of the templates that it needs.

A gene is one choice. The same genes give the same source and parameters, hence the same digest; parameters that the
source does not read are left out, so that two gene sets which mean the same are the same candidate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from tkcc.agents import templates
from tkcc.api.candidate import Candidate

Engine = Literal["torch", "native"]


@dataclass(frozen=True, slots=True)
class Genes:
    """The choices that a composed forward pass is made of; the defaults are the baseline's."""

    decode: Engine = "torch"
    prefill: Engine = "torch"
    # torch
    fuse_qkv: bool = False
    fuse_gate_up: bool = False
    linear: Literal["plain", "packed"] = "plain"
    compile: bool = False
    # native
    weight_bits: int = 32
    dot_rows: int = 1
    row_block: int = 96
    prefetch_bytes: int = 2048
    chunk: int = 128
    huge_pages: bool = False

    def differences(self) -> tuple[str, ...]:
        """Names of the genes that are not the baseline's, as "name=value"."""
        plain = Genes()
        return tuple(
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        )


TORCH_GENES = ("fuse_qkv", "fuse_gate_up", "linear", "compile")
NATIVE_GENES = ("weight_bits", "dot_rows", "row_block", "prefetch_bytes", "chunk", "huge_pages")


def canonical(genes: Genes) -> Genes:
    """Genes that are not expressed set back to their defaults."""
    plain = Genes()
    engines = (genes.decode, genes.prefill)
    idle = (() if "torch" in engines else TORCH_GENES) + (() if "native" in engines else NATIVE_GENES)
    return replace(genes, **{name: getattr(plain, name) for name in idle})


def compose(genes: Genes, hypothesis: str, operators: tuple[str, ...], parents: tuple[str, ...]) -> Candidate:
    genes = canonical(genes)
    engines = (genes.decode, genes.prefill)
    title = ", ".join(genes.differences()) or "the baseline's choices"
    parts = [f'"""A forward pass of a Llama-family decoder: {title}."""\n', templates.read("header.py.txt")]
    read: list[str] = ["decode", "prefill"]
    if "torch" in engines:
        parts.append(templates.read("torch_pass.py.txt"))
        read += TORCH_GENES
    if "native" in engines:
        imports = "import contextlib\nimport ctypes\nimport math\nimport mmap\n"
        parts[1] = parts[1].replace("import ctypes\nimport math\n", imports)
        parts[1] = parts[1].replace("from tkcc.models", "from tkcc.kernels import native\nfrom tkcc.models", 1)
        parts.append(f'STEP_C = r"""\n{templates.read("step.c")}"""\n')
        parts.append(templates.read("native_pass.py.txt"))
        read += NATIVE_GENES
    parts.append(_build(genes))
    params: Mapping[str, int | str | bool] = {name: getattr(genes, name) for name in read}
    return Candidate(
        source="\n\n".join(parts),
        params=dict(params),
        hypothesis=hypothesis,
        parents=parents,
        operators=operators,
    )


_BUILD_ONE = """def build(spec: BuildSpec, weights: Mapping[str, Tensor], cells: Sequence[Cell]) -> ForwardPass:
    return {make}
"""

_BUILD_TWO = '''class ByPhase:
    """Prefill by one pass, decode by the other; both read and write the same cache."""

    def __init__(self, prefill: ForwardPass, decode: ForwardPass) -> None:
        self.parts = (prefill, decode)
        self.prefill, self.decode = prefill.prefill, decode.decode

    def prepare(self, kv: KVCache) -> None:
        for part in self.parts:
            part.prepare(kv)


def build(spec: BuildSpec, weights: Mapping[str, Tensor], cells: Sequence[Cell]) -> ForwardPass:
    return ByPhase({prefill}, {decode})
'''


def _build(genes: Genes) -> str:
    def make(engine: Engine, phase: str) -> str:
        return "NativePass(spec, weights)" if engine == "native" else f'TorchPass(spec, weights, cells, "{phase}")'

    if genes.decode == genes.prefill == "native":
        return _BUILD_ONE.format(make="NativePass(spec, weights)")
    if genes.decode == genes.prefill and genes.linear == "plain" and not genes.compile:
        return _BUILD_ONE.format(make=make("torch", "decode"))
    return _BUILD_TWO.format(prefill=make(genes.prefill, "prefill"), decode=make(genes.decode, "decode"))
