"""Schemathesis' hooks: what must hold for every answer of the gateway, whoever made it.

Loaded by name into Schemathesis' own process.
"""

from __future__ import annotations

from typing import Any

import schemathesis

from trimtab.engine_bridge.gateway.openapi import REFUSED, REFUSED_BEFORE

OWN_CODES = {
    code for table in (REFUSED, REFUSED_BEFORE) for codes in table.values() for code in codes
}
OWN_FAULTS = {"internal_error"}
LEAKS = ("Traceback (most recent", 'File "', "site-packages", ".py:", "Error: ", "Exception(")


@schemathesis.check
def a_refusal_says_its_code_and_nothing_of_the_inside(
    ctx: Any, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    if response.status_code < 400:
        return
    error = response.json()["error"]
    code = error["code"]
    if isinstance(code, str):  # the gateway's own; an engine's is a number
        assert code in OWN_CODES, code
        assert code not in OWN_FAULTS, response.text
        assert not [leak for leak in LEAKS if leak in response.text], response.text
    assert "Traceback" not in response.text
