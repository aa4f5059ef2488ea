"""A plan file with values changed in place: what stays, what is added, what is written anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.engine_bridge.plan import load_plan, plan_from_yaml
from trimtab.training.tuning.plan_text import plan_text, rewrite
from trimtab.training.tuning.space import changed, shown

SHORT = """\
# My plan.
name: mine   # not yours
tiers:
  gold:
    weight: 20 # heavy
    pool: all
    prefill_share: 1.0
    targets: {ttft_ms: 800}
    shed: {mode: refuse}
pools: {all: 1.0}

# The end.
"""


def tuned(text: str, changes: dict[tuple[str, ...], float]) -> str:
    wanted = changed(plan_from_yaml(text), changes)
    values = {path: shown(value) for path, value in changes.items()}
    found = rewrite(text, values, wanted=wanted, note="one\ntwo")
    assert plan_from_yaml(found).digest == wanted.digest
    assert found.startswith("# one\n# two\n")
    return found.removeprefix("# one\n# two\n")


def test_only_the_value_changes() -> None:
    found = tuned(SHORT, {("tiers", "gold", "weight"): 33.5})
    assert found == SHORT.replace("weight: 20 #", "weight: 33.5 #")


def test_a_value_that_the_file_leaves_to_the_default_is_added_in_its_style() -> None:
    found = tuned(
        SHORT,
        {
            ("tiers", "gold", "shed", "at_fraction"): 0.7,
            ("slack", "slack_fraction"): 0.25,
            ("slack", "low_tier_chunk_share"): 0.5,
            ("prefill", "budget_tokens"): 512,
        },
    )
    assert "shed: {at_fraction: 0.7, mode: refuse}" in found
    assert "slack: {low_tier_chunk_share: 0.5, slack_fraction: 0.25}" in found
    assert "# The end." in found


def test_a_key_is_added_to_a_block_at_its_indentation() -> None:
    text = SHORT + "slack:\n    # By half.\n    slack_fraction: 0.5\n"
    found = tuned(text, {("slack", "low_tier_chunk_share"): 0.25})
    assert "    low_tier_chunk_share: 0.25\n    slack_fraction: 0.5\n" in found


def test_windows_line_ends_and_other_scripts_survive() -> None:
    text = SHORT.replace("My plan", "Мой план 🚢").replace("\n", "\r\n")
    found = tuned(text, {("tiers", "gold", "weight"): 2.0})
    assert found == text.replace("weight: 20 #", "weight: 2 #")


def test_names_that_look_like_numbers_are_quoted() -> None:
    text = SHORT.replace("gold:", '"7":')
    found = tuned(text, {("tiers", "7", "shed", "at_fraction"): 0.7})
    assert '"7":' in found
    text = text.replace("    shed: {mode: refuse}\n", "")
    assert "shed" in tuned(text, {("tiers", "7", "shed", "at_fraction"): 0.7})


def test_a_value_behind_an_alias_is_written_out() -> None:
    text = """
name: twins
tiers:
  a: &tier {weight: 1, pool: all, prefill_share: 0.5, targets: {ttft_ms: 800}}
  b: *tier
pools: {all: 1.0}
"""
    # In place it would change both.
    found = tuned(text, {("tiers", "a", "weight"): 3.0})
    plan = plan_from_yaml(found)
    assert (plan.tiers["a"].weight, plan.tiers["b"].weight) == (3, 1)


@pytest.mark.parametrize("name", [None, "default", "published"])
def test_the_text_of_a_shipped_plan_is_that_plan(name: str | None) -> None:
    assert plan_from_yaml(plan_text(name)).digest == load_plan(name).digest


def test_the_text_of_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SHORT.encode())
    assert plan_text(str(path)) == SHORT
