"""The policies by the names that the command line uses."""

from __future__ import annotations

from trimtab.agents.policy import Policy
from trimtab.agents.reactive import ReactivePolicy
from trimtab.agents.static import StaticPolicy
from trimtab.agents.stock import StockFcfsPolicy, StockPriorityPolicy
from trimtab.engine_bridge.errors import FlagError, did_you_mean

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (StaticPolicy, StockFcfsPolicy, StockPriorityPolicy, ReactivePolicy)
}


def policy_names() -> tuple[str, ...]:
    """The names of all policies."""
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """A new policy of that name; call its `reset` before `act`.

    Raises:
        FlagError: no policy has that name.
    """
    if name not in _POLICIES:
        raise FlagError(
            "--policy",
            value=name,
            bound=f"one of {', '.join(_POLICIES)}",
            remedy=did_you_mean(name, _POLICIES),
        )
    return _POLICIES[name]()
