"""Composed candidates: the same genes are the same candidate, and every composition computes what the baseline does."""

import itertools
from dataclasses import replace

import pytest

from tkcc.agents.compose import Genes, canonical, compose
from tkcc.agents.operators import OPERATORS
from tkcc.agents.search import genes_of

NATIVE = Genes(decode="native", prefill="native")


def test_genes_that_are_not_expressed_do_not_make_another_candidate() -> None:
    quiet = compose(NATIVE, "a", (), ())
    assert compose(replace(NATIVE, fuse_qkv=True, linear="packed"), "b", ("x",), ("y",)).digest == quiet.digest
    assert compose(replace(NATIVE, weight_bits=16), "a", (), ()).digest != quiet.digest


def test_a_module_holds_only_what_it_uses() -> None:
    native, torch_only = compose(NATIVE, "", (), ()).source, compose(Genes(), "", (), ()).source
    assert "class TorchPass" not in native and "STEP_C" in native
    assert "STEP_C" not in torch_only and "class TorchPass" in torch_only


@pytest.mark.parametrize("genes", [Genes(), NATIVE, replace(NATIVE, prefill="torch", linear="packed", chunk=64)])
def test_genes_are_read_back_from_a_candidate(genes: Genes) -> None:
    assert genes_of(compose(genes, "", (), ())) == canonical(genes)


def test_a_foreign_candidate_starts_from_the_baselines_genes() -> None:
    foreign = replace(compose(NATIVE, "", (), ()), source="def build(s, w, c): ...")
    assert genes_of(foreign) == genes_of(None) == Genes()


def test_every_composition_is_python_within_the_size_limit() -> None:
    for decode, prefill, fused, linear in itertools.product(
        ("torch", "native"), ("torch", "native"), (False, True), ("plain", "packed")
    ):
        genes = Genes(decode, prefill, fuse_qkv=fused, linear=linear)  # type: ignore[arg-type]
        source = compose(genes, "", (), ()).source
        compile(source, "candidate.py", "exec")
        assert len(source) < 100_000


def test_an_operator_that_changes_nothing_proposes_nothing() -> None:
    by_name = {operator.name: operator for operator in OPERATORS}
    assert by_name["bf16-weights"].apply(Genes()) is None  # no native part reads it
    assert by_name["native-decode"].apply(NATIVE) is None
    assert by_name["bf16-weights"].apply(NATIVE) == replace(NATIVE, weight_bits=16)
