"""JSON from the API server. What it holds is its users' to write, who may nest it as deep as they
like (in `managedFields` say) and as far as that server goes, which is further than a decoder does:
one such object must not keep the operator from reading all others.
"""

import re
from typing import Any

import msgspec

MOST_DEPTH = 100
"""Of what is read of a text that is too deep for the decoder. Kubernetes has no field as deep."""
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


class Page(msgspec.Struct):
    """One page of a list. items: decoded one by one, so that many large ones are never held
    together."""

    items: list[msgspec.Raw] | None = None
    metadata: dict[str, Any] | None = None


class Event(msgspec.Struct):
    """One line of a watch."""

    type: str = ""
    object: dict[str, Any] | None = None


def decoded(text: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    """kind: as msgspec has types. What lies too deep is null. Raises msgspec.MsgspecError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        return msgspec.json.decode(shallow(bytes(text)), type=kind)


def shallow(text: bytes) -> bytes:
    """The same JSON with null for every object and list that lies deeper than `MOST_DEPTH`."""
    kept, depth, start = bytearray(), 0, 0
    for token in _TOKENS.finditer(text):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            if depth == MOST_DEPTH + 1:
                kept += text[start : token.start()] + b"null"
        elif mark in (b"}", b"]"):
            if depth == MOST_DEPTH + 1:
                start = token.end()
            depth -= 1
    return bytes(kept) + text[start:]
