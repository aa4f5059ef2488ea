"""Every kind of wrong plan is one line that names file, key, value, bound and remedy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import load_plan, plan_from_yaml

DEFAULT = (Path(__file__).parent / "sample.yaml").read_text()

# What is replaced in the default plan, by what, and what the one line must say.
WRONG: list[tuple[str, str, tuple[str, ...]]] = [
    # single values
    ("weight: 720", "weight: -1", ("tiers.T0.weight", "-1", "at least 1e-06")),
    ("weight: 720", "weight: 0", ("tiers.T0.weight: 0,", "at least")),
    ("weight: 720", "weight: .nan", ("tiers.T0.weight", "nan", "a finite number")),
    ("weight: 720", "weight: .inf", ("tiers.T0.weight", "inf", "a finite number")),
    ("weight: 720", 'weight: "720"', ("tiers.T0.weight", '"720"', "a number", "quotes")),
    ("weight: 720", "weight: true", ("tiers.T0.weight", "true", "a number")),
    ("weight: 720", "weight: [1, 2]", ("tiers.T0.weight", "[1, 2]", "a number")),
    ("weight: 720", "weight:", ("tiers.T0.weight", "null", "a number")),
    ("weight: 720", "weight: 1_000", ("tiers.T0.weight", '"1_000"', "a number")),
    ("ttft_ms: 800", "ttft_ms: -5", ("tiers.T0.targets.ttft_ms", "-5", "above 0")),
    ("attainment: 0.995", "attainment: 99.5", ("targets.attainment", "99.5", "at most 1")),
    ("budget_tokens: 2900", "budget_tokens: 2900.5", ("prefill.budget_tokens", "a whole number")),
    ("budget_tokens: 2900", "budget_tokens: 1e30", ("prefill.budget_tokens", "a whole number")),
    ("budget_tokens: 2900", f"budget_tokens: {10**30}", ("budget_tokens", "at most 2147483647")),
    ("protected: true", "protected: yes", ("tiers.T0.protected", '"yes"', "true or false")),
    ("mode: refuse", "mode: refus", ("tiers.T3.shed.mode", "refus", 'did you mean "refuse"')),
    ("eviction: scaled_age", "eviction: lfu", ("retention.eviction", "lfu", "'lru'")),
    ("factor: 0.77", "factor: 1.5", ("retention.classes.T1-tool_use.factor", "1.5", "at most 1")),
    ("output_quantile: 0.6", "output_quantile: 1.0", ("prediction.output_quantile", "below 1")),
    ("interval_s: 2", "interval_s: 0", ("controller.interval_s: 0,", "at least 0.05")),
    ("max_ms: 500", "max_ms: 1e400", ("backoff.max_ms", "inf", "a finite number")),
    # keys
    ("weight: 720", "wieght: 720", ("tiers.T0.wieght", "a known key", 'did you mean "weight"')),
    ("rules:", "rulez:", ("rulez", "a known key", 'did you mean "rules"')),
    ("name: default", "nmae: default", ("nmae", 'did you mean "name"')),
    ("ttft_ms: 800", "ttft_s: 0.8", ("tiers.T0.targets.ttft_s", 'did you mean "ttft_ms"')),
    ("    weight: 720\n", "", ("tiers.T0.weight", "must be given")),
    ("weight: 720", "weight: 1\n    weight: 2", ("line 10", "weight", "given once", "line 9")),
    ("  T1:\n", "  T0:\n", ("T0: must be given once",)),
    ("  T0:\n", "  paid chat:\n", ("tiers.paid chat", "A-Z a-z 0-9")),
    ("  T0:\n", "  1:\n", ('"1"', "text, because it is a key", "quotes")),
    # references, sums, bounds
    ("pool: batch", "pool: btch", ("tiers.T2.pool", "btch", 'did you mean "batch"')),
    ("pool: free", "pool: batch", ("pools.free", "0.1", "the pool of a tier")),
    ("interactive: 0.7", "interactive: 0.8", ("pools.*", "1.1", "1 in sum", "divide each by 1.1")),
    ("prefill_share: 0.3", "prefill_share: 0.2", ("tiers.*.prefill_share", "0.9", "1 in sum")),
    ("{tier: T3,", "{tier: T9,", ("retention.classes.T3.tier", "T9", "one of T0, T1, T2, T3")),
    ("    T1: {tier: T1, factor: 0.29}\n", "", ("retention.classes", "T1 has no catch-all", "add")),
    ("weight: 720", "weight: 20000", ("tiers.T0.weight", "20000", "controller.bounds.weights")),
    ("{floor: 0.1, ceiling: 10000", "{floor: 9, ceiling: 8", ("weights.ceiling", "at least")),
    ("{floor: 0.02,", "{floor: 0.4,", ("bounds.kv_fractions.floor", "0.4", "at most 1/3")),
    ("min_chunk_tokens: 64", "min_chunk_tokens: 9999", ("min_chunk_tokens", "9999", "2900")),
    ("tpot_ms: 40, ", "", ("tiers.T0.targets.tpot_ms", "given for a protected tier")),
    ("ttft_ms: 800, tpot_ms: 40,", "", ("tiers.T0.targets",)),
    ("{e2e_ms: 240000, attainment: 0.9}", "{}", ("tiers.T2.shed.mode", "demote", "never")),
    ("low: true", "low: true\n    protected: true", ("tiers.T2", "protected")),
    ("pools:", "default_tier: T7\npools:", ("default_tier", "T7", "one of T0")),
    ("pools:", "tenants: {a: {tier: t1}}\npools:", ("tenants.a.tier", 'did you mean "T1"')),
    ("pools:", "engine: {max_num_batched_tokens: 512}\npools:", ("prefill.budget_tokens", "512")),
    # YAML
    ("name: default", "name: [", ("valid YAML",)),
    ("name: default", "name: !!python/object:os.system x", ("line 3", "valid YAML", "tag")),
    ("name: default", "name: *nobody", ("line 3", "valid YAML", "nobody")),
    ("name: default", "name: default\n---\nname: b", ("valid YAML",)),
    ("name: default", "? [a]\n: b", ("a list or mapping", "text, because it is a key")),
    ("name: default", "name: a\tb\x01", ("valid YAML",)),
    ("name: default", "name: " + "[" * 5000, ("valid YAML",)),
    ("name: default", "name: &a [*a]", ("name", "must be text")),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_wrong_plan_is_one_clear_line(
    tmp_path: Path, old: str, new: str, said: tuple[str, ...]
) -> None:
    assert old in DEFAULT
    file = tmp_path / "mine.yaml"
    file.write_text(DEFAULT.replace(old, new, 1))
    with pytest.raises(PlanError) as caught:
        load_plan(file)
    line = str(caught.value)
    assert line.startswith(str(file))
    assert [words for words in said if words not in line] == []
    assert line.isprintable()
    assert "pydantic" not in line


def _nothing(file: Path) -> None: ...


def _folder(file: Path) -> None:
    file.mkdir()


FILES = {
    "absent": (_nothing, "a file that exists"),
    "folder": (_folder, "a readable file"),
    "empty": (lambda f: f.write_bytes(b""), "a mapping"),
    "comment": (lambda f: f.write_bytes(b"# nothing\n"), "a mapping"),
    "list": (lambda f: f.write_bytes(b"- a\n"), "a mapping"),
    "number": (lambda f: f.write_bytes(b"7"), "a mapping"),
    "binary": (lambda f: f.write_bytes(b"PAR1\xff\xfe\x00"), "UTF-8"),
    "huge": (lambda f: f.write_bytes(b"#" * (1 << 21)), "at most 1048576 bytes"),
    "bomb": (
        lambda f: f.write_text(
            "a0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
        ),
        "a known key",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_plan_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    make, said = FILES[kind]
    file = tmp_path / "mine.yaml"
    make(file)
    with pytest.raises(PlanError, match=said) as caught:
        load_plan(file)
    assert str(file) in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_unknown_name_suggests_a_shipped_plan() -> None:
    with pytest.raises(PlanError, match=r'plan publshed: .*did you mean "published"'):
        load_plan("publshed")


def test_text_that_looks_like_something_else_stays_text() -> None:
    text = DEFAULT.replace("name: default", "name: no", 1).replace("T3", "off")
    plan = plan_from_yaml(text)
    assert plan.name == "no"
    assert plan.tier_names[3] == "off"


LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3)
)
DATA = yaml.safe_load(DEFAULT)


def _assert_plan_or_one_line(text: str) -> None:
    with contextlib.suppress(PlanError):
        plan_from_yaml(text)
        return
    with pytest.raises(PlanError) as caught:
        plan_from_yaml(text)
    assert str(caught.value).isprintable()


@given(st.dictionaries(st.sampled_from(tuple(DATA)) | st.text(max_size=5), VALUES, max_size=6))
def test_any_mapping_is_a_plan_or_one_line(data: dict[str, object]) -> None:
    text = yaml.safe_dump({**DATA, **data}, allow_unicode=True)
    _assert_plan_or_one_line(text)


@given(st.text(max_size=200))
def test_any_text_is_a_plan_or_one_line(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_yaml(text)
    assert str(caught.value).isprintable()


@given(st.data())
def test_a_damaged_plan_is_a_plan_or_one_line(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(DEFAULT)))
    cut = data.draw(st.integers(0, 40))
    put = data.draw(st.text(alphabet=":{}[]-#&*!|>'\"%@`,? \n\tTx0.", max_size=6))
    _assert_plan_or_one_line(DEFAULT[:at] + put + DEFAULT[at + cut :])
