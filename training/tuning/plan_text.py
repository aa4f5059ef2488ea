"""A plan file with some values changed: the user's own text, comments and order and all.

Where the text cannot be changed in place (a value behind an alias, for instance) the whole plan is
written anew. Either way what comes out is loaded again and compared before it is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from trimtab.engine_bridge import plan as plan_package
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import Plan, plan_from_yaml
from trimtab.engine_bridge.plan.load import SHIPPED

Place = tuple[str, ...]


def plan_text(name: str | None) -> str:
    """The text of a plan file, or of a shipped plan by its name; None is `default`.

    Only for plans that could be loaded from there.
    """
    name = "default" if name is None else name
    path = Path(name)
    if name in SHIPPED:
        path = Path(plan_package.__file__).parent / f"{name}.yaml"
    return path.read_bytes().decode("utf-8-sig")


def rewrite(text: str, values: Mapping[Place, str], *, wanted: Plan, note: str) -> str:
    """The text with new values, and a comment on top.

    Args:
        text: a plan file.
        values: the YAML of each new value by its place.
        wanted: the plan that the result must load as.
        note: what the comment says; one comment line a line.
    """
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    try:
        edited = text
        for place, value in values.items():
            edited = _put(edited, place, value)
        edited = comment + edited
        if plan_from_yaml(edited).digest == wanted.digest:
            return edited
    except (PlanError, yaml.YAMLError, LookupError):
        pass
    content = wanted.model_dump(mode="json")
    return comment + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def _put(text: str, place: Place, value: str) -> str:
    """Set one value, where it stands or beside its neighbours."""
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise LookupError("the text is no mapping")
    node, depth = root, 0
    while depth < len(place):
        child = _child(node, place[depth])
        if child is None:
            return _insert(text, node, place[depth:], value, root=node is root)
        depth += 1
        if depth == len(place):
            return text[: child.start_mark.index] + value + text[child.end_mark.index :]
        if not isinstance(child, yaml.MappingNode):
            break
        node = child
    raise LookupError(".".join(place))


def _child(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    for name, child in node.value:
        if name.value == key:
            return child
    return None


def _insert(text: str, node: yaml.MappingNode, place: Place, value: str, *, root: bool) -> str:
    """Add a key to a mapping in its own style: inside its braces, or on a line of its own."""
    for key in reversed(place[1:]):
        value = f"{{{_key(key)}: {value}}}"
    entry = f"{_key(place[0])}: {value}"
    if node.flow_style:
        at = node.start_mark.index + 1
        return text[:at] + entry + (", " if node.value else "") + text[at:]
    if root:
        return text.rstrip() + f"\n\n{entry}\n"
    first = node.value[0][0].start_mark
    return text[: first.index] + entry + "\n" + " " * first.column + text[first.index :]


def _key(key: str) -> str:
    """A key as YAML writes it; quoted where it would be a number or a truth value."""
    return yaml.safe_dump({key: 0}, default_flow_style=True)[1:].rsplit(":", 1)[0]
