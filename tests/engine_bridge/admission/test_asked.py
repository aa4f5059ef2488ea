"""What a body says of itself, read as an engine reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from trimtab.engine_bridge.admission.asked import MOST_LEVELS, is_too_deep, wants_stream

BOOL = TypeAdapter(bool)
GIVEN = st.one_of(
    st.booleans(), st.none(), st.integers(-2, 2), st.floats(), st.text(max_size=5),
    st.sampled_from(["true", "True", "YES", "on", "1", "t", "y", "false", "no", "off", " true"]),
)  # fmt: skip


@given(GIVEN)
def test_a_stream_is_wanted_where_pydantic_reads_a_true(given: Any) -> None:
    try:
        wanted = given is not None and BOOL.validate_python(given)
    except ValidationError:
        wanted = False  # the engine refuses it
    assert wants_stream({"stream": given}) == wanted


@pytest.mark.parametrize("given", [{}, [], [True], {"a": 1}])
def test_what_is_no_scalar_wants_none(given: object) -> None:
    assert not wants_stream({"stream": given})
    assert not wants_stream({})


@given(st.integers(1, 2 * MOST_LEVELS), st.booleans(), st.integers(0, 300))
def test_levels_are_counted_to_the_last(levels: int, lists: bool, beside: int) -> None:
    deep: Any = 1
    for _ in range(levels - 1):
        deep = [deep] if lists else {"a": deep}
    body = {"x": deep, "y": [[]] * beside}
    text = json.dumps(body)
    for encoding in ("utf-8", "utf-16"):
        assert is_too_deep(text.encode(encoding), body) == (levels > MOST_LEVELS)
