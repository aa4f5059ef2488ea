"""Whose a request is: keys files, trusted labels, nobody."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.plan.load import with_values
from trimtab.engine_bridge.vllm.identity import (
    Identifier,
    Identity,
    IdentitySettings,
    LabelError,
    UnknownKeyError,
    default_tier,
    read_keys,
)


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def plan(default_plan: Plan) -> Plan:
    return with_values(default_plan, {"tenants": {"acme": {"tier": "T1", "share": 2.0}}})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"acme: {{keys_sha256: [{sha('k1')}, {sha('k2')}]}}\n"
        f"bolt: {{tier: T2, keys_sha256: [{sha('k3')}]}}\n"
        f"else: {{keys_sha256: [{sha('k4')}]}}\n"
    )
    return path


@pytest.mark.parametrize(
    ("key", "identity"),
    [
        ("k1", Identity("acme", "T1")),
        ("k2", Identity("acme", "T1")),
        ("k3", Identity("bolt", "T2")),
        ("k4", Identity("else", "T3")),
    ],
)
def test_a_key_says_whose_a_request_is(
    keys: Path, plan: Plan, key: str, identity: Identity
) -> None:
    identifier = Identifier(IdentitySettings(keys=str(keys)), plan)
    # Labels are not looked at where keys are.
    assert identifier.identify(key=key, tenant="x", tier="T0") == identity


@pytest.mark.parametrize("key", [None, "", "k", "k11", sha("k1"), "\udcff"])
def test_any_other_key_is_refused(keys: Path, plan: Plan, key: str | None) -> None:
    with pytest.raises(UnknownKeyError):
        Identifier(IdentitySettings(keys=str(keys)), plan).identify(key=key)


def test_the_key_of_nothing_lets_nobody_in(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"acme: {{keys_sha256: [{sha('')}]}}\n")
    with pytest.raises(UnknownKeyError):
        Identifier(IdentitySettings(keys=str(path)), plan).identify(key="")


@pytest.mark.parametrize(
    ("tenant", "tier", "identity"),
    [
        ("acme", None, Identity("acme", "T1")),
        ("acme", "T2", Identity("acme", "T2")),
        ("new", None, Identity("new", "T3")),
        (None, None, Identity("anonymous", "T3")),
        (None, "T0", Identity("anonymous", "T0")),
    ],
)
def test_a_trusted_gateway_says_whose_a_request_is(
    plan: Plan, tenant: str | None, tier: str | None, identity: Identity
) -> None:
    identifier = Identifier(IdentitySettings(trust_labels=True), plan)
    assert identifier.identify(key="any", tenant=tenant, tier=tier) == identity


@pytest.mark.parametrize(("tenant", "tier"), [("a", "T9"), ("a" * 201, "T0"), ("a\n", "T0")])
def test_a_trusted_label_must_be_one_of_the_plan(plan: Plan, tenant: str, tier: str) -> None:
    with pytest.raises(LabelError):
        Identifier(IdentitySettings(trust_labels=True), plan).identify(tenant=tenant, tier=tier)


def test_without_keys_and_trust_everybody_is_nobody(plan: Plan) -> None:
    identifier = Identifier(IdentitySettings(), plan)
    assert identifier.identify(key="k1", tenant="acme", tier="T0") == Identity("anonymous", "T3")


def test_nobody_gets_the_plans_default_tier_or_the_least_weight(plan: Plan) -> None:
    assert default_tier(with_values(plan, {"default_tier": "T1"})) == "T1"
    assert default_tier(plan) == "T3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acme: {keys_sha256: [sk-secret]}", ["line 1", "acme.keys_sha256.0", "sha256sum"]),
        ("acme: {keys_sha256: []}", ["acme.keys_sha256"]),
        ("acme: {key_sha256: [sk-secret]}", ["acme.key_sha256", 'did you mean "keys_sha256"?']),
        ("acme: sk-secret", ["acme", "keys_sha256"]),
        ("[sk-secret]", ["mapping"]),
        (f"acme: {{tier: T7, keys_sha256: [{sha('a')}]}}", ["acme.tier", '"T7"', "T0, T1"]),
        (f"acme: {{tier: T0, keys_sha256: [{sha('a')}]}}", ["acme.tier", "T1, as the plan"]),
        (
            f"x: {{keys_sha256: [{sha('a')}]}}\ny: {{keys_sha256: [{sha('a')}]}}",
            ["line 2", "y.keys_sha256.0", "x has it too"],
        ),
    ],
)
def test_a_bad_keys_file_is_one_line_that_shows_no_key(
    tmp_path: Path, plan: Plan, text: str, words: list[str]
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_keys(path, plan)
    line = str(caught.value)
    assert str(path) in line
    assert "\n" not in line
    assert [word for word in words if word not in line] == []
    assert "sk-secret" not in line


def test_settings_come_from_the_environment() -> None:
    given = IdentitySettings(keys="keys.yaml", priority=False)
    text = given.model_dump_json(exclude_defaults=True)
    assert IdentitySettings.from_environment({"TRIMTAB_IDENTITY": text}) == given
    assert IdentitySettings.from_environment({}) == IdentitySettings()
    with pytest.raises(InputError, match="TRIMTAB_IDENTITY"):
        IdentitySettings.from_environment({"TRIMTAB_IDENTITY": '{"key": 1}'})
