"""What a conversation remembers between units, as two frozen snapshots that live in the ledger.

`Conversation` is written with each commit: everything that decides the next prompt and answer.
`Speech` is written with each journal call: everything that decides the next sound. A recovery that
finds `Speech` one unit behind runs that unit's voice again from there.
"""

import msgspec

from duplex_api.window import WindowBoundary
from duplex_sidecar.framing.units import FramerState
from duplex_sidecar.model.minicpmo45.decode import PolicyState
from duplex_sidecar.model.minicpmo45.handoff import INITIAL_HANDOFF_STATE, HandoffState
from duplex_sidecar.model.minicpmo45.producer import INITIAL_PRODUCER_STATE, ProducerState
from duplex_sidecar.model.minicpmo45.talker_context import TalkerContext
from duplex_sidecar.window.parts import HistoryUnit
from duplex_sidecar.window.state import EMPTY_WINDOW, WindowState


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """State after the last committed unit.

    seq: that unit (0: none yet). completed: its input and answer, which the next append closes.
    completed_ends: the strongest boundary at which that answer ended. framing: of the durable input
    only. encoder_mark_samples: encoder input from which a restore replays.
    rebuild_ms_per_token: what rebuilds have cost, for predictions; 0 before the first.
    listens_next: the reply was stopped behind that unit; the next one listens, whatever comes.
    prompt_changed: units before have been cut: no stream holds this conversation yet.
    """

    seq: int
    policy: PolicyState
    window: WindowState
    completed: HistoryUnit | None
    completed_ends: WindowBoundary
    framing: FramerState
    encoder_mark_samples: int
    rebuild_ms_per_token: float
    listens_next: bool = False
    prompt_changed: bool = False


class SentUnit(msgspec.Struct, frozen=True, array_like=True):
    """Sound of a unit that was sent: 24 kHz samples [from_samples, to_samples) of its turn.
    sequence: of the unit's last event."""

    unit: int
    turn: int
    from_samples: int
    to_samples: int
    sequence: int


SENT_UNITS_KEPT = 32
"""A reply can be taken back as far as that; a player hardly holds more than half a minute."""


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """State after the last voiced unit.

    turn: number of the present or last turn as the client counts them, from 1. turn_open: between
    its first and last mark. turn_text, turn_samples, turn_codes: what of the present turn sounded.
    turn_text_rest: bytes of a character that is not complete yet.
    codes: of the last condition. recent_codes: the turn's last 16. last_sequence: newest journaled
    event. sent: the last units with sound, oldest first.
    """

    unit: int
    turn: int
    turn_open: bool
    turn_text: str
    turn_text_rest: bytes
    turn_samples: int
    turn_codes: int
    handoff: HandoffState
    talker: TalkerContext | None
    codes: tuple[int, ...]
    recent_codes: tuple[int, ...]
    producer: ProducerState
    epoch: int
    stage2_sequence: int
    last_sequence: int
    sent: tuple[SentUnit, ...] = ()


def first_conversation(policy: PolicyState, framing: FramerState) -> Conversation:
    return Conversation(
        seq=0,
        policy=policy,
        window=EMPTY_WINDOW,
        completed=None,
        completed_ends=WindowBoundary.UNIT,
        framing=framing,
        encoder_mark_samples=0,
        rebuild_ms_per_token=0.0,
    )


def first_speech() -> Speech:
    return Speech(
        unit=0,
        turn=0,
        turn_open=False,
        turn_text="",
        turn_text_rest=b"",
        turn_samples=0,
        turn_codes=0,
        handoff=INITIAL_HANDOFF_STATE,
        talker=None,
        codes=(),
        recent_codes=(),
        producer=INITIAL_PRODUCER_STATE,
        epoch=0,
        stage2_sequence=-1,
        last_sequence=0,
    )


encode_conversation = msgspec.msgpack.Encoder().encode
decode_conversation = msgspec.msgpack.Decoder(Conversation).decode
encode_speech = msgspec.msgpack.Encoder().encode
decode_speech = msgspec.msgpack.Decoder(Speech).decode
