"""How a client learns that its request was given up (rule 15): by an error that it may retry.

It makes vLLM's outputs; who is given up, the rules decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.outputs import RequestError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request

TOO_LATE = RequestError(
    code="generation_error",
    message="The engine is saturated: this request can no longer be served in time. Retry later.",
    retryable=True,
)

# vLLM 0.32 has no field for it: its clients get a general error.
_REASON = {"error": TOO_LATE} if "error" in EngineCoreOutput.__struct_fields__ else {}


def answer(outputs: dict[int, EngineCoreOutputs], requests: Iterable[Request]) -> None:
    """Add the answer of each given-up request to the step's outputs, by client."""
    for request in requests:
        at = outputs.setdefault(request.client_index, EngineCoreOutputs())
        output: Any = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
            **_REASON,
        )
        at.outputs.append(output)
