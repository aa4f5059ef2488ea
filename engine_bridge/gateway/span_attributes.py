"""What the span of a request says of it, in the words of OpenTelemetry's conventions.

Of what a client has written it says nothing: no prompt, no key, no path or model that is not
served. Names that the conventions do not know begin with `trimtab.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from trimtab.engine_bridge.admission.outcome import Outcome

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.exchange import Exchange

OPERATIONS: Final = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
"""Paths that engines serve, by what the conventions for generative AI call them."""
_ROUTES: Final = OPERATIONS.keys() | {"/v1/models"}
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
_OTHER_METHOD: Final = "_OTHER"
_FAULTS: Final = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.CANCELLED)


def request_name(attributes: Mapping[str, Any]) -> str:
    """The name of a request's span: of few different ones."""
    method, route = str(attributes["http.request.method"]), attributes.get("http.route")
    verb = "HTTP" if method == _OTHER_METHOD else method
    return f"{verb} {route}" if route else verb


def request_attributes(exchange: Exchange, first_token_s: float | None) -> dict[str, Any]:
    """What is said of a request that has ended.

    Args:
        exchange: The request.
        first_token_s: From its head to its first token, seconds; None where nobody knows.
    """
    method = exchange.scope["method"]
    found: dict[str, Any] = {
        "http.request.method": method if method in _METHODS else _OTHER_METHOD,
        "url.scheme": "http",
        "trimtab.outcome": "refused" if exchange.code else exchange.outcome.value,
    }
    if exchange.path in _ROUTES:
        found["http.route"] = exchange.path
    if exchange.identity is not None:
        found["trimtab.tier"] = exchange.identity.tier
    if exchange.engine:
        found["trimtab.engine"] = exchange.engine
        found["trimtab.retries"] = exchange.retries
    if exchange.code:
        found["trimtab.refusal"] = exchange.code
    if exchange.status:
        found["http.response.status_code"] = exchange.status
    if exchange.status >= 500:
        found["error.type"] = exchange.code or str(exchange.status)
    elif broken := broken_by(exchange):
        found["error.type"] = broken
    if exchange.path in OPERATIONS:
        found |= _generation(exchange, first_token_s)
    return found


def broken_by(exchange: Exchange) -> str:
    """What has broken an answer off; empty: nothing, or it was refused."""
    broken = exchange.outcome in _FAULTS and not exchange.code
    return exchange.outcome.value if broken else ""


def _generation(exchange: Exchange, first_token_s: float | None) -> dict[str, Any]:
    usage = exchange.usage
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS[exchange.path],
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.stream": exchange.streams,
    }
    # A model that nobody serves is any text that a client likes.
    if exchange.model and exchange.code != "model_not_found":
        found["gen_ai.request.model"] = exchange.model
    if usage.prompt_tokens:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if usage.output_tokens:
        found["gen_ai.usage.output_tokens"] = usage.output_tokens
    if first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = first_token_s
    return found
