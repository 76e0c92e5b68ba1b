"""From a message of the realtime door to what a checker wants to know of it. Pure.

Reads the wire as a client does, not with the product's own reader.
"""

import base64
import binascii
import hashlib
from typing import Any, cast

import msgspec

from duplex_sidecar.history.observations import Acknowledged, EventFacts, Opened, Playback

_KINDS = {
    "response.output_audio.delta": "audio",
    "response.output_audio_transcript.delta": "transcript",
    "duplex.unit": "unit_done",
    "conversation.item.truncated": "turn_truncated",
}


class FrameFacts(msgspec.Struct, frozen=True, kw_only=True):
    """As in `observations.Frame`, without where and when."""

    type: str
    event: EventFacts | None = None
    acknowledged: Acknowledged | None = None
    opened: Opened | None = None
    resumes_after: int | None = None
    oldest: int | None = None
    problem: str | None = None
    played: Playback | None = None
    applied: int | None = None


UNREADABLE = FrameFacts(type="unreadable")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def facts_of_message(payload: bytes) -> FrameFacts:
    """payload: a whole text or binary message, either way."""
    try:
        return _facts(_decode(payload), payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, binascii.Error):
        return UNREADABLE


def _facts(message: dict[str, Any], payload: bytes) -> FrameFacts:
    kind = msgspec.convert(message["type"], str)
    more = cast("dict[str, Any]", message.get("duplex") or {})
    if "server_event_seq" in message:
        return FrameFacts(type=kind, event=_event(message, more, payload))
    match kind:
        case "input_audio_buffer.committed" if "unit" in more:
            acknowledged = Acknowledged(more["unit"], more["from_sample"], more["to_sample"])
            return FrameFacts(type=kind, acknowledged=acknowledged)
        case "session.created" | "session.resumed":
            opened = Opened(
                more["session"],
                more["acknowledged_sample"],
                more["last_sequence"],
                more.get("client_sequence", 0),
            )
            return FrameFacts(type=kind, opened=opened)
        case "session.resync_required":
            return FrameFacts(type=kind, oldest=more["oldest"])
        case "session.resume":
            return FrameFacts(type=kind, resumes_after=message["last_received_server_event_seq"])
        case "playback.acknowledged":
            turn = _number_of(message["item_id"])
            played = Playback(turn, more["played_samples"]) if turn is not None else None
            return FrameFacts(type=kind, played=played)
        case "session.command_applied":
            return FrameFacts(type=kind, applied=more["client_sequence"])
        case "error":
            return FrameFacts(type=kind, problem=message["error"]["code"])
        case "session.closed":
            return FrameFacts(type=kind, problem=message["reason"])
        case _:
            return FrameFacts(type=kind)


def _event(message: dict[str, Any], more: dict[str, Any], payload: bytes) -> EventFacts:
    kind = _KINDS.get(message["type"], "turn_mark")
    pcm = base64.b64decode(message["delta"]) if kind == "audio" else None
    facts = message if kind == "unit_done" else more
    return EventFacts(
        sequence=message["server_event_seq"],
        kind=kind,
        sha256=hashlib.sha256(payload).hexdigest(),
        turn=facts["turn"] if kind == "unit_done" else _turn(message),
        unit=facts.get("unit"),
        epoch=facts.get("epoch"),
        stage2_sequence=facts.get("stage2_sequence"),
        from_sample=facts.get("from_sample"),
        samples=0 if pcm is None else len(pcm) // 2,
        pcm_sha256=None if pcm is None else hashlib.sha256(pcm).hexdigest(),
        turn_samples=facts.get("samples") if message["type"] == "response.done" else None,
    )


def _turn(message: dict[str, Any]) -> int | None:
    """The number at the end of the response's id, or of the item's."""
    response = message.get("response") or {}
    return _number_of(
        message.get("response_id") or response.get("id") or message.get("item_id") or ""
    )


def _number_of(name: object) -> int | None:
    number = str(name).rpartition("_")[2]
    return int(number) if number.isdigit() else None
