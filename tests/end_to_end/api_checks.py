"""Schemathesis' hooks: what must hold for every answer of the gateway, whoever made it.

Loaded by name into Schemathesis' own process.
"""

from __future__ import annotations

from typing import Any

import schemathesis

from tests.end_to_end import hostile


@schemathesis.check
def harmless(ctx: Any, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """A refusal says its code and nothing of the inside; an engine's failure is the engine's."""
    hostile.harmless(response.status_code, response.content)
