"""From the words of a Redis command to what a checker wants to know of it. Pure.

The order of a script's arguments is that of the scripts' own heads (`ledger/scripts/*.lua`).
"""

import hashlib
from collections.abc import Sequence

import msgspec

from duplex_sidecar.history.observations import ChainWrite, EventFacts, JournalWrite
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.keys import session_of
from duplex_sidecar.window.state import WindowState

MAX_TEXT_CHARACTERS = 120
"""Longer arguments are named by their hash."""

_EVENTS_AT = 14
_STATE_AT = 7
_CHAIN = frozenset({ScriptName.ACCEPT, ScriptName.COMMIT, ScriptName.NOTE})
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
    write: ChainWrite | JournalWrite | None = None
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


def _write(script: str, arguments: Sequence[bytes]) -> ChainWrite | JournalWrite | None:
    if script in _CHAIN:
        record = arguments[6]
        window = _window(arguments[_STATE_AT]) if script == ScriptName.COMMIT else None
        head = _decode_head(record)
        return ChainWrite(
            head.kind,
            int(arguments[4]),
            arguments[3].decode(),
            arguments[5].decode(),
            record.decode(),
            window,
        )
    if script == ScriptName.CREATE:
        head = _decode_head(arguments[2])
        return ChainWrite(
            head.kind, 0, head.prev_hash, arguments[1].decode(), arguments[2].decode()
        )
    if script == ScriptName.JOURNAL:
        first = int(arguments[4])
        events = [_event(first + place, data) for place, data in enumerate(arguments[_EVENTS_AT:])]
        return JournalWrite(int(arguments[3]), first, tuple(events))
    return None


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
