"""The OpenAI-GA-shaped wire: what is parsed, what is refused by name, what a replay looks like."""

import base64
import json
from typing import Any

import msgspec
import pytest

from duplex_sidecar.doors.openai_events import render_event
from duplex_sidecar.doors.openai_wire import (
    MAX_MESSAGE_BYTES,
    UNSUPPORTED_TYPES,
    Resume,
    WireError,
    parse_message,
)
from duplex_sidecar.protocol.commands import (
    AcknowledgePlayback,
    AppendInput,
    AudioEncoding,
    CancelReply,
    Close,
    CommitInput,
    Heartbeat,
    SetInputFormat,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    OPENING_STEPS,
    Audio,
    Decision,
    Failure,
    InputAccepted,
    InputFormatSet,
    Sequenced,
    SessionOpened,
    Transcript,
    TurnMark,
    TurnStep,
    TurnTruncated,
    UnitDone,
)

pytestmark = pytest.mark.unit


def wire(**event: Any) -> str:
    return json.dumps(event)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_append_carries_samples_frames_and_the_clients_own_position() -> None:
    command = parse_message(
        wire(
            type="input_audio_buffer.append",
            audio=b64(b"\1\0\2\0"),
            video_frames=[b64(b"jpeg")],
            from_sample=1600,
            event_id="e1",
        )
    )
    assert command == AppendInput(
        audio=b"\1\0\2\0", frames=(b"jpeg",), from_sample=1600, event_id="e1"
    )


@pytest.mark.parametrize(
    ("event", "command"),
    [
        ({"type": "input_audio_buffer.commit"}, CommitInput()),
        ({"type": "session.heartbeat", "event_id": "h"}, Heartbeat("h")),
        ({"type": "session.close"}, Close()),
        ({"type": "response.cancel"}, CancelReply()),
        (
            {"type": "response.cancel", "response_id": "resp_a_b_12", "client_sequence": 4},
            CancelReply(12, None, 4),
        ),
        (
            {
                "type": "conversation.item.truncate",
                "item_id": "item_a_b_3",
                "content_index": 0,
                "audio_end_ms": 840,
                "event_id": "e",
            },
            TruncateReply(3, 840, "e"),
        ),
        (
            {"type": "playback.ack", "item_id": "item_a_b_3", "played_samples": 24_000},
            AcknowledgePlayback(3, 24_000),
        ),
        (
            {"type": "session.update", "client_sequence": 2, "session": {}},
            SetInputFormat(AudioEncoding.PCM16, 24_000, None, 2),
        ),
        (
            {"type": "session.resume", "last_received_server_event_seq": 7},
            Resume(last_received_server_event_seq=7),
        ),
    ],
)
def test_plain_events(event: dict[str, Any], command: object) -> None:
    assert parse_message(json.dumps(event), "a_b") == command


