"""Salts of the prefix cache: tenants with different salts never share a cached block.

Sharing would let one tenant find out, by the time to the first token, what another one has asked.
A salt tells nothing about its tenant without the secret, and cannot be made by a client.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Final

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.vllm.settings import SALT_SECRET

_PURPOSE: Final = "prefix cache"
_LENGTH_BYTES: Final = 8
_SHORTEST_SECRET: Final = 16


def new_secret() -> str:
    """A random secret, good for one start of the server."""
    return secrets.token_hex(32)


def salt_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret that salts are derived from.

    Without one in the environment it is random: tenants stay apart all the same, but no other
    process can make the same salts. One server's cache needs no more; a KV store that several
    servers share, or that outlives them, finds nothing again without a secret of its own.

    Raises:
        InputError: the secret is too short to be one.
    """
    given = environment.get(SALT_SECRET)
    if given is None:
        return new_secret().encode()
    if len(given) < _SHORTEST_SECRET:
        raise InputError(
            SALT_SECRET,
            bound=f"at least {_SHORTEST_SECRET} characters",
            remedy="take 32 random bytes, or unset it for a random one",
        )
    return given.encode()


def tenant_salt(secret: bytes, tenant: str) -> str:
    """The cache salt of a tenant.

    HMAC-SHA256 over the parts, each after its length, so that no two lists of parts give the same
    bytes: ("ab", "c") is not ("a", "bc").

    Returns:
        64 hexadecimal digits.
    """
    return hmac.new(secret, length_prefixed(_PURPOSE, tenant), hashlib.sha256).hexdigest()


def length_prefixed(*parts: str) -> bytes:
    """The parts in UTF-8, each after its length in bytes (8, big-endian)."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in encoded)
