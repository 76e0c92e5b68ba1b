"""A replica ends at every command to the ledger that a conversation makes: nothing acknowledged is
lost, nothing is said twice. Judged by the history checker, from outside.

`make test` takes one point of each kind and a few random conversations, `make test-long` all.
"""

import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from support import last_run

from duplex_sidecar.history.observations import LedgerEnd
from duplex_sidecar.history.verdict import Counts, Minimums, Report
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.export import Line
from duplex_sidecar.ledger.recovery import MAX_ATTEMPTS

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import MODES, Mode, Terms, undisturbed
from support.crash_points import (
    CrashPlans,
    Moment,
    Point,
    every_point,
    random_points,
    sample,
)
from support.histories import END, Doors, Person, World, converse, short_leases

pytestmark = pytest.mark.fault
UNITS = 30
UNIT_FAILED = "unit_failed"
LEASE_MS, MARGIN_MS = 900, 150
RANDOM_CONVERSATIONS = 2
RANDOM_CONVERSATIONS_LONG = 40
"""For each mode."""


@dataclass
class Calm:
    """Of undisturbed conversations, found once: the tokens of each mode, and the commands that a
    conversation and a recovery make."""

    tokens: dict[Mode, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def calm() -> Calm:
    return Calm()


def given_up(world: World) -> bool:
    """Whether the open unit was submitted as often as allowed: then the session ends, rightly."""
    end = next(one for one in world.observer.observations if isinstance(one, LedgerEnd))
    last = msgspec.json.decode(end.lines[-1], type=Line)
    return last.kind == "unit" and not last.committed and last.attempts >= MAX_ATTEMPTS


class Ground:
    """Where conversations are held and their replicas killed."""

    def __init__(self, doors: Doors, valkey: EmbeddedValkey, folder: Path, calm: Calm) -> None:
        self._doors = doors
        self._valkey = valkey
        self._folder = folder
        self.calm = calm
        self.reports: list[Report] = []
        self.reached = 0

    async def tokens(self, mode: Mode) -> tuple[tuple[int, ...], ...]:
        if mode not in self.calm.tokens:
            url = self._valkey.url
            said, _ = await undisturbed(url, f"calm-{mode}", Terms(mode), UNITS)
            self.calm.tokens[mode] = tuple(said)
        return self.calm.tokens[mode]

    async def commands(self, mode: Mode, points: list[Point], generation: int) -> list[str]:
        """What the replica of that generation sends to the ledger when these deaths happen."""
        name = f"list-{mode}-{generation}"
        if name not in self.calm.commands:
            plans = await self.hold(name, mode, points)
            self.calm.commands[name] = plans.plans[generation].commands
        return self.calm.commands[name]

    async def hold(
        self, name: str, mode: Mode, points: list[Point], *, proof: bool = True
    ) -> CrashPlans:
        """One conversation with these deaths, judged. What is not as it must be is kept as a file
        whose name is in the failure."""
        tokens = await self.tokens(mode)
        # Without the lease's length: a machine that stands still for a second lets frames out late.
        async with World(self._doors, self._valkey.url, self._folder, name) as world:
            plans = CrashPlans(world, points)
            first = await world.start()
            plans.follow(first, 0)
            person = Person(world, name)
            ended = await converse(
                world,
                person,
                Terms(mode),
                UNITS,
                first=first,
                proof=proof,
                followed=lambda member, generation: plans.follow(member, generation),
            )
            await world.finish(name, tokens)
        report = world.report()
        last_run.add("crash_points", [report], crash_points=plans.reached)
        kept = world.observer.write(self._folder / f"{name}.jsonl")
        assert report.violations == (), f"{points}: {kept}"
        assert ended == (UNIT_FAILED if given_up(world) else END), f"{points}: {kept}"
        kept.unlink()
        self.reports.append(report)
        self.reached += plans.reached
        return plans

    @property
    def counts(self) -> Counts:
        counts = Counts()
        for report in self.reports:
            counts = counts.plus(report.counts)
        return counts


@pytest.fixture
async def ground(
    valkey: EmbeddedValkey, tmp_path: Path, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ground]:
    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=100)
    async with Doors().open() as doors:
        yield Ground(doors, valkey, tmp_path, calm)


def record(kind: str, points: list[Point]) -> None:
    moments = Counter(str(point.moment) for point in points)
    names = Counter(point.name or "any" for point in points)
    last_run.add(
        "crash_points",
        [],
        planned={kind: len(points)},
        by_moment=dict(moments),
        by_command=dict(names),
    )


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
    record("of the conversation", points)


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
    record("of a recovery", points)


@pytest.mark.parametrize("mode", MODES)
async def test_deaths_at_random(ground: Ground, mode: Mode) -> None:
    many = RANDOM_CONVERSATIONS_LONG if last_run.is_long() else RANDOM_CONVERSATIONS
    points: list[Point] = []
    for seed in range(many):
        chosen = random_points(seed)
        points += chosen
        await ground.hold(f"random-{mode}-{seed}", mode, chosen, proof=seed % 3 != 2)
    assert Minimums(takeovers=many, redos=many // 10).missing(ground.counts) == []
    record("random", points)
