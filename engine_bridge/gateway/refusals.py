"""What the gateway itself refuses, in the form of `trimtab.engine_bridge.admission.refusal`.

Quotas and limits are admission's; the codes here are about paths, bodies and engines.
"""

from __future__ import annotations

from typing import Final

from trimtab.engine_bridge.admission.refusal import Refusal

CODES: Final = (
    "not_served",
    "method_not_allowed",
    "body_too_large",
    "body_too_slow",
    "invalid_json",
    "model_not_found",
    "gateway_full",
    "no_engine",
    "engine_failed",
    "engine_too_slow",
    "internal_error",
)
"""Every code of a refusal of the gateway's own: a closed set."""


def not_served(path: str) -> Refusal:
    """Nothing is there, or it could not be served with tenants and tiers."""
    shown = path if len(path) <= 100 else f"{path[:100]}..."
    return Refusal(status=404, code="not_served", message=f"{shown} is not served here")


def method_not_allowed(allowed: str) -> Refusal:
    """Something is there, but not for this method."""
    text = f"only {allowed} is allowed here"
    return Refusal(status=405, code="method_not_allowed", message=text, allow=allowed)


def body_too_large(most_bytes: int) -> Refusal:
    """The body is longer than any may be."""
    text = f"the body must be at most {most_bytes} bytes"
    return Refusal(status=413, code="body_too_large", message=text)


def body_too_slow() -> Refusal:
    """The body did not arrive in time."""
    return Refusal(status=408, code="body_too_slow", message="the body did not arrive in time")


def invalid_json(text: str) -> Refusal:
    """The body is no request."""
    return Refusal(status=400, code="invalid_json", message=text)


def model_not_found(model: str) -> Refusal:
    """No engine serves this model to this tenant."""
    shown = model if len(model) <= 100 else f"{model[:100]}..."
    text = f"the model {shown!r} is not served to you" if model else "the body must name a model"
    return Refusal(status=404 if model else 400, code="model_not_found", message=text)


def gateway_full(retry_after_s: float) -> Refusal:
    """Too many bodies at once."""
    text = "the gateway holds as many requests as it can; come again"
    return Refusal(status=503, code="gateway_full", message=text, retry_after_s=retry_after_s)


def no_engine(retry_after_s: float) -> Refusal:
    """None of the engines for this request can be used."""
    text = "no engine for this request can be reached at the moment"
    return Refusal(status=503, code="no_engine", message=text, retry_after_s=retry_after_s)


def engine_failed() -> Refusal:
    """The engine broke off before its first byte, and no other could take over."""
    return Refusal(
        status=502, code="engine_failed", message="the engine broke off", retry_after_s=1.0
    )


def engine_too_slow() -> Refusal:
    """The engine did not answer in time."""
    return Refusal(status=504, code="engine_too_slow", message="the engine did not answer in time")


def internal_error() -> Refusal:
    """A fault of the gateway; the log says which."""
    return Refusal(status=500, code="internal_error", message="the gateway failed")
