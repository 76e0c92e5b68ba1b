"""What a client acknowledges between two units."""

from typing import Any, cast

import pytest
from msgspec import structs

from duplex_sidecar.ledger.client_calls import Played
from duplex_sidecar.ledger.client_record import ClientRecord
from duplex_sidecar.protocol.commands import AcknowledgePlayback
from duplex_sidecar.protocol.events import Event, PlaybackAcknowledged
from duplex_sidecar.session.client_commands import CommandDesk
from duplex_sidecar.session.conversation import SentUnit, first_speech

pytestmark = pytest.mark.unit

SOUNDED = SentUnit(unit=4, turn=1, from_samples=0, to_samples=24_000, sequence=7)
SILENT = SentUnit(unit=6, turn=2, from_samples=0, to_samples=0, sequence=12)
SPEECH = structs.replace(first_speech(), turn=2, sent=(SOUNDED, SILENT))


class FakeDurable:
    def __init__(self) -> None:
        self.said: list[tuple[str, Played | None]] = []

    async def client_said(self, client_applied: str, played: Played | None = None) -> None:
        self.said.append((client_applied, played))


async def test_a_turn_of_which_nothing_sounds_yet_is_not_told_to_the_ledger() -> None:
    durable, told = FakeDurable(), list[Event]()
    desk = CommandDesk(cast("Any", None), cast("Any", durable), ClientRecord(), (0, 0), told.append)
    desk.put(AcknowledgePlayback(turn=2, played_samples=0))
    await desk.run(cast("Any", None), SPEECH)
    assert (durable.said, told) == ([], [PlaybackAcknowledged(2, 0)])
    desk.put(AcknowledgePlayback(turn=1, played_samples=24_000))
    desk.put(AcknowledgePlayback(turn=2, played_samples=0))
    await desk.run(cast("Any", None), SPEECH)
    assert durable.said == [("", Played(1, 24_000, through_event=0))]
