"""The same deaths with the real engines, encoder and vocoder under the session: a replica ends at
commands to the ledger and another one takes over, twice in each conversation.

The stages' processes go on, so that a death does not cost half a minute; what they held for the
dead replica is taken from them. `make test` takes a few conversations, `make test-long` more than
fifty deaths.
"""

import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support import last_run
from support.aof_witness import AofWitness

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.history.verdict import Minimums
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import MODES, Mode, Terms
from support.crash_ground import Calm, Ground, Talk, Tokens
from support.crash_points import Moment, Point, every_point, sample
from support.histories import Doors, Person, World, converse, short_leases
from support.ledgers import committed_units, tokens_of
from support.material import speech
from support.real_stages import RealEngines, real_engines

pytestmark = [
    pytest.mark.fault,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

UNITS = 10
LEASE_MS, MARGIN_MS = 1_500, 300
CONVERSATIONS = 1
CONVERSATIONS_LONG = 11
"""For each mode; with two deaths each."""
LEAST_POINTS, LEAST_POINTS_LONG = 3, 50
SECTION = "crash_points_real_engines"


@pytest.fixture(scope="module")
def calm() -> Calm:
    return Calm()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny_checkpoint: Path) -> AsyncIterator[RealEngines]:
    async with real_engines(tiny_checkpoint, default_cache_dir()) as running:
        yield running


def said(number: int) -> bytes:
    """The shipped recording, second by second."""
    return speech(1, number - 1)


@pytest_asyncio.fixture(loop_scope="module")
async def ground(
    valkey: EmbeddedValkey,
    engines: RealEngines,
    witness: AofWitness,
    tmp_path: Path,
    calm: Calm,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Ground]:
    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=200)
    async with Doors().open() as doors:

        async def calm_tokens(mode: Mode) -> Tokens:
            name = f"calm-{mode}"
            world = World(
                doors,
                valkey.url,
                tmp_path,
                name,
                model=engines.model,
                make_stages=engines.stages,
            )
            async with world:
                person = Person(world, name, sound=said)
                await converse(world, person, Terms(mode), UNITS, first=await world.start())
            units = await committed_units(valkey.url, name)
            assert {unit["decision"] for unit in units} == {"listen", "speak"}
            return tuple(tuple(tokens) for tokens in tokens_of(units))

        talk = Talk(
            UNITS,
            calm_tokens,
            section=SECTION,
            model=engines.model,
            make_stages=engines.stages,
            sound=said,
        )
        yield Ground(doors, valkey.url, tmp_path, calm, talk, witness)


@pytest.mark.parametrize("mode", MODES)
async def test_two_deaths_in_a_conversation(ground: Ground, mode: Mode) -> None:
    """The first one at a command of each kind in turn, the second in the conversation's rest."""
    chance = random.Random(mode)
    many = CONVERSATIONS_LONG if last_run.is_long() else CONVERSATIONS
    kinds = sample(every_point(await ground.commands(mode, [], 0), 0, 3), 3)
    points: list[Point] = []
    for number, death in enumerate(chance.sample(kinds, many)):
        second = Point(1, "", chance.randrange(8, 24), chance.choice(list(Moment)), number)
        points += (death, second)
        await ground.hold(f"{mode}-{number}", mode, [death, second])
    # A conversation that dies at its very end has no second death in it.
    assert ground.reached >= len(points) * 5 // 6
    assert Minimums(takeovers=many).missing(ground.counts) == []
    ground.record("two in a conversation", points)


async def test_as_many_deaths_as_the_proof_asks_for() -> None:
    """Of all with real engines, when this whole file ran."""
    least = LEAST_POINTS_LONG if last_run.is_long() else LEAST_POINTS
    assert last_run.crash_points(SECTION) >= least


async def test_the_append_only_file_says_the_same(
    valkey: EmbeddedValkey, witness: AofWitness, tmp_path: Path
) -> None:
    assert len(witness.ends) > len(MODES)
    assert witness.differences(valkey.url, tmp_path / "copy") == []
    last_run.add("append_only_file", [], sessions={"crash_points_real": len(witness.ends)})
