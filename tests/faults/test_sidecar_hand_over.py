"""Real engines: a conversation goes to and fro between two sidecars in the middle of its turns. Its
tokens are those of one that never moved, its sound has neither gap nor repeat, and its client waits
little longer than one whose session stays."""

import asyncio
import contextlib
import statistics
import time
from typing import Any

import pytest
from support.arena import Arena
from support.ledgers import assert_input_is_whole, committed_units, tokens_of
from support.material import speech
from support.realtime import (
    Gone,
    Heard,
    RealtimeClient,
    close_of,
    joined,
    new_session,
)
from support.standstill import Standstill
from support.talks import CONTEXT, OFF, turns_of, undisturbed
from websockets.exceptions import ConnectionClosed

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar
from duplex_sidecar.ledger.token import token_sha256

pytestmark = pytest.mark.fault
UNITS = 20
MOVES = 5
UNITS_A_MOVE = 3
SLICE_SAMPLES = 3_200
SILENCE_S = 1.0


class PacedCaller:
    """Speaks in real time, also while it has no connection; follows the session."""

    def __init__(self, session: str, token: str) -> None:
        self.heard = Heard()
        self.done_s: dict[int, float] = {}
        self._done: dict[int, asyncio.Event] = {}
        self._session = session
        self._token = token
        self._began_s = 0.0

    async def talk(self, sidecars: list[LocalSidecar], units: int) -> None:
        """sidecars: where the session runs, one after another."""
        for number, sidecar in enumerate(sidecars):
            async with joined(
                sidecar, self._session, self._token, heard=self.heard, resume=number > 0
            ) as client:
                self._began_s = self._began_s or time.monotonic()
                speaking = asyncio.create_task(self._speak(client, units))
                try:
                    await self._listen(client, units)
                    return
                except ConnectionClosed as closed:
                    if close_of(closed) != (1012, "lease_lost"):
                        raise AssertionError(f"{self.heard.errors}") from closed
                finally:
                    speaking.cancel()
                    await asyncio.gather(speaking, return_exceptions=True)

    async def until(self, unit: int, talking: "asyncio.Task[None]") -> None:
        """That unit is done; or the caller has failed."""
        done = self._done.setdefault(unit, asyncio.Event())
        if unit in self.done_s:
            return
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait({waiting, talking}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert done.is_set(), "the conversation is over"

    async def _speak(self, client: RealtimeClient, units: int) -> None:
        whole = speech(units)
        with contextlib.suppress(Gone):
            while client.sent_samples < 16_000 * units:
                due = int((time.monotonic() - self._began_s) * 16_000)
                end = min(16_000 * units, due - due % SLICE_SAMPLES)
                if end > client.sent_samples:
                    await client.speak(whole[2 * client.sent_samples : 2 * end])
                await asyncio.sleep(0.05)

    async def _listen(self, client: RealtimeClient, units: int) -> None:
        while len(self.done_s) < units:
            event = await client.next()
            if event["type"] == "duplex.unit":
                self.done_s.setdefault(event["unit"], time.monotonic())
                self._done.setdefault(event["unit"], asyncio.Event()).set()

    def late_s(self, unit: int) -> float:
        """How long after its last sample was spoken the unit was done."""
        return self.done_s[unit] - (self._began_s + unit)


@pytest.mark.parametrize("text", [CONTEXT, OFF], ids=["context", "off"])
async def test_a_conversation_that_moves_while_it_speaks(arena: Arena, text: str) -> None:
    pair = arena.pair()
    alone = await undisturbed(pair[1], text, UNITS)
    session, token = await asyncio.to_thread(new_session, pair[0], text, "hands")
    caller = PacedCaller(session, token)
    places = [pair[move % 2] for move in range(MOVES + 1)]
    with Standstill() as stood:
        moved = await move_on(caller, session, token, text, places)
    caller.heard.assert_whole()
    records = await committed_units(arena.bed.valkey.url, session)
    assert_input_is_whole(records)
    assert tokens_of(records) == alone.tokens
    causes = [unit["rebuild_cause"] for unit in caller.heard.units]
    assert causes.count("move") == MOVES
    lengths = {turn: sum(map(len, chunks)) for turn, chunks in turns_of(caller.heard).items()}
    assert lengths == {turn: sum(map(len, chunks)) for turn, chunks in alone.turns.items()}

    calm = statistics.median(caller.late_s(unit) for unit in caller.done_s if unit not in moved)
    silences = sorted(
        caller.late_s(unit) - calm - stood.between_s(caller.done_s[unit - 1], caller.done_s[unit])
        for unit in moved
    )
    print(
        f"{MOVES} moves: silence beyond the rest (late by {calm * 1000:.0f} ms)"
        f" p50 {statistics.median(silences) * 1000:.0f} ms, worst {silences[-1] * 1000:.0f} ms"
    )
    assert silences[-1] <= SILENCE_S
    await asyncio.to_thread(places[-1].admin, "DELETE", f"/sessions/{session}")


def handed_over(here: LocalSidecar, session: str, order: dict[str, Any]) -> dict[str, Any]:
    """As an operator does it: asked again where a unit takes longer than the call waits."""
    while True:
        try:
            return here.admin("POST", f"/sessions/{session}/hand-over", order)
        except ApiError as refused:
            if refused.body["error"]["code"] != "session_busy":
                raise


async def move_on(
    caller: PacedCaller,
    session: str,
    token: str,
    text: str,
    places: list[LocalSidecar],
) -> list[int]:
    """A whole conversation; the first unit behind each move."""
    talking = asyncio.create_task(caller.talk(places, UNITS))
    moved: list[int] = []
    for move in range(MOVES):
        await caller.until(UNITS_A_MOVE * (move + 1), talking)
        here, there, fence = places[move], places[move + 1], move + 2
        body = {"manifest": text, "tokenHash": token_sha256(token), "fence": fence}
        answer = await asyncio.to_thread(there.admin, "POST", f"/sessions/{session}/prepare", body)
        assert answer["prepared"]
        order = {"target": there.settings.replica, "fence": fence, "graceSeconds": 0}
        answer = await asyncio.to_thread(handed_over, here, session, order)
        assert answer == {"handedOver": True, "fence": fence}
        moved.append(max(caller.done_s) + 1)
    await talking
    return moved