@pytest.mark.parametrize(
    "name",
    ["item_other_3", "item_a_b", "item_a_b_0", "item_a_b_-1", "resp_a_b_3", "item_in_3", "x"],
)
def test_only_items_of_the_session_are_known(name: str) -> None:
    for event in (
        {"type": "conversation.item.truncate", "item_id": name, "audio_end_ms": 1},
        {"type": "playback.ack", "item_id": name, "played_samples": 1},
    ):
        with pytest.raises(WireError) as error:
            parse_message(wire(**event), "a_b")
        assert error.value.code is ErrorCode.PLAYBACK_ITEM_NOT_FOUND
        assert error.value.param == "item_id"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"temperature": 0.5}, "session.temperature"),
        ({"tools": []}, "session.tools"),
        ({"output_modalities": ["text"]}, "session.output_modalities"),
        ({"audio": {"input": {"turn_detection": {}}}}, "session.audio.input.turn_detection"),
        ({"audio": {"output": {"voice": "alloy"}}}, "session.audio.output.voice"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(session: dict[str, Any], param: str) -> None:
    with pytest.raises(WireError) as error:
        parse_message(wire(type="session.update", session=session))
    assert error.value.code is ErrorCode.IMMUTABLE_SETTING
    assert error.value.param == param


def test_what_has_one_value_only_may_be_said() -> None:
    session = {
        "type": "realtime",
        "output_modalities": ["audio"],
        "audio": {"input": {"turn_detection": None}, "output": {"format": {"type": "audio/pcm"}}},
    }
    expected = SetInputFormat(AudioEncoding.PCM16, 24_000)
    assert parse_message(wire(type="session.update", session=session)) == expected


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        (None, SetInputFormat(AudioEncoding.PCM16, 24_000)),
        ({"type": "audio/pcm", "rate": 16_000}, SetInputFormat(AudioEncoding.PCM16, 16_000)),
        ({"type": "audio/pcmu"}, SetInputFormat(AudioEncoding.G711_ULAW, 8_000)),
        ({"type": "audio/pcma"}, SetInputFormat(AudioEncoding.G711_ALAW, 8_000)),
    ],
)
def test_session_update_declares_the_input_format(
    format_: dict[str, Any] | None, expected: SetInputFormat
) -> None:
    audio = {"input": {} if format_ is None else {"format": format_}}
    session = {"type": "realtime", "audio": audio}
    assert parse_message(wire(type="session.update", session=session)) == expected


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("{", ErrorCode.INVALID_JSON),
        ("\ud800", ErrorCode.INVALID_JSON),
        ("[" * 100_000, ErrorCode.INVALID_EVENT),
        ('{"type":"session.heartbeat","x":' + "[" * 5_000, ErrorCode.INVALID_JSON),
        (
            '{"type":"session.update","session":' + '{"a":' * 5_000 + "1" + "}" * 5_001,
            ErrorCode.INVALID_JSON,
        ),
        ("[]", ErrorCode.INVALID_EVENT),
        ("{}", ErrorCode.INVALID_EVENT),
        (wire(type=5), ErrorCode.INVALID_EVENT),
        (wire(type="no.such.event"), ErrorCode.UNKNOWN_EVENT),
        (wire(type="input_audio_buffer.append"), ErrorCode.INVALID_EVENT),
        (wire(type="input_audio_buffer.append", audio=5), ErrorCode.INVALID_EVENT),
        (wire(type="input_audio_buffer.append", audio="*"), ErrorCode.INVALID_AUDIO),
        (wire(type="input_audio_buffer.append", audio="", extra=1), ErrorCode.INVALID_EVENT),
        (
            wire(type="input_audio_buffer.append", audio="", video_frames=["*"]),
            ErrorCode.INVALID_FRAME,
        ),
        (
            wire(type="input_audio_buffer.append", audio="", video_frames=["", "", ""]),
            ErrorCode.TOO_MANY_FRAMES,
        ),
        (
            wire(type="session.update", session={"instructions": "x"}),
            ErrorCode.IMMUTABLE_SETTING,
        ),
        (
            wire(type="session.update", session={"sliding_window_mode": "basic"}),
            ErrorCode.SLIDING_WINDOW_UPDATE_UNSUPPORTED,
        ),
        (
            wire(
                type="session.update",
                session={"audio": {"input": {"format": {"type": "audio/pcm", "rate": 4000}}}},
            ),
            ErrorCode.INVALID_SAMPLE_RATE,
        ),
        (
            wire(
                type="session.update",
                session={"audio": {"input": {"format": {"type": "audio/mp3", "rate": 16000}}}},
            ),
            ErrorCode.UNSUPPORTED_AUDIO_FORMAT,
        ),
        (
            wire(
                type="session.update",
                session={"audio": {"output": {"format": {"type": "audio/pcmu"}}}},
            ),
            ErrorCode.UNSUPPORTED_AUDIO_FORMAT,
        ),
        (
            wire(type="session.update", session={"audio": {"inptu": {}}}),
            ErrorCode.INVALID_EVENT,
        ),
        (wire(type="response.cancel", client_sequence=0), ErrorCode.INVALID_EVENT),
        (
            wire(type="conversation.item.truncate", item_id="item_s_1", audio_end_ms=-1),
            ErrorCode.INVALID_EVENT,
        ),
        (
            wire(
                type="conversation.item.truncate",
                item_id="item_s_1",
                content_index=1,
                audio_end_ms=1,
            ),
            ErrorCode.PLAYBACK_ITEM_NOT_FOUND,
        ),
        (
            wire(type="playback.ack", item_id="item_s_1", played_samples=1, played_ms=1),
            ErrorCode.INVALID_EVENT,
        ),
    ],
)
def test_bad_messages_are_refused_by_name(raw: str, code: ErrorCode) -> None:
    with pytest.raises(WireError) as error:
        parse_message(raw)
    assert error.value.code is code


