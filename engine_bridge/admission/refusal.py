"""What a request that is not admitted is told: status, code and when to come again.

It decides nothing. The body has OpenAI's form, so that its clients raise the right error.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.admission.asked import MOST_LEVELS

_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OTHERS_FAULT: Final = 500


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One refusal; it has cost its tenant nothing."""

    status: int
    """400, 401, 403, 413, 429 or 503."""
    code: str
    """Which rule refused, one of `CODES`."""
    message: str
    """For people; it names no other tenant and no internals."""
    retry_after_s: float | None = None
    """Seconds after which this very request would pass if nothing else comes; None: never."""
    allow: str | None = None
    """The method that is served where this one is not."""

    def body(self) -> bytes:
        """The error as JSON in OpenAI's form."""
        kind = "server_error" if self.status >= _OTHERS_FAULT else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _KINDS.get(self.status, kind),
            "param": None,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What belongs to the answer beside `content-length`.

        `Retry-After` has whole seconds, rounded up; `retry-after-ms` is exact, and OpenAI's clients
        prefer it.
        """
        headers = [(b"content-type", b"application/json")]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode("ascii")))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
            headers.append((b"retry-after-ms", b"%d" % math.ceil(self.retry_after_s * 1000)))
        return headers


CODES: Final = (
    "invalid_api_key",
    "tenant_suspended",
    "invalid_json",
    "invalid_value",
    "prompt_too_long",
    "prefill_too_long",
    "over_quota_for_good",
    "tenant_slowed",
    "requests_quota",
    "prompt_tokens_quota",
    "output_tokens_quota",
    "budget_spent",
    "concurrency",
    "engine_saturated",
)
"""Every code of a refusal: a closed set, so that it can be a label of a metric."""


def unknown_key() -> Refusal:
    """Nobody has this API key."""
    return Refusal(status=401, code="invalid_api_key", message="the API key is missing or unknown")


def suspended() -> Refusal:
    """The operator has shut the tenant out."""
    return Refusal(status=403, code="tenant_suspended", message="this account is suspended")


def no_json() -> Refusal:
    """The body is no JSON object (or too deep a one), so it could not be labelled."""
    message = f"the body must be a JSON object of at most {MOST_LEVELS} levels"
    return Refusal(status=400, code="invalid_json", message=message)


def bad_value(message: str) -> Refusal:
    """A field that the cost depends on is wrong."""
    return Refusal(status=400, code="invalid_value", message=message)


def too_long(most_tokens: int, *, by_prefill: bool) -> Refusal:
    """The prompt is longer than the tenant's may be."""
    code = "prefill_too_long" if by_prefill else "prompt_too_long"
    message = f"the prompt must have at most {most_tokens} tokens"
    return Refusal(status=413, code=code, message=message)


def never_fits(what: str, wanted: int, limit: int) -> Refusal:
    """One request alone asks for more than a quota holds."""
    message = f"this request may take {wanted} {what}, and the quota is {limit}; make it smaller"
    return Refusal(status=413, code="over_quota_for_good", message=message)


def slowed(wait_s: float) -> Refusal:
    """So many of the tenant's requests have failed that it is slowed."""
    message = f"too many of your requests have failed: {_again(wait_s)}"
    return Refusal(status=429, code="tenant_slowed", message=message, retry_after_s=wait_s)


def over_quota(code: str, what: str, wait_s: float) -> Refusal:
    """A quota is used up for now."""
    message = f"the quota of {what} is used up: {_again(wait_s)}"
    return Refusal(status=429, code=code, message=message, retry_after_s=wait_s)


def saturated(wait_s: float) -> Refusal:
    """The engine is full, and the tier gives way."""
    message = f"the engine is full: {_again(wait_s)}"
    return Refusal(status=503, code="engine_saturated", message=message, retry_after_s=wait_s)


def _again(wait_s: float) -> str:
    return f"come again in {math.ceil(wait_s * 10) / 10:g} s"
