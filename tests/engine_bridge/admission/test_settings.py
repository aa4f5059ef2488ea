"""The admission file: what it says, and how it is told that it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.engine_bridge.admission.settings import (
    STORAGE,
    AdmissionSettingsError,
    load_admission,
)
from trimtab.engine_bridge.plan import load_plan

PLAN = load_plan()


def load(folder: Path, text: str) -> object:
    path = folder / "admission.yaml"
    path.write_text(text)
    return load_admission(path, PLAN)


def test_an_empty_mapping_limits_nothing(tmp_path: Path) -> None:
    path = tmp_path / "admission.yaml"
    path.write_text("tiers: {}\n")
    limits = load_admission(path, PLAN).limits_of("acme", "T0")
    assert not any(limits.model_dump().values())


def test_a_tenants_limits_take_the_place_of_its_tiers_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "admission.yaml"
    path.write_text(
        "tiers: {T0: {requests_per_minute: 10, concurrent_requests: 2}}\n"
        "tenants: {acme: {requests_per_minute: 99}, free: {concurrent_requests: null}}\n"
    )
    rules = load_admission(path, PLAN)
    acme, free = rules.limits_of("acme", "T0"), rules.limits_of("free", "T0")
    assert (acme.requests_per_minute, acme.concurrent_requests) == (99, 2)
    assert (free.requests_per_minute, free.concurrent_requests) == (10, None)
    assert rules.limits_of("acme", "T1").requests_per_minute == 99


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("tiers:\n  T0: {requests_per_minute: 0}", 2, "at least 1"),
        ("tiers:\n  T0:\n    request_per_minute: 5", 3, 'did you mean "requests_per_minute"'),
        ("tiers:\n  T0: {requests_per_minute: many}", 2, "a whole number"),
        ("tiers:\n  t0: {}", 2, 'did you mean "T0"'),
        ("saturation:\n  tiers: [T2, T7]", 2, "one of the plan's tiers"),
        ("storage: redsi://x", 1, 'did you mean "redis"'),
        ("storage: localhost", 1, "redis://host:port/0"),
        (
            "tiers:\n  T0: {longest_output_tokens: 100, output_tokens_per_minute: 50}",
            2,
            "at most output_tokens_per_minute, 50",
        ),
        ("tenant_breaker: {failure_fraction: 1.5}", 1, "at most 1"),
        ("tiers: [T0]", 1, "a mapping"),
    ],
)
def test_a_fault_is_one_line_with_file_line_key_and_remedy(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    with pytest.raises(AdmissionSettingsError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert f"admission.yaml line {line}: " in message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "- a", "tiers: {", "\x00"])
def test_what_is_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(AdmissionSettingsError, match=r"admission\.yaml"):
        load(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AdmissionSettingsError, match="a file that exists"):
        load_admission(tmp_path / "none.yaml", PLAN)


def test_the_environments_storage_goes_first_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "admission.yaml"
    path.write_text("storage: redis://a:1/0\n")
    rules = load_admission(path, PLAN)
    assert rules.storage_url == "redis://a:1/0"
    monkeypatch.setenv(STORAGE, "redis://:secret@b:1/0")
    assert rules.storage_url == "redis://:secret@b:1/0"
    monkeypatch.setenv(STORAGE, "http://:secret@b")
    with pytest.raises(AdmissionSettingsError) as caught:
        _ = rules.storage_url
    assert "secret" not in str(caught.value)
