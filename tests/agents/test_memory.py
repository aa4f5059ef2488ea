"""What a guard and its policy remember survives JSON, with the types that they compute in."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.conformance.policy_conformance import PLAN
from trimtab.agents.guard import Guard
from trimtab.agents.memory import recall, remember
from trimtab.agents.reactive import ReactivePolicy


class Remembering(ReactivePolicy):
    """A policy with one thing more to remember."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


def guard(value: Any = None) -> Guard:
    made = Guard(Remembering(value))
    made.reset(PLAN, 0)
    return made


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1), np.float16(-2.5), np.float64(1 / 3), np.int64(-(2**62)), np.uint8(255),
        np.bool_(True), np.float32(math.inf), 0.1, 7, True, None, [np.int32(3), "text"],
    ],
)  # fmt: skip
def test_numbers_come_back_as_what_they_were(value: Any) -> None:
    memory = json.loads(json.dumps(remember(guard(value))))
    fresh = guard()
    recall(fresh, memory)
    found = fresh.policy.value  # type: ignore[attr-defined]
    assert found == value
    assert type(found) is type(value) or isinstance(value, np.float64)


def test_no_number_comes_back_as_none() -> None:
    memory = json.loads(json.dumps(remember(guard(np.float32(math.nan)))))
    fresh = guard()
    recall(fresh, memory)
    assert math.isnan(fresh.policy.value)  # type: ignore[attr-defined]


def test_what_nobody_knows_is_said_by_name() -> None:
    with pytest.raises(TypeError, match=r"policy\.value: nobody knows .* complex128"):
        remember(guard(np.complex128(1j)))
