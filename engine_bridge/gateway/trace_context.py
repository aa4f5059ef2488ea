"""Reads what a client says of its trace (W3C Trace Context): `traceparent` and `tracestate`.

It believes nothing; what the words count for is the settings' business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.upstream import Header

CONTEXT: Final = (b"traceparent", b"tracestate")
"""The headers."""
SAMPLED: Final = 1
"""The flag of a trace that is followed."""
_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE: Final = re.compile(rb"[\x20-\x7e]{1,512}")


def client_context(headers: Iterable[Header]) -> tuple[tuple[int, int, bool] | None, bytes]:
    """What a client says of its trace, by W3C's Trace Context.

    Returns:
        Trace, span and whether it is sampled, None where that is not in order; and the header
        `tracestate`, empty where it is not in order.
    """
    parents = [value.strip() for name, value in headers if name == b"traceparent"]
    found = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
        return None, b""
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None, b""
    states = (value.strip() for name, value in headers if name == b"tracestate")
    state = b",".join(one for one in states if one)
    sampled = bool(int(found[4], 16) & SAMPLED)
    return (trace_id, span_id, sampled), state if _STATE.fullmatch(state) else b""
