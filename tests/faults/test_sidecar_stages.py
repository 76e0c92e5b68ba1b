"""Stage processes of a serving sidecar are killed: the sidecar stays, the stage comes back, and the
conversations go on as if nothing had been."""

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from support.arena import Arena
from support.ledgers import assert_input_is_whole, committed_units, tokens_of
from support.processes import words_of
from support.realtime import Heard, RealtimeClient, conversing
from support.sidecars import get, survivors
from support.talks import (
    CONTEXT,
    OFF,
    Undisturbed,
    speak_in_step,
    turns_of,
    undisturbed,
)

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.session.catching_up import FULL_CHUNKS

pytestmark = pytest.mark.fault

UNITS = 20
SAME_SOUND = 1e-3
"""Largest difference of two samples that count as the same."""
OTHER_START_S = 21.0
"""Where in the recording the second conversation begins."""


def victims_of(sidecar: LocalSidecar, names: tuple[str, ...]) -> list[psutil.Process]:
    """ "thinker" is the stage's process; "thinker core" the engine core below it."""
    found: list[psutil.Process] = []
    for name in names:
        stage, _, part = name.partition(" ")
        process = sidecar.stage_process(stage)
        assert process is not None, name
        if part:
            cores = [c for c in process.children() if "EngineCore" in "".join(words_of(c)[:1])]
            assert len(cores) == 1, name
            found += cores
        else:
            found.append(process)
    return found


async def restarted(sidecar: LocalSidecar) -> float:
    """Seconds until it was ready again; before that it has to say that it is not. A stage takes
    seconds to come back."""
    began = time.monotonic()
    was_down = False
    async with asyncio.timeout(240):
        while True:
            ready, waiting_for = await asyncio.to_thread(sidecar.readiness)
            if ready and was_down:
                return time.monotonic() - began
            was_down = was_down or bool(waiting_for)
            await asyncio.sleep(0.02)


@dataclass
class Struck:
    """A conversation in which stages were killed. unit: the first one that was not answered when
    they were, by the ledger's own times."""

    heard: Heard
    unit: int


async def attack(
    arena: Arena, names: tuple[str, ...], spoken_turn: bool = True
) -> tuple[Struck, Struck]:
    """Two conversations; in the middle of a unit of both the stages are killed."""
    sidecar = arena.one()
    alone = await undisturbed(sidecar, OFF, UNITS)
    other_alone = await undisturbed(sidecar, CONTEXT, UNITS, OTHER_START_S)
    last_before = alone.inside_turn(3) if spoken_turn else 8
    process = sidecar.process
    assert process is not None
    async with (
        conversing(sidecar, OFF, "one") as one,
        conversing(sidecar, CONTEXT, "two") as two,
    ):
        await asyncio.gather(
            speak_in_step(one, 1, last_before),
            speak_in_step(two, 1, last_before, OTHER_START_S),
        )
        victims = victims_of(sidecar, names)
        going_on = asyncio.gather(
            speak_in_step(one, last_before + 1, UNITS),
            speak_in_step(two, last_before + 1, UNITS, OTHER_START_S),
        )
        watching = asyncio.create_task(restarted(sidecar))
        await asyncio.sleep(0.01)
        killed_ms = time.time_ns() // 1_000_000
        for victim in victims:
            victim.kill()
        seconds = await watching
        print(f"{', '.join(names)}: ready again after {seconds:.1f} s")
        await going_on
        assert process.poll() is None, "the sidecar stays"
        assert survivors(victims, 60) == []
        struck: list[Struck] = []
        for client, expected, start in ((one, alone, 0), (two, other_alone, OTHER_START_S)):
            assert client.heard.errors == [], start
            client.heard.assert_whole()
            records = await committed_units(sidecar.settings.redis_url, client.session)
            assert_input_is_whole(records)
            assert tokens_of(records) == expected.tokens
            unit = next(record["seq"] for record in records if record["at_ms"] > killed_ms)
            assert unit > last_before
            struck.append(Struck(client.heard, unit))
        return struck[0], struck[1]


