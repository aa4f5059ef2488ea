"""Why a control request was refused, or could not be made; shared by server, store and client.

It holds no texts: whoever finds the fault words it.
"""

from __future__ import annotations

from typing import ClassVar

from trimtab.engine_bridge.errors import InputError, TrimtabError


class ControlSocketError(InputError):
    """The control socket cannot be opened as asked for."""


class ProposalError(InputError):
    """A proposal was refused; what held before holds on."""

    code: ClassVar[str] = "bad_value"
    """What went wrong, for machines; a closed set."""


class HeldError(ProposalError):
    """Somebody else's lease is alive."""

    code = "held"


class StaleVersionError(ProposalError):
    """The proposal was made for another version than the one that holds."""

    code = "stale_version"


class RequestError(ProposalError):
    """What came over the socket is no request of the protocol."""

    code = "bad_request"


class UnauthorizedError(ProposalError):
    """The token is missing or wrong."""

    code = "unauthorized"


class ControlUnavailableError(TrimtabError):
    """No answer from the engine: not there, too slow, or it has closed the connection."""


class ControlRefusedError(TrimtabError):
    """The engine answered, and refused; what held before holds on."""

    def __init__(self, code: str, message: str) -> None:
        """Keep the engine's own words.

        Args:
            code: One of the codes in this module, or one that a newer engine has.
            message: One line.
        """
        self.code = code
        super().__init__(message)
