"""Loads plans: a YAML file, or one of the plans that Trimtab ships.

A plan file states its tiers and pools; what else it leaves out is taken from the shipped default,
key by key, so that `default.yaml` is the only place where a default is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from trimtab.engine_bridge.errors import PlanError, did_you_mean
from trimtab.engine_bridge.plan.faults import plan_error
from trimtab.engine_bridge.plan.schema import Plan
from trimtab.engine_bridge.plan.yaml_source import Source, read_source

SHIPPED: Final = ("default", "published")
"""Names of the shipped plans."""

_FOLDER: Final = Path(__file__).parent
_INHERITED: Final = (
    "prefill",
    "rules",
    "backoff",
    "slack",
    "feasible",
    "prediction",
    "vft_skew_fraction",
    "controller",
)


def load_plan(path: Path | str | None = None) -> Plan:
    """Load a plan.

    Args:
        path: A YAML file, or the name of a shipped plan (`default`, `published`); None is
            `default`. A file of that name must be given with its folder, `./default`.

    Raises:
        PlanError: there is no such file, or it is not a plan; one line that says what to change.
    """
    name = "default" if path is None else str(path)
    if name in SHIPPED:
        return _build(read_source(_FOLDER / f"{name}.yaml"))
    if not Path(name).suffix and "/" not in name and not Path(name).exists():
        raise PlanError(
            f"plan {name}",
            bound=f"a YAML file or one of {', '.join(SHIPPED)}",
            remedy=did_you_mean(name, SHIPPED),
        )
    return _build(read_source(Path(name)))


def plan_from_yaml(text: str, *, where: str = "plan") -> Plan:
    """Make a plan of YAML text.

    Raises:
        PlanError: it is not a plan.
    """
    return _build(Source(where, text))


def with_values(plan: Plan, changes: Mapping[str, object]) -> Plan:
    """The same plan with some keys changed, checked again.

    Args:
        plan: The plan to start from; it stays as it is.
        changes: New values by key path, for instance `{"rules.kv_pools": False}`.

    Raises:
        PlanError: a key path does not exist, or its value is out of bounds.
    """
    data = plan.model_dump(mode="python")
    source = Source(f"plan {plan.name}", "{}")
    for path, value in changes.items():
        *above, last = path.split(".")
        section: Any = data
        for part in above:
            if not isinstance(section, dict) or part not in section:
                known = list(section) if isinstance(section, dict) else []
                raise PlanError(
                    source.where, key=path, bound="a known key", remedy=did_you_mean(part, known)
                )
            section = section[part]
        if not isinstance(section, dict):
            raise PlanError(source.where, key=path, bound="a known key")
        section[last] = value
    return _validate(data, source)


def _build(source: Source) -> Plan:
    data = dict(source.data)
    shipped = read_source(_FOLDER / "default.yaml").data
    for section in _INHERITED:
        data[section] = _inherit(data.get(section, {}), shipped[section], section in data)
    return _validate(data, source)


def _inherit(own: object, shipped: Any, given: bool) -> object:
    """The file's section with the shipped values for the keys that it does not have."""
    if not given:
        return shipped
    if not isinstance(own, dict) or not isinstance(shipped, dict):
        return own
    return {
        **own,
        **{key: _inherit(own.get(key), value, key in own) for key, value in shipped.items()},
    }


def _validate(data: Mapping[str, object], source: Source) -> Plan:
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise plan_error(error, source, Plan) from None