def restarts(sidecar: LocalSidecar, stage: str) -> float:
    """As the metrics page counts them."""
    page = get(sidecar, "/metrics")[1]
    lines = [line for line in page.splitlines() if line.startswith("duplex_stage_restarts")]
    wanted = [line for line in lines if f'"{stage}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


def rebuilds(heard: Heard) -> list[tuple[int, str]]:
    return [
        (unit["unit"], unit["rebuild_cause"])
        for unit in heard.units
        if unit["rebuild_cause"] not in (None, "slide")
    ]


def assert_epochs_are_whole(heard: Heard) -> list[int]:
    """In each epoch the chunks count on without a gap, from 0 in one that begins with a turn; one
    that begins in mid-turn has heard some of it before, muted. Units in which one does that."""
    begins: list[int] = []
    at: dict[int, int] = {}
    for event in heard.of_type("response.output_audio.delta"):
        facts = event["duplex"]
        epoch, sequence = facts["epoch"], facts["stage2_sequence"]
        if epoch not in at:
            assert epoch > max(at, default=-1)
            begins += [facts["unit"]] if facts["from_sample"] else []
            assert (sequence > 0) == (facts["from_sample"] > 0), "chunks count from 0"
        else:
            assert sequence == at[epoch] + 1
        at[epoch] = sequence
    return begins


@pytest.mark.parametrize(
    "names",
    [("thinker core",), ("thinker", "talker")],
    ids=["the Thinker's engine core", "both engine processes"],
)
async def test_engines_come_back_with_the_same_tokens(arena: Arena, names: tuple[str, ...]) -> None:
    sidecar = arena.one()
    before = restarts(sidecar, "thinker")
    both = await attack(arena, names)
    # The unit under way is submitted again, as a whole prompt, in the window that it had.
    for struck in both:
        assert rebuilds(struck.heard) == [(struck.unit, "engine_restart")]
        assert_epochs_are_whole(struck.heard)
    assert restarts(sidecar, "thinker") == before + 1


async def test_a_lost_vocoder_begins_a_new_epoch_at_chunk_0(arena: Arena) -> None:
    one, two = await attack(arena, ("code2wav",))
    (unit,) = assert_epochs_are_whole(one.heard)
    assert unit in (one.unit - 1, one.unit), "which was answered, perhaps, and had no sound yet"
    assert rebuilds(one.heard) == rebuilds(two.heard) == []
    sidecar = arena.one()
    compared = assert_same_sound(one.heard, await undisturbed(sidecar, OFF, UNITS))
    compared += assert_same_sound(
        two.heard, await undisturbed(sidecar, CONTEXT, UNITS, OTHER_START_S)
    )
    assert compared, "some turn is short enough to be caught up whole"


def assert_same_sound(heard: Heard, alone: Undisturbed) -> int:
    """All samples of every turn are there once, and those of turns that are caught up whole are the
    undisturbed ones. Returns how many turns that were."""
    turns = turns_of(heard)
    sizes = [{turn: sum(map(len, t)) for turn, t in one.items()} for one in (turns, alone.turns)]
    assert sizes[0] == sizes[1]
    whole = [turn for turn, chunks in turns.items() if len(chunks) <= FULL_CHUNKS]
    for turn in whole:
        ours, theirs = samples(turns[turn]), samples(alone.turns[turn])
        assert np.abs(ours - theirs).max() <= SAME_SOUND, f"turn {turn}"
    return len(whole)


def samples(chunks: list[bytes]) -> NDArray[np.float32]:
    return np.frombuffer(b"".join(chunks), "<i2").astype(np.float32) / 32_768


async def test_a_lost_encoder_hears_on_exactly(arena: Arena) -> None:
    """Its state comes back from recorded sound, so the tokens are what they would have been."""
    one, two = await attack(arena, ("encoder",), spoken_turn=False)
    assert rebuilds(one.heard) == rebuilds(two.heard) == []
    assert_epochs_are_whole(one.heard)


def without_vocoder(sidecar: LocalSidecar) -> psutil.Process:
    """Kills it. The one that comes instead stands still before it is ready."""
    while True:
        (victim,) = victims_of(sidecar, ("code2wav",))
        victim.kill()
        deadline = time.monotonic() + 120
        while (heir := sidecar.stage_process("code2wav")) is None or heir.pid == victim.pid:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        heir.suspend()
        if not sidecar.readiness()[0]:
            return heir
        heir.resume()


async def test_who_needs_no_vocoder_does_not_wait_for_it(arena: Arena) -> None:
    """Units that listen go on while the vocoder is down. The next one stands still until they are
    done."""
    sidecar = arena.one()
    silence = bytes(32_000)
    async with conversing(sidecar, OFF) as client:
        await client.append(silence, force_listen=True)
        await client.until_unit(1)
        heir = await asyncio.to_thread(without_vocoder, sidecar)
        try:
            for number in range(2, 8):
                await client.append(silence, force_listen=True)
                await client.until_unit(number)
            assert not (await asyncio.to_thread(sidecar.readiness))[0]
        finally:
            heir.resume()
        client.heard.assert_whole()
    await asyncio.to_thread(sidecar.wait_ready)


async def test_a_session_may_be_opened_and_closed_while_a_stage_restarts(arena: Arena) -> None:
    sidecar = arena.one()
    async with conversing(sidecar, OFF) as client:
        await speak_in_step(client, 1, 2)
        (victim,) = victims_of(sidecar, ("encoder",))
        victim.kill()
        await client.speak(bytes(32_000))
        await end_while_it_waits(client)
    await asyncio.to_thread(sidecar.wait_ready)
    async with conversing(sidecar, OFF) as client:
        await speak_in_step(client, 1, 2)
        client.heard.assert_whole()


async def end_while_it_waits(client: RealtimeClient) -> None:
    closed = await client.close_session()
    assert closed["reason"] == "session_ended"
