"""Every shipped policy keeps what a policy must keep."""

from __future__ import annotations

from tests.conformance.policy_conformance import PolicyConformance
from trimtab.agents.reactive import ReactivePolicy
from trimtab.agents.registry import make_policy, policy_names
from trimtab.agents.static import StaticPolicy
from trimtab.agents.stock import StockFcfsPolicy, StockPriorityPolicy


class TestStatic(PolicyConformance):
    make = StaticPolicy


class TestStockFcfs(PolicyConformance):
    make = StockFcfsPolicy


class TestStockPriority(PolicyConformance):
    make = StockPriorityPolicy


class TestReactive(PolicyConformance):
    make = ReactivePolicy


def test_every_registered_policy_is_in_this_suite() -> None:
    tested = {case.make for case in PolicyConformance.__subclasses__()}
    assert {type(make_policy(name)) for name in policy_names()} <= tested
