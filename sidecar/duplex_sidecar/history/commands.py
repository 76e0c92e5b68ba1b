"""From the words of a Redis command to what a checker wants to know of it. Pure.

The order of a script's arguments is that of the scripts' own heads (`ledger/scripts/*.lua`).
"""

import hashlib
from collections.abc import Sequence

import msgspec

from duplex_sidecar.history.observations import (
    ChainWrite,
    ClientWrite,
    EventFacts,
    JournalWrite,
    Playback,
)
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.keys import session_of
from duplex_sidecar.window.state import WindowState

MAX_TEXT_CHARACTERS = 120
"""Longer arguments are named by their hash."""

_EVENTS_AT = 14
_STATE_AT = 7
_CUT_CLIENT_AT, _CUT_FIRST_EVENT_AT = 9, 10
_CHAIN = frozenset({ScriptName.ACCEPT, ScriptName.COMMIT, ScriptName.NOTE, ScriptName.CUT})
OWNERS_SCRIPTS = frozenset(
    {
        *_CHAIN,
        ScriptName.JOURNAL,
        ScriptName.RENEW,
        ScriptName.RELEASE,
        ScriptName.PARK,
        ScriptName.HAND_OVER,
        ScriptName.RESPEAK,
        ScriptName.TOKEN,
        ScriptName.CLIENT,
    }
)
"""They begin with the owner's fence and nonce."""


class CommandFacts(msgspec.Struct, frozen=True, kw_only=True):
    """As in `observations.Command`, without what happened to it."""

    name: str
    session: str | None = None
    fence: int | None = None
    nonce: str | None = None
    operation: str | None = None
    write: ChainWrite | JournalWrite | ClientWrite | None = None
    arguments: tuple[str, ...] = ()


class _Snapshot(msgspec.Struct):
    window: WindowState


class _RecordHead(msgspec.Struct):
    kind: str
    prev_hash: str = ""
    seq: int = 0


class _Body(msgspec.Struct):
    type: str
    turn: int | None = None
    unit: int | None = None
    epoch: int | None = None
    stage2_sequence: int | None = None
    from_sample: int | None = None
    pcm_s16le: bytes | None = None
    step: str | None = None
    samples: int | None = None


class _Journaled(msgspec.Struct):
    sequence: int
    body: _Body


_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode
_decode_head = msgspec.json.Decoder(_RecordHead).decode
_decode_journaled = msgspec.msgpack.Decoder(_Journaled).decode


def facts_of(words: Sequence[bytes], script: str | None) -> CommandFacts:
    """words: a whole command. script: name of the script that an EVALSHA names, None if unknown."""
    name = words[0].decode("utf-8", "replace").upper()
    if name != "EVALSHA" or script is None or len(words) < 3:
        return CommandFacts(name=name, arguments=tuple(shown(word) for word in words[1:6]))
    key_count = int(words[2])
    keys, arguments = words[3 : 3 + key_count], words[3 + key_count :]
    session = session_of(keys[0].decode("utf-8", "replace")) if keys else None
    owner = script in OWNERS_SCRIPTS
    return CommandFacts(
        name=script,
        session=session,
        fence=int(arguments[0]) if owner else None,
        nonce=_nonce(script, arguments),
        operation=_operation(script, arguments),
        write=_write(script, arguments),
        arguments=tuple(shown(word) for word in arguments),
    )


def shown(word: bytes) -> str:
    """Short text as it is, the rest by length and hash."""
    text = word.decode("utf-8", "replace")
    if len(text) <= MAX_TEXT_CHARACTERS and text.isprintable():
        return text
    return f"{len(word)} bytes sha256:{_sha256(word)[:16]}"


def _nonce(script: str, arguments: Sequence[bytes]) -> str | None:
    if script == ScriptName.ACQUIRE:
        return arguments[0].decode()
    return arguments[1].decode() if script in OWNERS_SCRIPTS else None


def _operation(script: str, arguments: Sequence[bytes]) -> str | None:
    """What the server knows a repeat by."""
    if script in _CHAIN or script in (ScriptName.JOURNAL, ScriptName.RESPEAK):
        return arguments[2].decode()
    if script in (ScriptName.ACQUIRE, ScriptName.CREATE):
        return arguments[0].decode()
    return None


def _write(
    script: str, arguments: Sequence[bytes]
) -> ChainWrite | JournalWrite | ClientWrite | None:
    if script in _CHAIN:
        return _chained(script, arguments)
    if script == ScriptName.CLIENT:
        applied, turn, samples, through = arguments[2:6]
        played = Playback(int(turn), int(samples)) if turn else None
        return ClientWrite(_newest(applied), played, int(through) if turn else 0)
    if script == ScriptName.CREATE:
        head = _decode_head(arguments[2])
        return ChainWrite(
            head.kind, 0, head.prev_hash, arguments[1].decode(), arguments[2].decode()
        )
    if script == ScriptName.JOURNAL:
        return _journaled(int(arguments[3]), int(arguments[4]), arguments[_EVENTS_AT:])
    return None


def _chained(script: str, arguments: Sequence[bytes]) -> ChainWrite:
    record, seq = arguments[6], int(arguments[4])
    journaled: JournalWrite | None = None
    client_sequence: int | None = None
    if script == ScriptName.CUT:
        first = int(arguments[_CUT_FIRST_EVENT_AT])
        journaled = _journaled(seq, first, arguments[_CUT_FIRST_EVENT_AT + 1 :])
        client_sequence = _newest(arguments[_CUT_CLIENT_AT])
    with_state = script in (ScriptName.COMMIT, ScriptName.CUT)
    return ChainWrite(
        _decode_head(record).kind,
        seq,
        arguments[3].decode(),
        arguments[5].decode(),
        record.decode(),
        _window(arguments[_STATE_AT]) if with_state else None,
        journaled,
        client_sequence,
    )


def _journaled(unit: int, first: int, events: Sequence[bytes]) -> JournalWrite:
    found = [_event(first + place, data) for place, data in enumerate(events)]
    return JournalWrite(unit, first, tuple(found))


def _newest(applied: bytes) -> int | None:
    """Of the numbers of a client's commands, as the ledger keeps them; None: nothing is said."""
    words = applied.split()
    return int(words[-1].partition(b":")[0]) if words else None


def _window(state: bytes) -> WindowState | None:
    try:
        return _decode_snapshot(state).window
    except msgspec.MsgspecError:
        return None


def _event(sequence: int, data: bytes) -> EventFacts:
    """One that cannot be read has no facts but its bytes."""
    try:
        body = _decode_journaled(data).body
    except msgspec.MsgspecError:
        return EventFacts(sequence=sequence, kind="unreadable", sha256=_sha256(data))
    pcm = body.pcm_s16le
    return EventFacts(
        sequence=sequence,
        kind=body.type,
        sha256=_sha256(data),
        turn=body.turn,
        unit=body.unit,
        epoch=body.epoch,
        stage2_sequence=body.stage2_sequence,
        from_sample=body.from_sample,
        samples=0 if pcm is None else len(pcm) // 2,
        pcm_sha256=None if pcm is None else _sha256(pcm),
        turn_samples=body.samples if body.step == "ended" else None,
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
