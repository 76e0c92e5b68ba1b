"""Who runs on this replica: live sessions, slots, and how the last ones ended here.

The one place that is told of every change, for those who watch the replica.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from duplex_api.session import SessionSpec
from duplex_sidecar.ledger.records import Opening
from duplex_sidecar.session.actor import SessionActor
from duplex_sidecar.session.ending import Ending
from duplex_sidecar.session.refusals import PlacementRefused, Refusal
from duplex_sidecar.session.token_change import ClientTokens

MAX_DEPARTED = 256
"""Endings that are remembered for watchers that look a little later."""


@dataclass
class Live:
    """terms: the spec that the admin API gave, or, where a client's dial took the session up, what
    it was opened with."""

    actor: SessionActor
    task: "asyncio.Task[None]"
    tokens: ClientTokens
    terms: SessionSpec | Opening


@dataclass(frozen=True)
class Departed:
    """A session that ran here under that fence, up to that unit."""

    number: int
    """Counts departures of this replica, from 1."""
    ending: Ending
    fence: int
    units: int
    epoch: int


class Roster:
    """Slots are counted here and nowhere else."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.live: dict[str, Live] = {}
        self.departed: OrderedDict[str, Departed] = OrderedDict()
        """How sessions ended here, the newest last; bounded."""
        self._departures = 0
        self._opening: set[str] = set()
        self._held: set[str] = set()
        self._watchers: set[asyncio.Event] = set()

    def ids(self) -> set[str]:
        """Sessions that hold a slot, those being opened included, and those of which streams stand
        here while another replica runs them."""
        return {*self.live, *self._opening, *self._held}

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.ids())

    @contextmanager
    def slot(self, session: str) -> Generator[None]:
        """A slot counts as taken while a session is being opened. One that is held is its own."""
        if session not in self._held and self.free_slots < 1:
            raise PlacementRefused(
                Refusal.NO_SLOT, f"all {self.slots} slots of this replica are taken"
            )
        self._opening.add(session)
        try:
            yield
        finally:
            self._opening.discard(session)
            self.changed()

    def hold(self, session: str) -> None:
        """It keeps the slot that it has."""
        self._held.add(session)

    def let_go(self, session: str) -> None:
        self._held.discard(session)
        self.changed()

    def enter(self, session: str, live: Live) -> None:
        self.departed.pop(session, None)
        self.live[session] = live
        live.actor.on_change = self.changed
        self.changed()

    def leave(self, session: str, ending: Ending) -> None:
        actor = self.live.pop(session).actor
        self._departures += 1
        self.departed[session] = Departed(
            self._departures,
            ending,
            actor.lease.fence,
            actor.conversation.seq,
            actor.speech.epoch,
        )
        self.departed.move_to_end(session)
        while len(self.departed) > MAX_DEPARTED:
            self.departed.popitem(last=False)
        self.changed()

    # --- watching ---------------------------------------------------------------------------------

    def changed(self) -> None:
        """Something that watchers want to know at once."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watched(self) -> Generator[asyncio.Event]:
        """An event that is set at each change; who waits for it clears it."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
