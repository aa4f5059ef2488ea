"""Entries of the audit log: exact both ways, small, and refused where they were changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.audit_entry import (
    AuditError,
    decision_entry,
    decode_decision,
    decode_start,
    digest_of,
    encode_allocation,
    encode_telemetry,
    start_entry,
    text_of,
)
from trimtab.agents.audit_read import AuditTail, audit_files, read_audit
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.verdict import GuardMode, GuardReason, Verdict
from trimtab.engine_bridge.allocation import Allocation

STATIC = Allocation.static(PLAN)
MOVED = replace(STATIC, weights=(9000.0, 90.0, 5.0, 1.0), prefill_budget_tokens=7000, version=7)
VERDICT = Verdict(
    apply=MOVED,
    proposed=None,
    reasons=(GuardReason.STALE, GuardReason.SLEW),
    mode=GuardMode.CANARY,
    exposure=0.25,
    fell_back=False,
)
_floats = st.floats(allow_nan=True, allow_infinity=True)


def start(**changes: Any) -> dict[str, Any]:
    facts = {
        "unix_s": 1.5,
        "engine": "a",
        "plan": PLAN,
        "policy": "reactive",
        "bundle_digest": None,
        "settings": GuardSettings(probation_s=3.0, reach={"weights": 0.5}),
        "mode": GuardMode.SHADOW,
        "seed": 4,
    }
    return json.loads(text_of(start_entry(**{**facts, **changes})))


def decision(**changes: Any) -> dict[str, Any]:
    facts = {
        "number": 3,
        "unix_s": 2.5,
        "static": STATIC,
        "telemetry": telemetry(PLAN),
        "fresh": True,
        "verdict": VERDICT,
        "applied": MOVED,
        "contact": "controlling",
    }
    return json.loads(text_of(decision_entry(**{**facts, **changes})))


def same(one: object, other: object) -> bool:
    """Equal to the bit: NaN is itself, -0 is not 0, 1 is not 1.0."""
    return repr(one) == repr(other)


@given(time_s=_floats, attainment=_floats, share=_floats, count=st.integers(0, 2**80))
def test_telemetry_comes_back_bit_for_bit(
    time_s: float, attainment: float, share: float, count: int
) -> None:
    tier = tier_telemetry(attainment=attainment, met_tokens=share, arrivals=count)
    seen = telemetry(
        PLAN,
        [tier] * len(PLAN.tiers),
        time_s=time_s,
        read_back=True,
        applied=replace(MOVED, weights=(share, 1.0, 2, -0.0)),
    )
    back = decode_decision(decision(telemetry=seen), STATIC, "here").telemetry
    assert same(back, seen)


def test_a_decision_comes_back() -> None:
    back = decode_decision(decision(policy_error="no answer"), STATIC, "here")
    assert (back.number, back.unix_s, back.fresh, back.contact) == (3, 2.5, True, "controlling")
    assert (back.verdict, back.applied, back.policy_error) == (VERDICT, MOVED, "no answer")


def test_a_tick_without_telemetry_verdict_or_answer_comes_back() -> None:
    back = decode_decision(decision(telemetry=None, verdict=None, applied=None), STATIC, "here")
    assert (back.telemetry, back.verdict, back.applied) == (None, None, None)


def test_the_static_plan_is_only_its_version() -> None:
    assert encode_allocation(STATIC, STATIC) == 0
    assert encode_allocation(replace(STATIC, version=12), STATIC) == 12
    encoded = decision(applied=replace(STATIC, version=12))
    assert decode_decision(encoded, STATIC, "here").applied == replace(STATIC, version=12)
    assert isinstance(encode_allocation(MOVED, STATIC), list)


def test_numbers_of_numpy_are_numbers() -> None:
    seen = telemetry(PLAN, steps=np.int64(4), busy_fraction=np.float64(0.1), kv_use_fraction=1)
    back = decode_decision(decision(telemetry=seen), STATIC, "here").telemetry
    assert back is not None
    assert (back.steps, back.busy_fraction) == (4, 0.1)


def test_a_decision_takes_four_kilobytes_at_most() -> None:
    rng = np.random.default_rng(0)
    names = [name for name in tier_telemetry().__dataclass_fields__]
    tiers = [tier_telemetry(**dict.fromkeys(names, float(rng.random()))) for _ in PLAN.tiers]
    entry = decision_entry(
        number=10**6,
        unix_s=1.8e9 + 1 / 3,
        static=STATIC,
        telemetry=telemetry(PLAN, tiers, applied=MOVED),
        fresh=True,
        verdict=replace(VERDICT, proposed=MOVED),
        applied=MOVED,
        contact="controlling",
    )
    assert len(text_of(entry)) < 4000


def test_what_a_run_begins_with_comes_back() -> None:
    plan, settings, mode = decode_start(start(), "here")
    assert plan.model_dump(exclude={"tenants"}) == PLAN.model_dump(exclude={"tenants"})
    assert (settings.probation_s, dict(settings.reach)) == (3.0, {"weights": 0.5})
    assert mode is GuardMode.SHADOW


def test_a_changed_digit_is_named() -> None:
    entry = decision()
    entry["telemetry"]["tiers"][1][0] += 1
    with pytest.raises(AuditError, match=r"here: digest: .* changed after it was written"):
        decode_decision(entry, STATIC, "here")


def test_a_digit_that_makes_a_number_endless_is_named() -> None:
    entry = json.loads(text_of(decision()).replace('"engine":[2.0', '"engine":[2e999'))
    with pytest.raises(AuditError, match="beyond every float"):
        decode_decision(entry, STATIC, "here")


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("verdict"),
        lambda entry: entry["verdict"].update(mode="bold"),
        lambda entry: entry["verdict"].update(reasons=["boredom"]),
        lambda entry: entry["verdict"].update(apply=[1.0]),
        lambda entry: entry.update(verdict=3),
        lambda entry: entry.update(number=None),
        lambda entry: _retold(entry, {"engine": [], "applied": 0, "tiers": []}),
        lambda entry: _retold(entry, {"engine": 1}),
    ],
)
def test_a_damaged_decision_is_refused(damage: Callable[[dict[str, Any]], object]) -> None:
    entry = decision()
    damage(entry)
    with pytest.raises(AuditError, match=r"here: .*decision entry of this version"):
        decode_decision(entry, STATIC, "here")


def _retold(entry: dict[str, Any], seen: dict[str, Any]) -> None:
    """Other telemetry, with the digest that belongs to it."""
    entry.update(telemetry=seen, digest=digest_of(seen))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "here: format: 2, must be 1; read it with the Trimtab that wrote it"),
        ({"fields": {"telemetry": ["time_s"]}}, "here: fields.telemetry"),
        ({"plan": {"name": "x"}}, "here: "),
        ({"settings": {"patience_s": 1}}, "patience_s"),
        ({"mode": "bold"}, "bold"),
    ],
)
def test_a_start_of_another_version_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AuditError) as caught:
        decode_start({**start(), **changes}, "here")
    assert said in str(caught.value)


def test_equal_telemetry_has_an_equal_digest() -> None:
    one = telemetry(PLAN, step_ms_mean=math.nan)
    assert decision(telemetry=one)["digest"] == digest_of(encode_telemetry(one, STATIC))
    other = telemetry(PLAN, step_ms_mean=0.0)
    assert decision(telemetry=other)["digest"] != decision(telemetry=one)["digest"]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def begun(run: str = "1", engine: str = "a") -> str:
    return text_of({**start(engine=engine), "run": run})


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["not json"], "a-00000001.jsonl line 1: "),
        ([begun(), '{"kind":"dance"}'], 'line 2: kind: "dance", must be one of start, decision'),
        ([begun(), "[1]"], "line 2: kind"),
        ([text_of(decision())], "must be start in the first line of a file"),
    ],
)
def test_a_file_that_is_no_audit_log_is_refused(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    path = write(tmp_path / "a-00000001.jsonl", *lines)
    with pytest.raises(AuditError) as caught:
        _ = [list(run.entries()) for run in read_audit([path])]
    assert said in str(caught.value)


def test_runs_are_told_apart_and_put_together(tmp_path: Path) -> None:
    write(tmp_path / "a-00000002.jsonl", begun("1"), text_of(decision(number=2)), begun("2"))
    write(tmp_path / "a-00000001.jsonl", begun("1"), text_of(decision(number=1)))
    write(tmp_path / "b-00000001.jsonl", begun("1", "b"))
    runs = read_audit([tmp_path])
    assert [(run.engine, run.run) for run in runs] == [("a", "1"), ("a", "2"), ("b", "1")]
    told = [entry["number"] for _, entry in runs[0].entries() if entry["kind"] == "decision"]
    assert told == [1, 2]
    assert [run.engine for run in read_audit([tmp_path], engine="b")] == ["b"]


def test_an_unknown_engine_and_an_empty_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="no audit files"):
        audit_files([tmp_path])
    with pytest.raises(AuditError, match="no such file or folder"):
        audit_files([tmp_path / "nowhere"])
    write(tmp_path / "alpha-00000001.jsonl", begun(engine="alpha"))
    with pytest.raises(AuditError, match='did you mean "alpha"'):
        read_audit([tmp_path], engine="alhpa")


def test_a_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a-00000001.jsonl", begun())
    tail = AuditTail(path=path)
    assert len(list(tail.entries())) == 1
    line = text_of(decision())
    with path.open("a") as file:
        file.write(line[:40])
    assert list(tail.entries()) == []
    with path.open("a") as file:
        file.write(line[40:] + "\n")
    assert [entry["number"] for _, entry in tail.entries()] == [3]
    path.unlink()
    assert list(tail.entries()) == []
