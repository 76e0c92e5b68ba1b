"""How a client says who it is, at the sidecar's door and at the gateway's alike."""

from collections.abc import Mapping

_TOKEN_PROTOCOL = "openai-insecure-api-key."


def bearer_token(headers: Mapping[str, str]) -> tuple[str, str | None]:
    """(token, subprotocol to confirm). The token comes as `Authorization: Bearer`, or, for
    browsers, which cannot set headers, as the subprotocol `openai-insecure-api-key.<token>`. An
    absent one is the empty string."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offered = [part.strip() for part in headers.get("sec-websocket-protocol", "").split(",")]
    confirmed = "realtime" if "realtime" in offered else None
    if scheme.lower() == "bearer" and token:
        return token.strip(), confirmed
    for part in offered:
        if part.startswith(_TOKEN_PROTOCOL):
            return part.removeprefix(_TOKEN_PROTOCOL), confirmed
    return "", confirmed