def test_an_oversized_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(WireError) as error:
        parse_message(b"x" * (MAX_MESSAGE_BYTES + 1))
    assert error.value.code is ErrorCode.EVENT_TOO_LARGE


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED_TYPES))
def test_known_but_unserved_events_say_so_and_name_the_event(kind: str) -> None:
    with pytest.raises(WireError) as error:
        parse_message(wire(type=kind, event_id="mine"))
    assert error.value.code is ErrorCode.UNSUPPORTED_EVENT
    assert error.value.event_id == "mine"


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED_TYPES))
def test_unserved_events_say_why(kind: str) -> None:
    with pytest.raises(WireError) as error:
        parse_message(wire(type=kind))
    assert error.value.detail == f"{kind} is not served: {UNSUPPORTED_TYPES[kind]}"


def test_a_stopped_turn_is_cancelled_and_its_item_incomplete() -> None:
    ended = rendered(Sequenced(9, TurnMark(TurnStep.ENDED, 3, 9, 24_000, "hel", cancelled=True)))
    assert ended["response"]["status"] == "cancelled"
    assert ended["response"]["status_details"]["reason"] == "client_cancelled"
    assert ended["response"]["output"][0]["status"] == "incomplete"
    told = rendered(Sequenced(10, TurnTruncated(3, 9, 840, 7)))
    assert (told["type"], told["item_id"], told["content_index"], told["audio_end_ms"]) == (
        "conversation.item.truncated",
        "item_s_3",
        0,
        840,
    )


def rendered(event: Any) -> dict[str, Any]:
    return json.loads(render_event(event, "s", "m"))


def test_a_turn_opens_and_closes_in_the_public_order() -> None:
    marks = [
        rendered(Sequenced(n, TurnMark(step, 3, 9, 24_000, "hello")))
        for n, step in enumerate((*OPENING_STEPS, *CLOSING_STEPS), start=1)
    ]
    assert [mark["type"] for mark in marks] == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]
    assert [mark["server_event_seq"] for mark in marks] == list(range(1, 9))
    assert marks[-1]["response"]["output"][0]["content"][0]["transcript"] == "hello"


def test_a_sequenced_event_has_the_same_bytes_whenever_it_is_rendered() -> None:
    event = Sequenced(5, Audio(1, 4, 2, 0, 0, b"\1\0"))
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Sequenced)
    assert render_event(event, "s", "m") == render_event(copy, "s", "m")
    assert rendered(event)["delta"] == b64(b"\1\0")
    assert rendered(Sequenced(6, Transcript(1, 4, "hi")))["delta"] == "hi"


def update_refused(session: dict[str, Any]) -> WireError:
    with pytest.raises(WireError) as refused:
        parse_message(json.dumps({"type": "session.update", "session": session}))
    return refused.value


