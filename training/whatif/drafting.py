"""A draft model for a what-if: onto the engine, and into plans that say nothing of draft lengths.

It checks what the flags say; how drafts are verified and chosen is the replay's business.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.engine_bridge.draft_spec import MOST_DRAFT_TOKENS, DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import FlagError, did_you_mean
from trimtab.engine_bridge.plan import Plan, with_values
from trimtab.engine_bridge.trace import Trace


def parse_acceptance(text: str, plan: Plan) -> tuple[tuple[str, float], ...]:
    """Pairs of a tier and its acceptance from "T0=0.75,T2=0.4".

    Raises:
        FlagError: no such tier, no such share, or a tier twice.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in plan.tiers or name in found:
            raise FlagError(
                "--acceptance",
                value=part.strip(),
                bound=f"tiers of the plan ({', '.join(plan.tiers)}), each once, as T0=0.75",
                remedy=did_you_mean(name, plan.tiers) or "as T0=0.75,T2=0.4",
            )
        try:
            found[name] = float(share)
        except ValueError:
            found[name] = -1.0
        if not 0.0 <= found[name] <= 1.0:
            raise FlagError("--acceptance", value=part.strip(), bound="a share from 0 to 1")
    return tuple(found.items())


def with_draft(
    spec: EngineSpec,
    plan: Plan,
    *,
    tokens: int | None,
    us_per_token: float | None,
    acceptance: str | None,
) -> EngineSpec:
    """The engine with the draft model of the flags; None leaves what the engine's file says.

    Raises:
        FlagError: a flag is out of bounds, or tells of a draft model where there is none.
        EngineSpecError: the drafts do not fit the engine's limits.
    """
    if tokens is not None and not 0 <= tokens <= MOST_DRAFT_TOKENS:
        raise FlagError("--draft-tokens", value=tokens, bound=f"from 0 to {MOST_DRAFT_TOKENS}")
    if us_per_token is not None and not 0 <= us_per_token <= 1e6:
        raise FlagError("--draft-us", value=us_per_token, bound="from 0 to 1,000,000")
    draft = spec.draft
    if tokens == 0:
        draft = None
    elif tokens is not None:
        draft = replace(draft, tokens=tokens) if draft else DraftSpec(tokens=tokens)
    if draft is None:
        for flag, value in (("--draft-us", us_per_token), ("--acceptance", acceptance)):
            if value is not None:
                raise FlagError(
                    flag,
                    value=value,
                    bound="beside a draft model",
                    remedy="give --draft-tokens, or an engine file with a draft section",
                )
        return replace(spec, draft=None)
    if us_per_token is not None:
        draft = replace(draft, us_per_token=us_per_token)
    if acceptance is not None:
        draft = replace(draft, acceptance=parse_acceptance(acceptance, plan))
    spec = replace(spec, draft=draft)
    spec.check_draft()
    return spec


def check_acceptance(trace: Trace, spec: EngineSpec) -> None:
    """Refuse drafts of which nothing is known for any request of the trace.

    Raises:
        FlagError: neither the draft model nor the trace says how often they are accepted.
    """
    if spec.draft is None or spec.draft.acceptance or np.isfinite(trace.acceptance).any():
        return
    raise FlagError(
        "--acceptance",
        bound="given for a trace without a column acceptance",
        remedy="as --acceptance T0=0.75,T2=0.4",
    )


def with_draft_lengths(plan: Plan, spec: EngineSpec) -> Plan:
    """The plan, with draft lengths if the engine drafts and no tier of the plan has one.

    Then every tier but that of the least weight may verify all that the draft model drafts; the
    last is off, as rule 9 has it by default.
    """
    if spec.draft is None or any(tier.draft_tokens for tier in plan.tiers.values()):
        return plan
    last = min(plan.tiers, key=lambda name: plan.tiers[name].weight)
    lengths = {
        f"tiers.{name}.draft_tokens": spec.draft.tokens for name in plan.tiers if name != last
    }
    return with_values(plan, lengths) if lengths else plan
