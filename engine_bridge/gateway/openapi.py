"""What the gateway serves, as OpenAPI 3.1 describes it: for clients, and for tests that compare.

Bodies are described as far as the gateway itself reads them; the rest of them is the engine's. It
serves nothing: `proxy` and `admin` show what is made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from trimtab.engine_bridge.plan.section import LARGEST_COUNT

PATH: Final = "/openapi.json"
"""Where both doors show their descriptions."""
REFUSED_BEFORE: Final[Mapping[int, tuple[str, ...]]] = {
    400: ("invalid_http",),
    408: ("head_too_slow",),
    431: ("head_too_large",),
    503: ("gateway_full",),
}
"""Codes by status of what is no request yet, whatever its path."""
REFUSED: Final[Mapping[int, tuple[str, ...]]] = {
    400: ("invalid_json", "invalid_value", "model_not_found"),
    401: ("invalid_api_key",),
    403: ("tenant_suspended",),
    404: ("model_not_found", "not_served"),
    405: ("method_not_allowed",),
    408: ("body_too_slow",),
    413: ("body_too_large", "prompt_too_long", "prefill_too_long", "over_quota_for_good"),
    429: (
        "requests_quota", "prompt_tokens_quota", "output_tokens_quota", "budget_spent",
        "concurrency", "tenant_slowed",
    ),
    500: ("internal_error",),
    502: ("engine_failed",),
    503: ("gateway_full", "no_engine", "engine_saturated"),
    504: ("engine_too_slow",),
}  # fmt: skip
"""Codes by status of what is refused once its head is read."""
_WHY: Final[Mapping[int, str]] = {
    400: "The body is no request, or not one that could be charged.",
    401: "The API key is missing or unknown.",
    403: "The account is suspended.",
    404: "Nothing is there, or not for this tenant.",
    405: "Another method is served here.",
    408: "The request did not arrive in time.",
    413: "The request is larger than it may ever be.",
    429: "A quota is used up for now.",
    431: "The request line and headers are too long.",
    500: "The gateway failed, or the engine did.",
    502: "The engine broke off.",
    503: "The gateway or the engine is full, or none can be reached; come again.",
    504: "The engine did not answer in time.",
}
_COUNT: Final = {"type": ["integer", "null"], "minimum": 0, "maximum": LARGEST_COUNT}
_BODIES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "/v1/completions": (
        "A completion.",
        {"prompt": {}, "max_tokens": _COUNT, "n": _COUNT, "stream": {"type": "boolean"}},
    ),
    "/v1/chat/completions": (
        "The next message of a conversation.",
        {
            "messages": {"type": "array"},
            "max_completion_tokens": _COUNT,
            "max_tokens": _COUNT,
            "n": _COUNT,
            "stream": {"type": "boolean"},
        },
    ),
    "/v1/responses": (
        "An answer; an engine may keep it unless `store` is false.",
        {
            "input": {},
            "max_output_tokens": _COUNT,
            "store": {"type": "boolean"},
            "stream": {"type": "boolean"},
        },
    ),
    "/v1/messages": (
        "The next message of a conversation, by Anthropic's interface.",
        {"messages": {"type": "array"}, "max_tokens": _COUNT, "stream": {"type": "boolean"}},
    ),
    "/v1/embeddings": ("Embeddings of texts.", {"input": {}}),
}


def clients_description() -> dict[str, Any]:
    """What clients are served."""
    paths: dict[str, Any] = {
        path: {"post": _generating(path, summary, fields)}
        for path, (summary, fields) in _BODIES.items()
    }
    paths["/v1/models"] = {"get": _models_list()}
    paths["/v1/models/{model}"] = {"get": _model_card()}
    paths[PATH] = {"get": _own_description(refused=(405,))}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Trimtab gateway",
            "version": "1",
            "description": "OpenAI's interface in front of several engines. Before a request is "
            f"one, it may be refused with {_all_codes(REFUSED_BEFORE)}; with "
            f"{_all_codes({404: ('not_served',)})} where nothing is described here.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"EngineError": _ENGINE_ERROR, "Model": _MODEL},
            "headers": {
                "RetryAfter": {
                    "description": "Whole seconds until it may pass.",
                    "schema": {"type": "integer", "minimum": 1},
                },
                "RetryAfterMs": {
                    "description": "The same, in milliseconds.",
                    "schema": {"type": "integer", "minimum": 0},
                },
            },
        },
    }


def admin_description() -> dict[str, Any]:
    """What operators are served at the other address."""
    ready = {"200": _plain("Clients may come."), "503": _plain("None should; the text says why.")}
    pages = {
        "/healthz": ("Whether the process lives.", {"200": _plain("It does.")}),
        "/readyz": ("Whether clients should come.", ready),
        "/metrics": ("Metrics for Prometheus.", {"200": _plain("The page.")}),
    }
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "operationId": path[1:], "responses": responses}}
        for path, (summary, responses) in pages.items()
    }
    paths[PATH] = {"get": _own_description(refused=())}
    title = "Trimtab gateway, for operators"
    return {"openapi": "3.1.0", "info": {"title": title, "version": "1"}, "paths": paths}


def _generating(path: str, summary: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["model"],
        "properties": {"model": {"type": "string", "minLength": 1}, **fields},
    }
    streams = "stream" in fields
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        answer["text/event-stream"] = {}
    return {
        "summary": summary,
        "operationId": _name_of(path),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": answer},
            **_refusals(tuple(REFUSED), engines=True),
            "4XX": _engines_error("Any other refusal of the engine."),
            "5XX": _engines_error("Any other failure of the engine."),
        },
    }


def _models_list() -> dict[str, Any]:
    listed = {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}
    schema = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": listed},
    }
    first = "$response.body#/data/0/id"
    links: dict[str, Any] = {"card": {"operationId": "model", "parameters": {"model": first}}}
    for path in _BODIES:
        name = _name_of(path)
        links[name] = {"operationId": name, "requestBody": {"model": first}}
    return {
        "summary": "The models that are served to this tenant.",
        "operationId": "models",
        "responses": {
            "200": {**_json("They are.", schema), "links": links},
            **_refusals((400, 401, 405, 500), engines=False),
        },
    }


def _model_card() -> dict[str, Any]:
    return {
        "summary": "One of them.",
        "operationId": "model",
        "parameters": [
            {
                "name": "model",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        ],
        "responses": {
            "200": _json("It is.", {"$ref": "#/components/schemas/Model"}),
            **_refusals((400, 401, 404, 405, 500), engines=False),
        },
    }


def _own_description(*, refused: tuple[int, ...]) -> dict[str, Any]:
    return {
        "summary": "This description; no key is needed for it.",
        "operationId": "description",
        "security": [],
        "responses": {
            "200": _json("It is.", {"type": "object", "required": ["openapi", "paths"]}),
            **_refusals(refused, engines=False),
        },
    }


_ENGINE_ERROR: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "message": {"type": "string"},
                "code": {"type": ["integer", "null"]},
            },
        }
    },
}
"""What vLLM says; its codes are numbers, the gateway's own are words."""
_MODEL: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}


