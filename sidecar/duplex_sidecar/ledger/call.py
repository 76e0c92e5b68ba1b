"""One script call as data, so that an unknown outcome can be resolved by sending it again."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class ScriptName(StrEnum):
    """The scripts of the ledger; each is `scripts/<name>.lua`."""

    CREATE = "create"
    ACQUIRE = "acquire"
    RENEW = "renew"
    RELEASE = "release"
    PARK = "park"
    OFFER = "offer"
    HAND_OVER = "hand_over"
    BREAK = "break"
    ACCEPT = "accept"
    COMMIT = "commit"
    NOTE = "note"
    CUT = "cut"
    CLIENT = "client"
    RESPEAK = "respeak"
    JOURNAL = "journal"
    TOKEN = "token"
    ERASE = "erase"
    REACH = "reach"


Argument = bytes | str | int


class Head(msgspec.Struct, frozen=True):
    """Where the chain ends: what the next write has to name. open_seq: accepted, uncommitted."""

    index: int
    hash: str
    committed_seq: int
    open_seq: int | None


@dataclass(frozen=True)
class PendingCall:
    """`keys[0]` is the session's meta key. `arguments` hold the operation id: the same call sent
    again returns the first answer and changes nothing. then: the chain's head once it is executed,
    None for calls that do not touch the chain. events: first and last sequence that a call puts
    into the journal (last < first: only state)."""

    session: str
    script: ScriptName
    keys: tuple[str, ...]
    arguments: tuple[Argument, ...]
    then: Head | None = None
    events: tuple[int, int] | None = None
