"""Every shipped policy keeps what a policy must keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.bundles import random_bundle, zero_bundle
from tests.conformance.policy_conformance import PLAN, PolicyConformance
from trimtab.agents import registry
from trimtab.agents.bundle import write_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.learned import LearnedPolicy
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


class TestLearned(PolicyConformance):
    """A drawn network, whose biases move it without data too: see `TestLearnedZero` for that."""

    moves_without_data = True

    @staticmethod
    def make() -> LearnedPolicy:
        return LearnedPolicy(random_bundle(PLAN, 5))


class TestLearnedZero(PolicyConformance):
    @staticmethod
    def make() -> LearnedPolicy:
        return LearnedPolicy(zero_bundle(PLAN))


class TestGuardedReactive(PolicyConformance):
    @staticmethod
    def make() -> Guard:
        return Guard(ReactivePolicy())


class TestGuardedLearned(PolicyConformance):
    """Acts from the first interval on, so that the suite sees more than a probation."""

    moves_without_data = True

    @staticmethod
    def make() -> Guard:
        settings = GuardSettings(probation_s=0.0, ramp_s=4.0)
        return Guard(LearnedPolicy(random_bundle(PLAN, 6)), settings)


def test_every_registered_policy_is_in_this_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SHIPPED_BUNDLE", tmp_path)
    write_bundle(zero_bundle(PLAN), tmp_path)
    tested = {type(case.make()) for case in PolicyConformance.__subclasses__()}
    assert {type(make_policy(name)) for name in policy_names()} <= tested
