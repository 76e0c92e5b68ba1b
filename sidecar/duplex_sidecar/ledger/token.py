"""Resume tokens: the client holds the token, the ledger only its sha256.

The old token stays valid until the first message under the new one: a lost reply strands nobody.
"""

import hashlib
import hmac
import secrets
from enum import StrEnum


class TokenMatch(StrEnum):
    CURRENT = "current"
    OFFERED = "offered"
    """The newer token, seen for the first time: confirm it with its first message."""
    NONE = "none"


def mint() -> tuple[str, str]:
    """A new token (256 random bits) and the hash that may be stored."""
    token = secrets.token_urlsafe(32)
    return token, token_sha256(token)


def token_sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def match(token: str, current_sha256: str, offered_sha256: str) -> TokenMatch:
    """Compares in constant time; an empty stored hash matches nothing."""
    return match_sha256(token_sha256(token), current_sha256, offered_sha256)


def match_sha256(given: str, current_sha256: str, offered_sha256: str) -> TokenMatch:
    """The same for one that is known by its hash alone."""
    offered = hmac.compare_digest(given.encode(), offered_sha256.encode())
    current = hmac.compare_digest(given.encode(), current_sha256.encode())
    if current:
        return TokenMatch.CURRENT
    return TokenMatch.OFFERED if offered else TokenMatch.NONE
