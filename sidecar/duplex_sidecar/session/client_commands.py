"""What a client says of the replies, and the numbers that it gives its commands.

Such commands wait here until no unit is under way, then they are carried out in their order. A
number that was applied already is answered again and does nothing; one behind a later one that was
applied is refused. What the ledger keeps of the numbers is written with what they changed.
"""

import hashlib
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import structs

from duplex_sidecar.ledger.client_calls import Played
from duplex_sidecar.ledger.client_record import (
    AppliedCommand,
    ClientRecord,
    Turnout,
    encode_client_record,
)
from duplex_sidecar.protocol.commands import (
    AcknowledgePlayback,
    CancelReply,
    ReplyCommand,
    SetInputFormat,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import (
    CommandApplied,
    Event,
    Failure,
    PlaybackAcknowledged,
    Sequenced,
)
from duplex_sidecar.session.conversation import Conversation, Speech
from duplex_sidecar.session.cuts import OUTPUT_SAMPLES_PER_MS, units_of
from duplex_sidecar.session.cutting import ReplyCutter
from duplex_sidecar.session.durable import DurableSession

MAX_WAITING_COMMANDS = 64
MAX_TRUNCATIONS = 64
"""Between two units: each is an entry of the chain, of which only a commit drops anything."""
FINGERPRINT_CHARACTERS = 12

Numbered = ReplyCommand | SetInputFormat
Position = tuple[int, int]
"""(turn, 24 kHz samples of it)."""


def applied_as(command: Numbered) -> AppliedCommand | None:
    """How the ledger knows a numbered command. None: it has no number."""
    if command.client_sequence is None:
        return None
    body = msgspec.json.encode([type(command).__name__, structs.replace(command, event_id=None)])
    fingerprint = hashlib.sha256(body).hexdigest()[:FINGERPRINT_CHARACTERS]
    return AppliedCommand(command.client_sequence, fingerprint)


def is_new(record: ClientRecord, command: AppliedCommand) -> bool:
    """Whether it is to be carried out; False: it was. Raises ClientError for the rest."""
    match record.judge(command):
        case Turnout.NEW:
            return True
        case Turnout.AGAIN:
            return False
        case Turnout.OTHER:
            detail = f"another command was applied as {command.number}"
        case _:
            detail = f"{record.last} is applied: {command.number} comes too late"
    raise ClientError(ErrorCode.OUT_OF_ORDER_EVENT, detail, "client_sequence")


class CommandDesk:
    """Of one session. publish: to the client that is connected."""

    def __init__(
        self,
        cutter: ReplyCutter,
        durable: DurableSession,
        record: ClientRecord,
        played: Position,
        publish: Callable[[Event], None],
    ) -> None:
        """record, played: as the ledger has them."""
        self._cutter = cutter
        self._durable = durable
        self._record = record
        self._played = played
        self._publish = publish
        self._waiting: deque[Numbered] = deque()
        self._truncated = (0, 0)
        """(newest unit, truncations since)."""

    @property
    def waiting(self) -> bool:
        """Whether something is to be carried out between two units."""
        return bool(self._waiting)

    @property
    def last_applied(self) -> int:
        """Number of the newest command that was applied, 0 for none."""
        return self._record.last

    def put(self, command: Numbered) -> None:
        """Raises ClientError when too many wait."""
        self._require_room()
        self._waiting.append(command)

    def admits_format(self, command: SetInputFormat) -> bool:
        """Whether its number has to be put here once the format is set: that holds for its
        connection, so it is set each time it is said. Raises ClientError when it comes too late."""
        numbered = applied_as(command)
        if numbered is None or self._record.judge(numbered) is Turnout.FORGOTTEN:
            return False
        waiting = max((one.client_sequence or 0 for one in self._waiting), default=0)
        again = any(applied_as(one) == numbered for one in self._waiting)
        if is_new(self._record, numbered) and numbered.number <= waiting and not again:
            detail = f"{waiting} came before {numbered.number}"
            raise ClientError(ErrorCode.OUT_OF_ORDER_EVENT, detail, "client_sequence")
        self._require_room()
        return True

    async def run(self, known: Conversation, speech: Speech) -> tuple[Conversation, Speech]:
        """Carry out what waits now; what comes meanwhile waits for the next time, so that units and
        the session's end get their turn. Raises what ends a session."""
        for _ in range(len(self._waiting)):
            if not self._waiting:
                break  # acknowledgements that follow each other are one
            if isinstance(self._waiting[0], AcknowledgePlayback):
                await self._acknowledge(speech)
                continue
            command = self._waiting.popleft()
            try:
                known, speech = await self._apply(command, known, speech)
            except ClientError as error:
                self._publish(_failure(command, error))
        return known, speech

    def _require_room(self) -> None:
        if len(self._waiting) >= MAX_WAITING_COMMANDS:
            raise ClientError(ErrorCode.INPUT_OVERFLOW, "too many commands wait for a unit's end")

    async def _apply(
        self, command: Numbered, known: Conversation, speech: Speech
    ) -> tuple[Conversation, Speech]:
        numbered, record, stored = applied_as(command), self._record, ""
        if numbered is not None:
            if not is_new(record, numbered):
                # Its events are in the journal: the client has them, or gets them from there.
                self._publish(CommandApplied(numbered.number, command.event_id))
                return known, speech
            record = record.then(numbered)
            stored = encode_client_record(record)
        events: list[Sequenced] = []
        match command:
            case CancelReply():
                known, speech, events = await self._cutter.cancel(known, speech, command, stored)
            case TruncateReply():
                self._require_unplayed(command)
                before = self._truncations_since(known.seq)
                known, speech, events = await self._cutter.truncate(known, speech, command, stored)
                self._truncated = (known.seq, before + 1)
            case _:
                await self._durable.client_said(stored)
        self._record = record
        for event in events:
            self._publish(event)
        if numbered is not None:
            self._publish(CommandApplied(numbered.number, command.event_id))
        return known, speech

    def _truncations_since(self, unit: int) -> int:
        """Raises ClientError where the next one has to wait for another unit."""
        newest, count = self._truncated
        if newest != unit:
            return 0
        if count >= MAX_TRUNCATIONS:
            detail = f"{count} truncations since unit {unit}: others after the next one"
            raise ClientError(ErrorCode.INPUT_OVERFLOW, detail)
        return count

    def _require_unplayed(self, command: TruncateReply) -> None:
        heard = (command.heard_ms + 1) * OUTPUT_SAMPLES_PER_MS
        if (command.turn, heard) <= self._played:
            detail = f"turn {self._played[0]} is played up to sample {self._played[1]}"
            raise ClientError(ErrorCode.PLAYBACK_ITEM_MISMATCH, detail, "audio_end_ms")

    async def _acknowledge(self, speech: Speech) -> None:
        """All acknowledgements that wait here, in one write."""
        record, played = self._record, self._played
        answers: list[Event] = []
        while self._waiting and isinstance(command := self._waiting[0], AcknowledgePlayback):
            self._waiting.popleft()
            numbered = applied_as(command)
            try:
                if numbered is None or is_new(record, numbered):
                    played = max(played, _played(command, speech))
                    record = record if numbered is None else record.then(numbered)
            except ClientError as error:
                answers.append(_failure(command, error))
                continue
            answers.append(PlaybackAcknowledged(command.turn, command.played_samples))
            if numbered is not None:
                answers.append(CommandApplied(numbered.number, command.event_id))
        if (record, played) != (self._record, self._played):
            # Of a unit that is just played the last events may be on their way: they come behind
            # its sound. Who plays what comes later has them.
            heard = [s.sequence for s in speech.sent if (s.turn, s.to_samples) < played]
            stored = "" if record is self._record else encode_client_record(record)
            newest = Played(*played, through_event=max(heard, default=0))
            await self._durable.client_said(stored, newest)
        self._record, self._played = record, played
        for answer in answers:
            self._publish(answer)


def _played(command: AcknowledgePlayback, speech: Speech) -> Position:
    """(0, 0) where nothing was played yet: a turn of which nothing sounds is none to the ledger.
    Raises ClientError when no such sound was sent."""
    units = units_of(speech, command.turn)
    if command.played_samples > units[-1].to_samples:
        detail = f"{units[-1].to_samples} samples of it were sent"
        raise ClientError(ErrorCode.PLAYBACK_ITEM_MISMATCH, detail, "played_samples")
    return (command.turn, command.played_samples) if command.played_samples else (0, 0)


def _failure(command: Numbered, error: ClientError) -> Failure:
    return Failure(error.code, error.detail, error.param, command.event_id)
