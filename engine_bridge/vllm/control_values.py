"""An allocation by the plan's names, and back: what people and programs write over the socket.

It checks shape and type; how far a number may go is `trimtab.engine_bridge.limits`' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.errors import did_you_mean
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_errors import ProposalError

_WHERE: Final = "control"
_CAPS: Final = ("max_running", "max_num_seqs")
SCALARS: Final = (
    "prefill_budget_tokens",
    "slack_fraction",
    "low_tier_chunk_share",
    "max_num_seqs",
)
"""Knobs with one value for the whole engine."""
BY_TIER: Final = ("weights", "prefill_shares", "shed_at", "draft_tokens", "max_running")
"""Knobs with one value a tier."""
KNOBS: Final = (
    "weights",
    "kv_fractions",
    "prefill_budget_tokens",
    "prefill_shares",
    "retention",
    "slack_fraction",
    "low_tier_chunk_share",
    "shed_at",
    "draft_tokens",
    "max_running",
    "max_num_seqs",
)
"""Every knob, in the order of `Allocation`."""


def entry_names(knob: str, plan: Plan) -> tuple[str, ...]:
    """Names of a knob's entries in order: tiers, pools or retention classes; none for a scalar."""
    if knob in BY_TIER:
        return plan.tier_names
    if knob == "kv_fractions":
        return plan.pool_names
    return plan.retention_names if knob == "retention" else ()


def allocation_by_names(allocation: Allocation, plan: Plan) -> dict[str, object]:
    """The allocation as nested mappings; a cap that is not there is None."""

    def plain(value: Any) -> Any:
        return None if value == UNLIMITED else value

    named: dict[str, object] = {}
    for knob in KNOBS:
        value, names = getattr(allocation, knob), entry_names(knob, plan)
        if names:
            named[knob] = {n: plain(v) for n, v in zip(names, value, strict=True)}
        else:
            named[knob] = plain(value)
    return named


def allocation_from(values: object, base: Allocation, plan: Plan) -> Allocation:
    """The base with some knobs replaced; nothing is held to bounds here.

    Args:
        values: By knob: a number, or a mapping of names to numbers (partly, too), or a list of as
            many numbers as the plan has names. None in place of a cap takes the cap away.
        base: What the knobs and entries that are left out keep.
        plan: The names.

    Raises:
        ProposalError: a knob or name is not known, an entry is no finite number, or a list has
            another length.
    """
    if not isinstance(values, Mapping):
        raise ProposalError(_WHERE, key="values", value=values, bound="a mapping of knobs")
    changes: dict[str, Any] = {}
    for knob, asked in values.items():
        if knob not in KNOBS:
            remedy = did_you_mean(knob, KNOBS) or f"knobs are {', '.join(KNOBS)}"
            raise ProposalError(_WHERE, key=str(knob), bound="a known knob", remedy=remedy)
        names = entry_names(knob, plan)
        if names:
            changes[knob] = _entries(knob, asked, getattr(base, knob), names)
        else:
            changes[knob] = _number(knob, asked, knob in _CAPS)
    return replace(base, **changes)


def _entries(
    knob: str, asked: object, base: tuple[float, ...], names: tuple[str, ...]
) -> tuple[float, ...]:
    cap = knob in _CAPS
    if isinstance(asked, Mapping):
        held = dict(zip(names, base, strict=True))
        for name, value in asked.items():
            if name not in held:
                remedy = did_you_mean(name, names) or f"known are {', '.join(names)}"
                raise ProposalError(
                    _WHERE, key=f"{knob}.{name}", bound="a name of the plan", remedy=remedy
                )
            held[name] = _number(f"{knob}.{name}", value, cap)
        return tuple(held.values())
    if isinstance(asked, list | tuple) and len(asked) == len(names):
        pairs = zip(names, asked, strict=True)
        return tuple(_number(f"{knob}.{name}", value, cap) for name, value in pairs)
    bound = f"a mapping of {', '.join(names)}, or a list of {len(names)}"
    raise ProposalError(_WHERE, key=knob, value=asked, bound=bound)


def _number(key: str, value: object, cap: bool) -> Any:
    if value is None and cap:
        return UNLIMITED
    if not isinstance(value, bool) and isinstance(value, int | float):
        try:
            if math.isfinite(value):
                return value
        except OverflowError:
            pass  # A whole number beyond every float.
    bound = "a finite number" + (" or null" if cap else "")
    raise ProposalError(_WHERE, key=key, value=value, bound=bound)