def _refusals(statuses: tuple[int, ...], *, engines: bool) -> dict[str, Any]:
    """The responses of these statuses; with `engines` an engine's own error may come as well."""
    found: dict[str, Any] = {}
    for status in statuses:
        codes = REFUSED.get(status, ())
        codes += tuple(one for one in REFUSED_BEFORE.get(status, ()) if one not in codes)
        own = _refusal_schema(codes)
        either = {"anyOf": [own, {"$ref": "#/components/schemas/EngineError"}]}
        response = _json(_WHY[status], either if engines else own)
        if status in (429, 503):
            response["headers"] = {
                "Retry-After": {"$ref": "#/components/headers/RetryAfter"},
                "retry-after-ms": {"$ref": "#/components/headers/RetryAfterMs"},
            }
        found[str(status)] = response
    return found


def _refusal_schema(codes: tuple[str, ...]) -> dict[str, Any]:
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "additionalProperties": False,
        "properties": {
            "message": {"type": "string", "minLength": 1},
            "type": {"type": "string"},
            "param": {"type": "null"},
            "code": {"enum": list(codes)},
        },
    }
    return {
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {"error": error},
    }


def _engines_error(description: str) -> dict[str, Any]:
    return _json(description, {"$ref": "#/components/schemas/EngineError"})


def _json(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _plain(description: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"description": description, "content": content}


def _name_of(path: str) -> str:
    return path.removeprefix("/v1/").replace("/", "_")


def _all_codes(table: Mapping[int, tuple[str, ...]]) -> str:
    return ", ".join(f"{status} `{code}`" for status, codes in table.items() for code in codes)


CLIENTS: Final = json.dumps(clients_description()).encode()
"""The description for clients as it is sent."""
ADMIN: Final = json.dumps(admin_description()).encode()
"""The description for operators as it is sent."""
