"""What a client did not hear is out of the context, to the last bit: the tiny checkpoint, greedy,
float32, the real session code and ledger on the real Thinker process, against an independent
reference that is fed the layout with what was heard alone.

Three conversations side by side, one for each window mode. Replies are stopped in the middle of a
unit, at its edge, and before anything was heard; one replica dies right behind a truncation, so
that another one renders it from the records.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from support.exact_checks import NotExact, equals_reference
from support.exact_reference import Reference
from support.exact_session import (
    CASTS,
    Cast,
    Speaker,
    Talk,
    World,
    engine,
    make_world,
    open_speaker,
    over,
)
from support.exact_stages import EVEN_SAMPLES, Tapes

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.protocol.commands import TruncateReply
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    Audio,
    CommandApplied,
    TurnMark,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

UNITS = 44
TAKEN_OVER_AT = 24
SAMPLES_PER_MS = 24
HEARD_SHARES = (0.5, 0.0, 1.0, 0.3)
"""Of the newest unit with sound; below 0.4 half of the unit before it, too, if there is one."""
SPOKEN = [cast for cast in CASTS if not cast.camera]
by_cast = pytest.mark.parametrize("cast", SPOKEN, ids=lambda cast: cast.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tiny_checkpoint: Path, valkey: EmbeddedValkey) -> AsyncIterator[World]:
    torch.set_num_threads(1)
    async with engine(tiny_checkpoint, default_cache_dir()) as running:
        yield make_world(tiny_checkpoint, valkey.url, running)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Reference:
    return Reference(tiny_checkpoint)


@dataclass
class Interrupted:
    """A speaker who does not listen to the end. cuts: as in `Talk`, of samples that were heard."""

    speaker: Speaker
    world: World
    cuts: dict[int, dict[int, int]] = field(default_factory=dict)

    def reply(self) -> list[Audio]:
        """The sound of the reply that is under way."""
        bodies = [event.body for event in self.speaker.sequenced]
        marks = [body for body in bodies if isinstance(body, TurnMark)]
        if not marks or marks[-1].step in CLOSING_STEPS:
            return []
        turn = marks[-1].turn
        return [body for body in bodies if isinstance(body, Audio) and body.turn == turn]

    async def talk(self, first: int, last: int) -> None:
        for unit in range(first, last + 1):
            await self.speaker.talk(unit)
            sound = self.reply()
            if len(sound) > 1 or (sound and unit % 2):
                await self.stop(unit, sound)

    async def stop(self, unit: int, sound: list[Audio]) -> None:
        share = HEARD_SHARES[len(self.cuts) % len(HEARD_SHARES)]
        newest = sound[-1]
        heard = newest.from_sample + int(EVEN_SAMPLES * share)
        if share < 0.4 and len(sound) > 1:
            heard = sound[-2].from_sample + EVEN_SAMPLES // 2
        heard_ms = heard // SAMPLES_PER_MS
        answer = await self.speaker.ask(
            TruncateReply(newest.turn, heard_ms, client_sequence=len(self.cuts) + 1)
        )
        assert isinstance(answer, CommandApplied)
        self.cuts[unit] = {
            audio.unit: heard_ms * SAMPLES_PER_MS - audio.from_sample
            for audio in sound
            if audio.from_sample + EVEN_SAMPLES > heard_ms * SAMPLES_PER_MS
        }

    def told(self, talk: Talk) -> Talk:
        """With the ids that were heard, as the share of sound says."""
        cuts = {
            after: {
                unit: self._heard(talk.said[unit - 1], samples) for unit, samples in cut.items()
            }
            for after, cut in self.cuts.items()
        }
        return replace(talk, cuts=cuts)

    def _heard(self, said: tuple[int, ...], samples: int) -> int:
        """The decision to speak has no sound of its own."""
        named = self.world.language.named
        content = said[:-1]
        spoken_from = 1
        if named["<|tts_bos|>"] in content:
            spoken_from = len(content) - content[::-1].index(named["<|tts_bos|>"])
        tokens = (len(content) - spoken_from) * max(0, samples) // EVEN_SAMPLES
        return spoken_from + tokens if tokens else 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talks(world: World) -> dict[str, Talk]:
    tapes: Tapes = {}
    async with (
        world.replica(tapes, audible=True) as here,
        world.replica(tapes, audible=True) as there,
    ):
        speakers = [Interrupted(await open_speaker(here, c, "cut"), world) for c in SPOKEN]
        await asyncio.gather(*(one.talk(1, TAKEN_OVER_AT) for one in speakers))
        for one in speakers:
            await _until_cut(one, TAKEN_OVER_AT + 1)
        there.registry.declare_dead(here.name)
        for one in speakers:
            await one.speaker.dial(there)
        await asyncio.gather(*(one.talk(one.speaker.next_second, UNITS) for one in speakers))
        found = await over([one.speaker for one in speakers], tapes, there.ledger)
        return {one.speaker.cast.name: one.told(found[one.speaker.cast.name]) for one in speakers}


async def _until_cut(one: Interrupted, unit: int) -> None:
    """Up to a unit behind which a reply was just taken back."""
    while unit - 1 not in one.cuts:
        await one.talk(unit, unit)
        unit += 1
        assert unit < UNITS, "the model never speaks for longer than a unit"


@by_cast
async def test_what_was_not_heard_is_not_in_the_context(
    cast: Cast, world: World, talks: dict[str, Talk], reference: Reference
) -> None:
    one = talks[cast.name]
    script = world.script_of(cast)
    figures = equals_reference(one, script, world.language, reference)
    print(f"{cast.name}: {figures}; {len(one.cuts)} replies stopped")
    assert figures.units >= len(one.said)
    assert any(one.cuts.values()), "something was taken back"
    causes = {unit.unit: unit.rebuild_cause for unit in one.units}
    for after, cut in one.cuts.items():
        if cut and after < len(one.said):
            assert causes[after + 1] == "truncation"
    assert len({unit.replica for unit in one.units}) == 2


async def test_replies_are_heard_in_part_to_the_end_and_not_at_all(talks: dict[str, Talk]) -> None:
    cuts = [cut for one in talks.values() for cut in one.cuts.values()]
    kept = [tokens for cut in cuts for tokens in cut.values()]
    assert any(tokens > 0 for tokens in kept)
    assert 0 in kept
    assert {} in cuts
    print(f"{sum(len(cut) > 1 for cut in cuts)} of {len(cuts)} take more than one unit back")


@by_cast
async def test_the_whole_reply_in_the_context_is_noticed(
    cast: Cast, world: World, talks: dict[str, Talk], reference: Reference
) -> None:
    """The reference that is fed all that was said, as if it had been heard, is another one."""
    one = talks[cast.name]
    first = next(after for after, cut in one.cuts.items() if cut)
    unheard = replace(one.until(first + 1), cuts={first: {}})
    with pytest.raises(NotExact) as noticed:
        equals_reference(unheard, world.script_of(cast), world.language, reference)
    assert noticed.value.unit == first + 1
    assert noticed.value.by is not None
    print(f"{cast.name}: logits differ by {noticed.value.by:.2e}")
