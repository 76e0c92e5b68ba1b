"""Where conversations are held and their replicas killed, and what is asked of each: nothing
acknowledged is lost, nothing is said twice, judged from outside."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from session_kit import MODEL, Mode, Terms, second, speaks
from support import last_run
from support.aof_witness import AofWitness
from support.crash_points import CrashPlans, Point
from support.histories import END, Doors, MakeStages, Person, World, converse, fake_stages

from duplex_sidecar.history.observations import LedgerEnd
from duplex_sidecar.history.verdict import Counts, Report
from duplex_sidecar.ledger.export import Line
from duplex_sidecar.ledger.recovery import MAX_ATTEMPTS
from duplex_sidecar.session.model import ServedModel

UNIT_FAILED = "unit_failed"
Tokens = tuple[tuple[int, ...], ...]


@dataclass
class Calm:
    """Of undisturbed conversations, found once: the tokens of each mode, and the commands that a
    conversation and a recovery make."""

    tokens: dict[Mode, Tokens] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Talk:
    """What is said, on what. calm: the tokens of a conversation in which nothing happens. section:
    of `last_run.json`."""

    units: int
    calm: Callable[[Mode], Awaitable[Tokens]]
    section: str = "crash_points"
    model: ServedModel = MODEL
    make_stages: MakeStages = fake_stages
    sound: Callable[[int], bytes] = second
    is_speech: Callable[[int], bool] = speaks


class Ground:
    def __init__(
        self,
        doors: Doors,
        url: str,
        folder: Path,
        calm: Calm,
        talk: Talk,
        witness: AofWitness | None = None,
    ) -> None:
        self._doors = doors
        self._witness = witness
        self._url = url
        self._folder = folder
        self._talk = talk
        self.calm = calm
        self.reports: list[Report] = []
        self.reached = 0

    def on(self, url: str, witness: AofWitness) -> "Ground":
        """The same on another server, whose file is asked in the end."""
        return Ground(self._doors, url, self._folder, self.calm, self._talk, witness)

    async def tokens(self, mode: Mode) -> Tokens:
        if mode not in self.calm.tokens:
            self.calm.tokens[mode] = await self._talk.calm(mode)
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
        talk = self._talk
        # Without the lease's length: a machine that stands still for a second lets frames out late.
        world = World(
            self._doors,
            self._url,
            self._folder,
            name,
            model=talk.model,
            make_stages=talk.make_stages,
            witness=self._witness,
        )
        async with world:
            plans = CrashPlans(world, points)
            first = await world.start()
            plans.follow(first, 0)
            ended = await converse(
                world,
                Person(world, name, sound=talk.sound, is_speech=talk.is_speech),
                Terms(mode),
                talk.units,
                first=first,
                proof=proof,
                followed=lambda member, generation: plans.follow(member, generation),
            )
            await world.finish(name, tokens)
        report = world.report()
        last_run.add(talk.section, [report], crash_points=plans.reached)
        kept = world.observer.write(self._folder / f"{name}.jsonl")
        assert report.violations == (), f"{points}: {kept}"
        assert ended == (UNIT_FAILED if _given_up(world) else END), f"{points}: {kept}"
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

    def record(self, kind: str, points: list[Point]) -> None:
        """What was planned, for people."""
        moments = Counter(str(point.moment) for point in points)
        names = Counter(point.name or "any" for point in points)
        last_run.add(
            self._talk.section,
            [],
            planned={kind: len(points)},
            by_moment=dict(moments),
            by_command=dict(names),
        )


def _given_up(world: World) -> bool:
    """Whether the open unit was submitted as often as allowed: then the session ends, rightly."""
    end = next(one for one in world.observer.observations if isinstance(one, LedgerEnd))
    last = msgspec.json.decode(end.lines[-1], type=Line)
    return last.kind == "unit" and not last.committed and last.attempts >= MAX_ATTEMPTS
