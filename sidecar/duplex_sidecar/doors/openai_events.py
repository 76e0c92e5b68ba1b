"""The OpenAI-GA-shaped realtime protocol: what a client hears, protocol events -> wire JSON.

One sequenced event is one wire message, so `server_event_seq` counts messages. Its ids are derived
from session, turn and sequence: a replayed message has the bytes it had the first time. The others
are never replayed; each has an `event_id` of its own. Our own extensions are the `duplex` field of
standard events and the event types that start with `duplex.`.
"""

import secrets
from typing import Any

import msgspec

from duplex_sidecar.doors.openai_wire import INPUT_TYPES, OUTPUT_RATE_HZ
from duplex_sidecar.protocol.commands import AudioEncoding
from duplex_sidecar.protocol.errors import ERRORS
from duplex_sidecar.protocol.events import (
    Alive,
    Audio,
    Closed,
    CommandApplied,
    Event,
    Failure,
    InputAccepted,
    InputCleared,
    InputFormatSet,
    PlaybackAcknowledged,
    ResyncRequired,
    Sequenced,
    SessionOpened,
    Transcript,
    TurnMark,
    TurnStep,
    TurnTruncated,
    UnitDone,
)


def render_event(event: Event, session: str, model: str) -> bytes:
    """One event to one wire message (UTF-8 JSON)."""
    if isinstance(event, Sequenced):
        body = _sequenced(event, session)
        body["event_id"] = f"event_{event.sequence}"
        body["server_event_seq"] = event.sequence
    else:
        body = _unsequenced(event, session, model)
        body["event_id"] = passing_event_id()
    return msgspec.json.encode(body)


def passing_event_id() -> str:
    """Of an event without a number: another one each time, on whatever replica. None of a numbered
    event looks like it."""
    return f"event_x{secrets.token_hex(8)}"


def _session_object(
    session: str, model: str, rate_hz: int, encoding: AudioEncoding = AudioEncoding.PCM16
) -> dict[str, Any]:
    """rate_hz, encoding: of the input. A connection begins with the default encoding."""
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session,
        "model": model,
        "output_modalities": ["audio"],
        "audio": {
            "input": {
                "format": {"type": INPUT_TYPES[encoding], "rate": rate_hz},
                "turn_detection": None,
            },
            "output": {"format": {"type": "audio/pcm", "rate": OUTPUT_RATE_HZ}},
        },
    }


def _unsequenced(event: Event, session: str, model: str) -> dict[str, Any]:
    match event:
        case SessionOpened():
            return {
                "type": "session.resumed" if event.resumed else "session.created",
                "session": _session_object(session, model, event.input_rate_hz),
                "duplex": msgspec.to_builtins(event),
            }
        case InputFormatSet():
            return {
                "type": "session.updated",
                "session": _session_object(session, model, event.rate_hz, event.encoding),
            }
        case InputAccepted():
            return {
                "type": "input_audio_buffer.committed",
                "item_id": f"item_in_{event.unit}",
                "previous_item_id": f"item_in_{event.unit - 1}" if event.unit > 1 else None,
                "duplex": msgspec.to_builtins(event),
            }
        case InputCleared():
            return {"type": "input_audio_buffer.cleared"}
        case ResyncRequired():
            return {"type": "session.resync_required", "duplex": msgspec.to_builtins(event)}
        case PlaybackAcknowledged():
            return {
                "type": "playback.acknowledged",
                "item_id": f"item_{session}_{event.turn}",
                "duplex": {"played_samples": event.played_samples},
            }
        case CommandApplied():
            return {
                "type": "session.command_applied",
                "client_event_id": event.event_id,
                "duplex": {"client_sequence": event.client_sequence},
            }
        case Alive():
            return {"type": "session.heartbeat_ack", "client_event_id": event.event_id}
        case Failure():
            entry = ERRORS[event.code]
            return {
                "type": "error",
                "error": {
                    "type": entry.type,
                    "code": event.code,
                    "message": event.detail,
                    "param": event.param,
                    "event_id": event.event_id,
                    "retryable": entry.retryable,
                },
            }
        case Closed():
            return {"type": "session.closed", "reason": event.code, "message": event.detail}
        case Sequenced():  # pragma: no cover - rendered by _sequenced
            raise ValueError("a sequenced event")


def _sequenced(event: Sequenced, session: str) -> dict[str, Any]:
    body = event.body
    if isinstance(body, UnitDone):
        return msgspec.to_builtins(body) | {"type": "duplex.unit"}
    names = {
        "response_id": f"resp_{session}_{body.turn}",
        "item_id": f"item_{session}_{body.turn}",
        "output_index": 0,
        "content_index": 0,
    }
    match body:
        case Transcript():
            return {"type": "response.output_audio_transcript.delta", "delta": body.text} | names
        case Audio():
            facts = {
                "unit": body.unit,
                "epoch": body.epoch,
                "stage2_sequence": body.stage2_sequence,
                "from_sample": body.from_sample,
            }
            return {
                "type": "response.output_audio.delta",
                "delta": body.pcm_s16le,
                "duplex": facts,
            } | names
        case TurnTruncated():
            return {
                "type": "conversation.item.truncated",
                "item_id": names["item_id"],
                "content_index": 0,
                "audio_end_ms": body.heard_ms,
                "duplex": {"unit": body.unit, "taken_back_tokens": body.taken_back_tokens},
            }
        case TurnMark():
            return _turn_mark(body, names)


def _turn_mark(mark: TurnMark, names: dict[str, Any]) -> dict[str, Any]:
    response_id, item_id = names["response_id"], names["item_id"]
    closing = mark.step is TurnStep.ITEM_DONE or mark.step is TurnStep.ENDED
    item = {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "role": "assistant",
        "status": _item_status(mark) if closing else "in_progress",
        "content": [{"type": "output_audio", "transcript": mark.text}] if closing else [],
    }
    response = {
        "id": response_id,
        "object": "realtime.response",
        "status": _response_status(mark),
        "output": [item] if mark.step is TurnStep.ENDED else [],
        "output_modalities": ["audio"],
    }
    if mark.step is TurnStep.ENDED and mark.cancelled:
        response["status_details"] = {"type": "cancelled", "reason": "client_cancelled"}
    part = {"type": "audio", "transcript": mark.text}
    of_item = {"response_id": response_id, "output_index": 0, "item": item}
    match mark.step:
        case TurnStep.STARTED:
            return {"type": "response.created", "response": response}
        case TurnStep.ITEM_STARTED:
            return {"type": "response.output_item.added"} | of_item
        case TurnStep.CONTENT_STARTED:
            return {"type": "response.content_part.added", "part": part} | names
        case TurnStep.AUDIO_DONE:
            return {"type": "response.output_audio.done"} | names
        case TurnStep.TRANSCRIPT_DONE:
            return {
                "type": "response.output_audio_transcript.done",
                "transcript": mark.text,
            } | names
        case TurnStep.CONTENT_DONE:
            return {"type": "response.content_part.done", "part": part} | names
        case TurnStep.ITEM_DONE:
            return {"type": "response.output_item.done"} | of_item
        case TurnStep.ENDED:
            return {
                "type": "response.done",
                "response": response,
                "duplex": {"samples": mark.samples, "unit": mark.unit},
            }


def _item_status(mark: TurnMark) -> str:
    return "incomplete" if mark.cancelled else "completed"


def _response_status(mark: TurnMark) -> str:
    if mark.step is not TurnStep.ENDED:
        return "in_progress"
    return "cancelled" if mark.cancelled else "completed"