def test_a_name_of_the_older_protocol_is_answered_with_the_present_one() -> None:
    error = update_refused({"input_audio_format": "pcm16"})
    assert (error.code, error.param) == (ErrorCode.IMMUTABLE_SETTING, "session.input_audio_format")
    assert "session.audio.input.format" in error.detail
    assert update_refused({"tools": []}).detail == ERRORS[ErrorCode.IMMUTABLE_SETTING].sentence


def test_a_refused_format_is_named() -> None:
    heard = update_refused({"audio": {"input": {"format": {"type": "audio/ogg"}}}})
    assert heard.code is ErrorCode.UNSUPPORTED_AUDIO_FORMAT
    assert "'audio/ogg'" in heard.detail
    spoken = {"output": {"format": {"type": "audio/pcm", "rate": 8_000}}}
    assert "'audio/pcm' at 8000 Hz" in update_refused({"audio": spoken}).detail


def test_what_does_not_fit_is_told_with_its_place() -> None:
    error = update_refused({"audio": {"input": {"format": {"type": "audio/pcm", "rate": "16k"}}}})
    assert error.code is ErrorCode.INVALID_EVENT
    assert error.param == "session.audio.input.format.rate"
    assert "`$.session.audio.input.format.rate`" in error.detail
    with pytest.raises(WireError) as refused:
        parse_message('{"type": "playback.ack", "item_id": "item_s_1", "played_samples": "x"}')
    assert refused.value.param == "played_samples"


def test_an_event_without_a_number_has_an_id_of_its_own() -> None:
    failure = Failure(ErrorCode.INPUT_OVERFLOW, "too much", None, "e")
    ids = {rendered(failure)["event_id"] for _ in range(100)}
    assert len(ids) == 100
    assert not any(name.removeprefix("event_").isdigit() for name in ids)
    assert rendered(Sequenced(6, Transcript(1, 4, "hi")))["event_id"] == "event_6"


def test_unsequenced_events_carry_no_sequence() -> None:
    opened = rendered(SessionOpened("s", False, 1, 1, 0, 0, 0, "context", 16_000))
    assert opened["type"] == "session.created"
    assert opened["session"]["audio"]["input"]["format"]["rate"] == 16_000
    accepted = rendered(InputAccepted(2, 16_000, 32_000))
    assert accepted["duplex"]["to_sample"] == 32_000
    failure = rendered(Failure(ErrorCode.INPUT_OVERFLOW, "too much", None, "e"))
    assert failure["error"]["code"] == "input_overflow"
    assert failure["error"]["event_id"] == "e"
    for message in (opened, accepted, failure):
        assert "server_event_seq" not in message


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        (AudioEncoding.PCM16, "audio/pcm"),
        (AudioEncoding.FLOAT32, "audio/x-f32le"),
        (AudioEncoding.G711_ULAW, "audio/pcmu"),
        (AudioEncoding.G711_ALAW, "audio/pcma"),
    ],
)
def test_a_format_that_was_set_is_told_as_it_is(encoding: AudioEncoding, name: str) -> None:
    updated = rendered(InputFormatSet(encoding, 16_000))
    assert updated["session"]["audio"]["input"]["format"] == {"type": name, "rate": 16_000}


def test_unit_facts_are_our_own_event() -> None:
    unit = UnitDone(
        unit=1,
        turn=0,
        decision=Decision.LISTEN,
        tokens=1,
        window_tokens=31,
        rebuild_cause=None,
        rebuild_ms=None,
        dropped_units=0,
        head=2,
        epoch=0,
        stage2_sequence=None,
        audio_samples=0,
        wall_ms=40.0,
        stage_ms={"thinker": 30.0},
        replica="r",
    )
    assert rendered(Sequenced(1, unit))["type"] == "duplex.unit"


def test_every_error_code_has_its_entry_and_none_closes_with_1011() -> None:
    assert set(ERRORS) == set(ErrorCode)
    assert all(entry.close_code != 1011 for entry in ERRORS.values())
