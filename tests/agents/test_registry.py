"""Policies by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.bundles import zero_bundle
from trimtab.agents import registry
from trimtab.agents.bundle import write_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.registry import make_policy, policy_names
from trimtab.engine_bridge.errors import BundleError, FlagError
from trimtab.engine_bridge.plan import load_plan


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the shipped bundle's."""
    monkeypatch.setattr(registry, "SHIPPED_BUNDLE", tmp_path / "default")
    return tmp_path / "default"


def test_the_policies_are_there_under_their_own_names(shipped: Path) -> None:
    write_bundle(zero_bundle(load_plan()), shipped)
    assert policy_names() == ("static", "stock-fcfs", "stock-priority", "reactive", "learned")
    assert [make_policy(name).name for name in policy_names()] == list(policy_names())


def test_the_shipped_policy_fits_the_shipped_plan() -> None:
    policy = make_policy("learned")
    policy.reset(load_plan(), 0)
    assert isinstance(policy, Guard)


def test_an_installation_without_a_trained_policy_says_so(shipped: Path) -> None:
    with pytest.raises(BundleError, match=r"learned.*no trained policy.*bundle:FOLDER"):
        make_policy("learned")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("reactiv", "reactive"),
        ("Static", "static"),
        ("stock-fifo", "stock-fcfs"),
        ("bundel:here", "bundle:here"),
        ("Bundle:here", "bundle:here"),
        ("bundle:", "bundle:FOLDER"),
    ],
)
def test_a_wrong_name_gets_a_suggestion(wrong: str, meant: str) -> None:
    with pytest.raises(FlagError, match=f'did you mean "{meant}"') as fault:
        make_policy(wrong)
    assert "\n" not in str(fault.value)


def test_a_wrong_folder_gets_a_suggestion(shipped: Path) -> None:
    write_bundle(zero_bundle(load_plan()), shipped)
    with pytest.raises(BundleError, match='did you mean "default"'):
        make_policy(f"bundle:{shipped.parent / 'defualt'}")


def test_stock_policies_switch_the_rules() -> None:
    names = ("static", "stock-fcfs", "stock-priority", "reactive")
    rules = {name: make_policy(name).engine_rules for name in names}
    assert rules == {
        "static": "fair",
        "stock-fcfs": "fcfs",
        "stock-priority": "priority",
        "reactive": "fair",
    }
