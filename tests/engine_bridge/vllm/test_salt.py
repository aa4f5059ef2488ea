"""Cache salts: apart for every two tenants, the same for one, nothing without the secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.vllm.salt import length_prefixed, salt_secret, tenant_salt

SECRET = b"0123456789abcdef"
NAMES = st.lists(st.text(max_size=6), max_size=4)


def test_a_tenant_keeps_its_salt_and_shares_it_with_no_other() -> None:
    salts = {tenant: tenant_salt(SECRET, tenant) for tenant in ("a", "b", "ab", "", "ä", "a\0")}
    assert len(set(salts.values())) == len(salts)
    assert salts["a"] == tenant_salt(SECRET, "a")


def test_another_secret_gives_other_salts() -> None:
    assert tenant_salt(SECRET, "a") != tenant_salt(b"another secret 16", "a")


def test_vllm_accepts_a_salt() -> None:
    # At most 128 characters, and none that it forbids.
    salt = tenant_salt(SECRET, "a\udc80" * 500)
    assert len(salt) == 64
    assert set(salt) <= set("0123456789abcdef")


@given(NAMES, NAMES)
def test_two_lists_of_parts_are_never_one_text(one: list[str], two: list[str]) -> None:
    assert (length_prefixed(*one) == length_prefixed(*two)) == (one == two)


def test_moving_a_letter_from_one_part_to_the_next_changes_the_text() -> None:
    assert length_prefixed("ab", "c") != length_prefixed("a", "bc")


def test_without_a_secret_each_process_makes_its_own() -> None:
    first, second = salt_secret({}), salt_secret({})
    assert first != second
    assert min(len(first), len(second)) >= 32


def test_a_given_secret_is_taken_and_a_short_one_refused_unseen() -> None:
    assert salt_secret({"TRIMTAB_SALT_SECRET": "x" * 16}) == b"x" * 16
    for short in ("", "hunter2"):
        with pytest.raises(InputError) as caught:
            salt_secret({"TRIMTAB_SALT_SECRET": short})
        assert "TRIMTAB_SALT_SECRET" in str(caught.value)
        assert "hunter2" not in str(caught.value)
