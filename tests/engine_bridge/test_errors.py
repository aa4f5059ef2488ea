from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.errors import InputError, PlanError, TrimtabError, did_you_mean


def test_the_line_names_place_value_bound_and_remedy() -> None:
    error = PlanError("p.yaml", key="tiers.T0.weight", value=-1, bound="above 0", remedy="raise it")
    assert str(error) == "p.yaml: tiers.T0.weight: -1, must be above 0; raise it"


def test_parts_that_are_not_known_leave_no_trace() -> None:
    assert (
        str(InputError("p.yaml", bound="a file that exists"))
        == "p.yaml: must be a file that exists"
    )
    assert str(InputError("p.yaml", remedy="mend it")) == "p.yaml; mend it"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "null"), (True, "true"), (np.float64(2.5), "2.5"), (np.int32(3), "3"), ("x", '"x"')],
)
def test_values_show_as_the_user_wrote_them(value: object, shown: str) -> None:
    assert str(InputError("f", value=value)) == f"f: {shown}"


@given(st.text(), st.text(), st.text() | st.lists(st.lists(st.text())), st.text())
def test_any_fault_is_one_printable_line(where: str, key: str, value: object, remedy: str) -> None:
    line = str(InputError(where, key=key, value=value, bound="right", remedy=remedy))
    assert line.isprintable()
    assert len(line.splitlines()) <= 1
    line.encode("utf-8")


def test_exit_codes() -> None:
    assert TrimtabError.exit_code == 1
    assert PlanError.exit_code == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [("t0", 'did you mean "T0"?'), ("btach", 'did you mean "batch"?'), ("zzz", ""), (3, "")],
)
def test_did_you_mean(name: object, expected: str) -> None:
    assert did_you_mean(name, ["T0", "batch", "free"]) == expected
