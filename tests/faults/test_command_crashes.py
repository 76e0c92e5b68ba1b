"""A replica ends at every command to the ledger that an interrupting client leads to: what was
applied is applied once, what was taken back stays taken back, and the conversation is the one in
which nothing happened. Judged by the history checker, from outside."""

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from support import last_run
from support.aof_witness import AofWitness

from duplex_sidecar.history.observations import LedgerEnd
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.export import Line

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import MODES, Mode, Terms
from support.crash_points import CrashPlans, Moment, Point, every_point, sample
from support.histories import END, Doors, World, converse, short_leases
from support.interrupters import Interrupter

pytestmark = pytest.mark.fault
UNITS = 24
LEASE_MS, MARGIN_MS = 900, 150
WRITES = ("cut", "client")


@dataclass(frozen=True)
class Held:
    """A conversation as it went: its tokens, what its first replica sent to the ledger, and what
    came of the commands."""

    tokens: tuple[tuple[int, ...], ...]
    commands: tuple[str, ...]
    truncated: int
    cancelled: int
    reached: int


class Ground:
    """Where conversations are held and their replicas killed."""

    def __init__(
        self, doors: Doors, valkey: EmbeddedValkey, folder: Path, witness: AofWitness
    ) -> None:
        self._doors = doors
        self._witness = witness
        self._valkey = valkey
        self._folder = folder

    async def hold(
        self, name: str, mode: Mode, points: list[Point], calm: Held | None = None
    ) -> Held:
        url, witness = self._valkey.url, self._witness
        async with World(self._doors, url, self._folder, name, witness=witness) as world:
            plans = CrashPlans(world, points)
            first = await world.start()
            plans.follow(first, 0)
            person = Interrupter(world, name)
            ended = await converse(
                world,
                person,
                Terms(mode),
                UNITS,
                first=first,
                followed=lambda member, generation: plans.follow(member, generation),
            )
            await world.finish(name, calm and calm.tokens)
        report = world.report()
        last_run.add("crash_points", [report], crash_points=plans.reached)
        kept = world.observer.write(self._folder / f"{name}.jsonl")
        assert report.violations == (), f"{points}: {kept}"
        assert ended == END, f"{points}: {kept}"
        assert report.counts.cuts > 0
        assert person.pending == {}
        kept.unlink()
        end = next(one for one in world.observer.observations if isinstance(one, LedgerEnd))
        lines = [msgspec.json.decode(line, type=Line) for line in end.lines]
        held = Held(
            tuple(line.token_ids for line in lines if line.committed),
            tuple(plans.plans[0].commands),
            person.truncated,
            person.cancelled,
            plans.reached,
        )
        if calm is not None:
            assert held.tokens == calm.tokens, f"{points}"
            assert (held.truncated, held.cancelled) == (calm.truncated, calm.cancelled)
        return held


@pytest.fixture
async def ground(
    valkey: EmbeddedValkey,
    witness: AofWitness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Ground]:
    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=100)
    async with Doors().open() as doors:
        yield Ground(doors, valkey, tmp_path, witness)


@pytest.mark.parametrize("mode", MODES)
async def test_a_death_at_each_write_that_a_command_leads_to(ground: Ground, mode: Mode) -> None:
    calm = await ground.hold(f"calm-{mode}", mode, [])
    assert calm.truncated > 2
    assert calm.cancelled > 1
    points = [point for point in every_point(calm.commands, 0, 7) if point.name in WRITES]
    assert {point.name for point in points} == set(WRITES)
    if not last_run.is_long():
        points = sample(points, MODES.index(mode))
    assert {point.moment for point in points} == set(Moment)
    for number, point in enumerate(points):
        held = await ground.hold(f"{mode}-{number}", mode, [point], calm)
        assert held.reached == 1


def test_the_append_only_file_says_the_same(
    valkey: EmbeddedValkey, witness: AofWitness, tmp_path: Path
) -> None:
    assert len(witness.ends) > len(MODES) * len(Moment)
    assert witness.differences(valkey.url, tmp_path / "copy") == []
    last_run.add("append_only_file", [], sessions={"command_crashes": len(witness.ends)})
