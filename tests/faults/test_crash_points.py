"""A replica ends at every command to the ledger that a conversation makes: nothing acknowledged is
lost, nothing is said twice. Judged by the history checker, from outside.

`make test` takes one point of each kind and a few random conversations, `make test-long` all.
"""

import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support import last_run
from support.aof_witness import AofWitness

from duplex_sidecar.history.verdict import Minimums
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import MODES, Mode, Terms, undisturbed
from support.crash_ground import Calm, Ground, Talk, Tokens
from support.crash_points import Moment, Point, every_point, random_points, sample
from support.histories import Doors, short_leases

pytestmark = pytest.mark.fault
UNITS = 30
LEASE_MS, MARGIN_MS = 900, 150
RANDOM_CONVERSATIONS = 2
RANDOM_CONVERSATIONS_LONG = 40
"""For each mode."""
LEAST_POINTS, LEAST_POINTS_LONG = 45, 1_000
"""That this file and the ones before it have to reach together."""


@pytest.fixture(scope="module")
def calm() -> Calm:
    return Calm()


@pytest.fixture
async def ground(
    valkey: EmbeddedValkey, tmp_path: Path, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ground]:
    async def calm_tokens(mode: Mode) -> Tokens:
        said, _ = await undisturbed(valkey.url, f"calm-{mode}", Terms(mode), UNITS)
        return tuple(said)

    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=100)
    async with Doors().open() as doors:
        yield Ground(doors, valkey.url, tmp_path, calm, Talk(UNITS, calm_tokens))


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("mode", MODES)
async def test_a_death_at_each_command_of_the_conversation(
    ground: Ground, mode: Mode, moment: Moment
) -> None:
    seed = zlib.crc32(f"{mode} {moment}".encode())
    commands = await ground.commands(mode, [], 0)
    points = [point for point in every_point(commands, 0, seed) if point.moment is moment]
    assert len(points) > 3 * UNITS
    if not last_run.is_long():
        # One of each name in one of the modes, in another mode for each moment.
        turn = list(Moment).index(moment) + MODES.index(mode)
        points = [point for n, point in enumerate(sample(points, seed)) if n % 3 == turn % 3]
    for number, point in enumerate(points):
        name = f"{mode}-{moment}-{number}"
        # One in four waits until the lease has run out: nobody knows that its owner is dead.
        await ground.hold(name, mode, [point], proof=number % 4 != 3)
    # A renewal comes when its time has come: the last one may not come again.
    assert ground.reached >= len(points) - 1
    ground.record("of the conversation", points)


@pytest.mark.parametrize("moment", Moment)
async def test_a_death_at_each_command_of_a_recovery(ground: Ground, moment: Moment) -> None:
    """The successor dies, too, while it takes the session up."""
    before = Point(0, "commit", 12, Moment.BEFORE)
    commands = await ground.commands("context", [before], 1)
    recovery = commands[: commands.index("accept") + 1]
    points = [point for point in every_point(recovery, 1, 1) if point.moment is moment]
    if not last_run.is_long():
        turn = list(Moment).index(moment)
        points = [point for n, point in enumerate(sample(points, 0)) if n % 3 == turn]
    for number, point in enumerate(points):
        await ground.hold(f"{moment}-{number}", "context", [before, point])
    assert Minimums(takeovers=len(points), redos=len(points)).missing(ground.counts) == []
    ground.record("of a recovery", points)


@pytest.mark.parametrize("mode", MODES)
async def test_deaths_at_random(ground: Ground, mode: Mode) -> None:
    many = RANDOM_CONVERSATIONS_LONG if last_run.is_long() else RANDOM_CONVERSATIONS
    points: list[Point] = []
    for seed in range(many):
        chosen = random_points(seed)
        points += chosen
        await ground.hold(f"random-{mode}-{seed}", mode, chosen, proof=seed % 3 != 2)
    assert Minimums(takeovers=many, redos=many // 10).missing(ground.counts) == []
    ground.record("random", points)


async def test_the_append_only_file_says_the_same(
    ground: Ground, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On a server of their own, since the file of all the others is large."""
    server, witness = EmbeddedValkey(tmp_path_factory.mktemp("valkey")), AofWitness()
    server.start()
    try:
        apart = ground.on(server.url, witness)
        for seed, mode in enumerate(MODES):
            await apart.hold(f"file-{mode}", mode, random_points(seed))
        assert len(witness.ends) == len(MODES)
        assert witness.differences(server.url, tmp_path / "copy") == []
    finally:
        server.stop()
    last_run.add("append_only_file", [], sessions={"crash_points": len(witness.ends)})


def test_as_many_deaths_as_the_proof_asks_for() -> None:
    """Of all that are counted in this run, when this whole file ran."""
    least = LEAST_POINTS_LONG if last_run.is_long() else LEAST_POINTS
    assert last_run.crash_points("crash_points") >= least
