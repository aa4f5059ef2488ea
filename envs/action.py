"""Actions: numbers in [-1, 1] as residuals on the static plan, turned into an allocation.

Training, what-if and the daemon use the same map. It keeps no bounds but the action's own reach:
`trimtab.engine_bridge.limits` holds what comes out to the plan's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import ActionError, did_you_mean
from trimtab.engine_bridge.plan import Plan

_FORMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "weights": "static * exp(reach * (u - mean u))",
        "kv_fractions": "static * exp(reach * u), scaled to the static sum",
        "prefill_budget_tokens": "round(static * exp(reach * u))",
        "prefill_shares": "static * exp(reach * u), scaled to the static sum",
        "slack_fraction": "static + reach * u",
        "low_tier_chunk_share": "static * exp(reach * u)",
        "shed_at": "static * exp(reach * u)",
    }
)
_TOGETHER: Final = ("weights", "kv_fractions", "prefill_shares")
"""Knobs of which only the proportions count: one entry alone moves nothing."""

DEFAULT_KNOBS: Final = tuple(_FORMS)
"""Every knob that an action can move, in the order of its entries."""
DEFAULT_REACH: Final[Mapping[str, float]] = MappingProxyType(
    {
        "weights": 1.0,
        "kv_fractions": 0.5,
        "prefill_budget_tokens": 0.4,
        "prefill_shares": 1.0,
        "slack_fraction": 0.3,
        "low_tier_chunk_share": 0.4,
        "shed_at": 0.3,
    }
)
"""How far an entry of 1 goes: a logarithm of a factor, for `slack_fraction` a difference."""


@dataclass(frozen=True, kw_only=True)
class ActionSchema:
    """What each entry of an action means."""

    names: tuple[str, ...]
    """One name an entry, for instance `weights.T0`."""
    knobs: tuple[str, ...]
    """The knobs that the action moves, in the order of its entries."""
    reach: Mapping[str, float]
    """How far each knob goes for an entry of 1, as in `DEFAULT_REACH`."""

    @property
    def forms(self) -> dict[str, str]:
        """The formula of each knob; u are the action's entries."""
        return {knob: _FORMS[knob] for knob in self.knobs}

    @property
    def digest(self) -> str:
        """SHA-256 in hex: equal digests, equal meaning of every action."""
        content = {**asdict(replace(self, reach=dict(self.reach))), "forms": self.forms}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The entries of one knob."""

    knob: str
    entries: slice
    moved: tuple[int, ...]
    """Which of the knob's values the entries move."""
    home: tuple[float, ...]
    """The static values."""
    reach: float

    def value(self, action: list[float]) -> tuple[float, ...] | float | int:
        """The knob as the allocation has it; with zeros exactly the static one."""
        u = action[self.entries]
        if self.knob == "weights":
            mean = sum(u) / len(u)
            u = [entry - mean for entry in u]
        if self.knob == "slack_fraction":
            return self.home[0] + self.reach * u[0]
        values = list(self.home)
        for place, entry in zip(self.moved, u, strict=True):
            values[place] *= math.exp(self.reach * entry)
        if self.knob == "prefill_budget_tokens":
            return round(values[0])
        if self.knob == "low_tier_chunk_share":
            return values[0]
        if self.knob in ("kv_fractions", "prefill_shares"):
            # At zero the ratio is exactly 1, so the static plan comes back bit for bit.
            ratio = sum(self.home) / sum(values)
            values = [value * ratio for value in values]
        return tuple(values)


class ActionMap:
    """Turns actions of shape (size,) into allocations; an action of zeros is the static plan."""

    def __init__(
        self,
        plan: Plan,
        knobs: Sequence[str] = DEFAULT_KNOBS,
        reach: Mapping[str, float] = DEFAULT_REACH,
    ) -> None:
        """Lay out the action's entries.

        Left out are knobs that the plan closes and entries that move nothing: the only entry of
        weights, fractions or shares, and `shed_at` of a tier that never sheds.

        Args:
            plan: Whose static shares the residuals are on.
            knobs: The knobs to move, of `DEFAULT_KNOBS`.
            reach: How far each of them goes, above 0; as in `DEFAULT_REACH`.

        Raises:
            ActionError: an unknown knob, a reach that is no number above 0, or nothing to move.
        """
        for knob in knobs:
            _check_knob(knob, reach)
        self._static = Allocation.static(plan)
        self._groups: list[_Group] = []
        names: list[str] = []
        for knob in (knob for knob in DEFAULT_KNOBS if knob in knobs):
            moved = _movable(plan, knob)
            if moved:
                home = getattr(self._static, knob)
                group = _Group(
                    knob=knob,
                    entries=slice(len(names), len(names) + len(moved)),
                    moved=tuple(moved),
                    home=home if isinstance(home, tuple) else (home,),
                    reach=float(reach[knob]),
                )
                self._groups.append(group)
                names += moved.values()
        if not names:
            raise ActionError(
                f"plan {plan.name}",
                key="controller.bounds",
                bound=f"open for one of the knobs {', '.join(knobs)}",
            )
        self.schema = ActionSchema(
            names=tuple(names),
            knobs=tuple(group.knob for group in self._groups),
            reach={group.knob: group.reach for group in self._groups},
        )

    @property
    def size(self) -> int:
        """Number of entries of an action."""
        return len(self.schema.names)

    def allocation(self, action: npt.ArrayLike) -> Allocation:
        """The allocation that an action asks for, not yet held to the plan's limits.

        Args:
            action: Shape (size,); entries beyond [-1, 1] count as -1 or 1.

        Raises:
            ActionError: another shape, or an entry that is no number.
        """
        u = self._checked(action)
        knobs: dict[str, Any] = {group.knob: group.value(u) for group in self._groups}
        return replace(self._static, **knobs)

    def _checked(self, action: npt.ArrayLike) -> list[float]:
        try:
            given = np.asarray(action, np.float64)
        except (TypeError, ValueError, OverflowError):
            bound = f"{self.size} numbers in [-1, 1]"
            raise ActionError("action", value=action, bound=bound) from None
        if given.shape != (self.size,):
            raise ActionError("action", key="shape", value=given.shape, bound=f"({self.size},)")
        u: list[float] = given.tolist()
        for name, entry in zip(self.schema.names, u, strict=True):
            if entry != entry:
                raise ActionError("action", key=name, value=entry, bound="a number in [-1, 1]")
        return [min(max(entry, -1.0), 1.0) for entry in u]


def _check_knob(knob: str, reach: Mapping[str, float]) -> None:
    if knob not in _FORMS:
        raise ActionError(
            "action",
            key="knobs",
            value=knob,
            bound=f"one of {', '.join(DEFAULT_KNOBS)}",
            remedy=did_you_mean(knob, DEFAULT_KNOBS),
        )
    far = reach.get(knob)
    if far is None or not 0 < far <= 10:
        raise ActionError("action", key=f"reach.{knob}", value=far, bound="above 0, at most 10")


def _movable(plan: Plan, knob: str) -> dict[int, str]:
    """Index inside the knob and name of each entry that moves something."""
    if getattr(plan.controller.bounds, knob) is None:
        return {}
    if knob == "shed_at":
        tiers = enumerate(plan.tiers.items())
        return {i: f"{knob}.{name}" for i, (name, tier) in tiers if tier.shed.mode != "never"}
    if knob not in _TOGETHER:
        return {0: knob}
    owners = plan.pool_names if knob == "kv_fractions" else plan.tier_names
    return {i: f"{knob}.{name}" for i, name in enumerate(owners)} if len(owners) > 1 else {}
