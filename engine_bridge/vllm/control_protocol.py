"""The control protocol: one JSON object a line in, one a line out, and what each request does.

It opens no sockets (`control_server` does) and keeps no state but the store's. docs/control.md is
the protocol for people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from trimtab.engine_bridge.errors import did_you_mean
from trimtab.engine_bridge.limits import Limited
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_errors import ProposalError, RequestError
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.control_values import allocation_by_names

PROTOCOL: Final = 1
"""Version of the protocol: the value of the key `trimtab` in every line."""
KEY: Final = "trimtab"
MOST_REQUEST_BYTES: Final = 65_536
"""Longest line of a request."""
OPS: Final = ("auth", "get", "set", "release", "health", "telemetry", "flush")
"""What can be asked for."""

_ALWAYS: Final = (KEY, "op", "id")
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "auth": ("token",),
    "get": (),
    "set": ("holder", "values", "ttl_s", "expected_version"),
    "release": ("holder",),
    "health": (),
    "telemetry": (),
    "flush": (),
}
_LONGEST_ID: Final = 128

Reply = dict[str, Any]


def parse(line: bytes) -> dict[str, Any]:
    """A line as a request with a known op and known keys.

    Raises:
        RequestError: it is no JSON object, of another protocol, or has an unknown op or key.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(
            "control", value=line[:40].decode("utf-8", "replace"), bound="a JSON object on one line"
        ) from None
    if not isinstance(request, dict):
        raise RequestError("control", value=request, bound="a JSON object on one line")
    version = request.get(KEY)
    if version != PROTOCOL or isinstance(version, bool):
        raise RequestError(
            "control", key=KEY, value=version, bound=f"{PROTOCOL}, the protocol's version"
        )
    op = request.get("op")
    if not isinstance(op, str) or op not in OPS:
        remedy = did_you_mean(op, OPS) or f"known are {', '.join(OPS)}"
        raise RequestError("control", key="op", value=op, bound="a known op", remedy=remedy)
    known = (*_ALWAYS, *_KEYS[op])
    for key in request:
        if key not in known:
            remedy = did_you_mean(key, known) or f"known are {', '.join(known)}"
            raise RequestError("control", key=key, bound=f"a key of {op}", remedy=remedy)
    mark = request.get("id", 0)
    if not isinstance(mark, str | int) or len(str(mark)) > _LONGEST_ID:
        bound = f"a whole number or text of at most {_LONGEST_ID} characters"
        raise RequestError("control", key="id", value=mark, bound=bound)
    return request


class Answers:
    """Answers requests from one engine's store and telemetry."""

    def __init__(
        self,
        store: AllocationStore,
        *,
        telemetry: Callable[[], Telemetry | None] | None = None,
        health: Callable[[], Mapping[str, object]] | None = None,
        flush: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """Take what the answers come from; all are called in the server's thread.

        Args:
            store: Holds the allocation.
            telemetry: The last interval, or None before the first.
            health: Further facts of the engine, JSON values by name.
            flush: Hands the traffic log's rows to its writer, without waiting for it, and counts
                what was handed over, written and dropped; None: there is no such log.
        """
        self._store, self._interval, self._facts = store, telemetry, health
        self._flush_log = flush

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Carry a parsed request out.

        Raises:
            ProposalError: it is refused; nothing has changed.
        """
        acts: Mapping[str, Callable[[Mapping[str, Any]], Reply]] = {
            "get": self._get,
            "set": self._set,
            "release": self._release,
            "health": self._health,
            "telemetry": self._telemetry,
            "flush": self._flush,
        }
        return acts[request["op"]](request)

    def _get(self, request: Mapping[str, Any]) -> Reply:
        state = self._store.describe()
        return {
            "version": state.version,
            "taken_version": state.taken_version,
            "allocation": state.by_names,
            "state": "leased" if state.leased else "static",
            "holder": state.holder,
            "lease_left_s": plain(state.lease_left_s),
            "limited": _limited(state.limited),
            "plan": self._store.plan.name,
            "plan_digest": self._store.plan.digest,
            "start_id": self._store.start_id,
        }

    def _set(self, request: Mapping[str, Any]) -> Reply:
        applied = self._store.propose(
            request.get("values", {}),
            holder=request.get("holder", ""),
            ttl_s=request.get("ttl_s"),
            expected_version=request.get("expected_version"),
        )
        return {
            "version": applied.version,
            "changed": applied.changed,
            "allocation": allocation_by_names(applied.allocation, self._store.plan),
            "lease_left_s": plain(applied.lease_left_s),
            "limited": _limited(applied.limited),
        }

    def _release(self, request: Mapping[str, Any]) -> Reply:
        applied = self._store.release(request.get("holder", ""))
        return {"version": applied.version, "changed": applied.changed}

    def _health(self, request: Mapping[str, Any]) -> Reply:
        state = self._store.describe()
        facts = {} if self._facts is None else self._facts()
        return {
            "version": state.version,
            "taken_version": state.taken_version,
            "state": "leased" if state.leased else "static",
            "refused": state.refused,
            "engine": {name: plain(value) for name, value in facts.items()},
        }

    def _telemetry(self, request: Mapping[str, Any]) -> Reply:
        found = None if self._interval is None else self._interval()
        return {"telemetry": None if found is None else self._by_names(found)}

    def _flush(self, request: Mapping[str, Any]) -> Reply:
        if self._flush_log is None:
            raise RequestError(
                "control",
                key="op",
                value="flush",
                bound="asked of an engine with a traffic log",
                remedy="start the engine with traffic_log_dir",
            )
        return dict(self._flush_log())

    def _by_names(self, telemetry: Telemetry) -> Reply:
        names = self._store.plan.tier_names
        tiers = {
            name: {f.name: plain(getattr(tier, f.name)) for f in fields(tier)}
            for name, tier in zip(names, telemetry.tiers, strict=True)
        }
        engine = {
            f.name: plain(getattr(telemetry, f.name))
            for f in fields(telemetry)
            if f.name not in ("tiers", "applied", "read_back")
        }
        return {**engine, "applied_version": telemetry.applied.version, "tiers": tiers}


def success(request: Mapping[str, Any], reply: Mapping[str, Any]) -> bytes:
    """The line that answers a request."""
    return _line({"ok": True, "op": request["op"], **_id(request), **reply})


def refusal(error: ProposalError, request: Mapping[str, Any] | None = None) -> bytes:
    """The line that refuses one; without a request, what could not even be parsed."""
    fault = {"code": error.code, "message": str(error)}
    return _line({"ok": False, **_id(request or {}), "error": fault})


def plain(value: Any) -> Any:
    """A value for JSON, which knows no NaN and no infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _limited(limited: tuple[Limited, ...]) -> list[dict[str, str]]:
    return [{"knob": entry.knob, "reason": str(entry.reason)} for entry in limited]


def _id(request: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": request["id"]} if "id" in request else {}


def _line(reply: Mapping[str, Any]) -> bytes:
    return json.dumps({KEY: PROTOCOL, **reply}).encode() + b"\n"
