"""The offline search: finds a planted optimum, never repeats itself, and is replayed by its seed and the verdicts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tkcc.agents.compose import Genes
from tkcc.agents.proposer import Cell, Context
from tkcc.agents.scripted import ScriptedProposer, ScriptError
from tkcc.agents.search import OfflineProposer, genes_of
from tkcc.api.candidate import Candidate
from tkcc.api.report import Outcome, Report

MODEL = {"head_dim": 64, "intermediate_size": 1536}
CPU = Context(MODEL, "cpu", "float32", 1, ())


def verdict(candidate: Candidate, log_gain: float, outcome: Outcome = Outcome.ACCEPTED) -> Report:
    return Report(candidate.digest, "", "fast", outcome, "", pairs=8, log_gain=log_gain)


def planted(genes: Genes) -> float:
    """Native pays for decode, torch for prefill, and 16 bits where weights are read; one parameter has a best value."""
    native = genes.decode == "native"
    return (
        0.8 * native
        + 0.4 * (native and genes.weight_bits == 16)
        - 0.2 * (genes.prefill == "native")
        + 0.05 * (native and genes.chunk == 256)
    )


def search(
    seed: int, gain: Callable[[Genes], float], limit: int = 60, context: Context = CPU
) -> list[tuple[str, float]]:
    proposer = OfflineProposer(seed)
    found = []
    while len(found) < limit and (candidate := proposer.propose(context)) is not None:
        value = gain(genes_of(candidate))
        found.append((candidate.digest, value))
        proposer.observe(verdict(candidate, value, Outcome.ACCEPTED if value > 0 else Outcome.FUTILE))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_planted_optimum(seed: int) -> None:
    best = max(value for _, value in search(seed, planted, limit=40))
    assert best == pytest.approx(1.25)


def test_it_never_proposes_the_same_twice_and_ends() -> None:
    digests = [digest for digest, _ in search(0, planted, limit=2000)]
    assert len(digests) == len(set(digests)) and 30 < len(digests) < 2000


def test_the_same_seed_and_verdicts_give_the_same_candidates() -> None:
    assert search(7, planted) == search(7, planted)
    assert search(7, planted) != search(8, planted)


def test_a_wrong_candidate_is_no_parent() -> None:
    proposer = OfflineProposer(0)
    first = proposer.propose(CPU)
    assert first is not None
    proposer.observe(Report(first.digest, "", "fast", Outcome.WRONG, "logit error"))
    second = proposer.propose(CPU)
    assert second is not None and first.digest not in second.parents


@pytest.mark.parametrize(
    "context",
    [
        Context(MODEL, "cpu", "float16", 1, ()),
        Context(MODEL, "cpu", "float32", 4, ()),
        Context(MODEL, "cuda", "bfloat16", 1, ()),
    ],
    ids=["float16", "four threads", "cuda"],
)
def test_the_c_step_is_proposed_only_where_it_works(context: Context) -> None:
    proposer = OfflineProposer(0)
    for _ in range(10):
        candidate = proposer.propose(context)
        if candidate is None:
            break
        assert "STEP_C" not in candidate.source
        proposer.observe(verdict(candidate, 0.1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_c_step_comes_first_where_it_works_and_reads_each_gene_of_its_dtype(dtype: str) -> None:
    context = Context({**MODEL, "head_dim": 24}, "cpu", dtype, 1, ())
    first = OfflineProposer(0).propose(context)
    assert first is not None and "STEP_C" in first.source and first.params["decode"] == "native"
    genes = [genes_of(c) for c in _proposed(context, 60)]
    widths, dot_rows = {g.weight_bits for g in genes}, {g.dot_rows for g in genes}
    assert (len(widths) > 1, len(dot_rows) > 1) == ((True, False) if dtype == "float32" else (False, True))


def _proposed(context: Context, limit: int) -> list[Candidate]:
    proposer, found = OfflineProposer(0), []
    while len(found) < limit and (candidate := proposer.propose(context)) is not None:
        found.append(candidate)
        proposer.observe(verdict(candidate, planted(genes_of(candidate))))
    return found


@pytest.mark.parametrize("decode_ratio, first", [(0.8, "native-decode"), (0.3, "native-prefill")])
def test_the_phase_with_most_of_the_time_comes_first(decode_ratio: float, first: str) -> None:
    cells = (Cell("decode", 1, 1, 100, decode_ratio), Cell("prefill", 1, 200, 200, 1 - decode_ratio))
    found = OfflineProposer(0).propose(replace(CPU, cells=cells, dtype="bfloat16"))
    assert found is not None and found.operators == (first,)


def test_a_script_is_read_in_the_order_of_its_names(tmp_path) -> None:
    (tmp_path / "b.py").write_text("def build(s, w, c): ...")
    (tmp_path / "a.py").write_text("def build(s, w, c): pass")
    (tmp_path / "a.json").write_text('{"n": 3}')
    proposer = ScriptedProposer(tmp_path)
    first, second, third = (proposer.propose(CPU) for _ in range(3))
    assert first and second and third is None
    assert (first.params, "pass" in first.source, second.params) == ({"n": 3}, True, {})


@pytest.mark.parametrize("params", ["[1]", "{", '{"a": [1]}'])
def test_bad_parameters_of_a_script_are_named(tmp_path, params: str) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "a.json").write_text(params)
    with pytest.raises(ScriptError, match="a"):
        ScriptedProposer(tmp_path)


def test_a_script_without_candidates_is_refused(tmp_path) -> None:
    with pytest.raises(ScriptError, match=r"no \*\.py file"):
        ScriptedProposer(tmp_path)
    with pytest.raises(ScriptError, match="no such directory"):
        ScriptedProposer(tmp_path / "missing")
