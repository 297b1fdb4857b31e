import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkcc.stats.alpha import AlphaLedger, BudgetSpent


@pytest.mark.parametrize("most", [1, 2, 7])
def test_a_bounded_campaign_makes_so_many_decisions_and_no_more(most):
    ledger = AlphaLedger(0.05, most)
    assert [ledger.draw(str(n)) for n in range(most)] == [0.05 / most] * most
    with pytest.raises(BudgetSpent, match=f"all {most} decisions"):
        ledger.draw("one more")
    assert ledger.draw("0") == 0.05 / most, "an old one is still itself"
    assert ledger.spent == pytest.approx(0.05)


names = st.lists(st.text(max_size=3), max_size=300)


@given(names, st.none() | st.integers(1, 400), st.floats(0.001, 0.5))
def test_shares_never_sum_to_more_than_the_total(drawn, max_decisions, total):
    ledger = AlphaLedger(total, max_decisions)
    for name in drawn:
        try:
            assert ledger.draw(name) > 0.0
        except BudgetSpent:
            assert max_decisions is not None and len(ledger.shares) == max_decisions
    assert ledger.spent <= total * (1 + 1e-9)


@given(names)
def test_one_name_has_one_share_however_often_it_draws(drawn):
    ledger = AlphaLedger()
    first = {name: ledger.draw(name) for name in drawn}
    spent = ledger.spent
    assert {name: ledger.draw(name) for name in drawn} == first
    assert ledger.spent == spent


@given(names, st.integers(1, 400))
def test_a_replayed_ledger_goes_on_where_it_was(drawn, max_decisions):
    ledger = AlphaLedger(0.05, max_decisions)
    for name in drawn[:max_decisions]:
        ledger.draw(name)
    again = AlphaLedger.replay(ledger.shares, 0.05, max_decisions)
    assert (again.shares, again.spent) == (ledger.shares, ledger.spent)


def test_a_journal_that_overdraws_is_refused():
    with pytest.raises(ValueError, match="more than"):
        AlphaLedger.replay([("a", 0.04), ("b", 0.04)], 0.05, None)
    with pytest.raises(ValueError, match="two different"):
        AlphaLedger.replay([("a", 0.01), ("a", 0.02)], 0.05, None)


@pytest.mark.parametrize("total, max_decisions", [(0.0, None), (1.0, None), (0.05, 0)])
def test_a_budget_that_is_none_is_refused(total, max_decisions):
    with pytest.raises(ValueError):
        AlphaLedger(total, max_decisions)
