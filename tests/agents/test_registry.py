"""Policies by name."""

from __future__ import annotations

import pytest

from trimtab.agents.registry import make_policy, policy_names
from trimtab.engine_bridge.errors import FlagError


def test_the_four_policies_are_there_under_their_own_names() -> None:
    assert policy_names() == ("static", "stock-fcfs", "stock-priority", "reactive")
    assert [make_policy(name).name for name in policy_names()] == list(policy_names())


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("reactiv", "reactive"), ("Static", "static"), ("stock-fifo", "stock-fcfs")],
)
def test_a_wrong_name_gets_a_suggestion(wrong: str, meant: str) -> None:
    with pytest.raises(FlagError, match=f'did you mean "{meant}"') as fault:
        make_policy(wrong)
    assert "\n" not in str(fault.value)


def test_stock_policies_switch_the_rules() -> None:
    rules = {name: make_policy(name).engine_rules for name in policy_names()}
    assert rules == {
        "static": "fair",
        "stock-fcfs": "fcfs",
        "stock-priority": "priority",
        "reactive": "fair",
    }
