"""Crash points: a replica that ends, as by SIGKILL, at a chosen command to the ledger."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from support.histories import Member, World
from support.resp_proxy import Deed, Plan, Seen

MAX_TURNS = 24
"""Of the event loop between a reply and the end: up to the next command, about."""


MAX_RENEWALS = 4


class Moment(StrEnum):
    BEFORE = "before_send"
    UNANSWERED = "executed_without_reply"
    AFTER = "after_reply"


@dataclass(frozen=True, order=True)
class Point:
    """The nth command of that name that a replica sends, from 1 (name "": of any). generation: 0
    for the first replica, 1 for its successor, ... turns: of the loop, for AFTER."""

    generation: int
    name: str
    nth: int
    moment: Moment
    turns: int = 0


class CrashAt(Plan):
    """Kills the member at that point. commands: what it has sent, by name."""

    def __init__(self, world: World, point: Point | None) -> None:
        self._world = world
        self._point = point
        self._ends: asyncio.Task[None] | None = None
        self.member: Member | None = None
        self.commands: list[str] = []
        self._reached: Seen | None = None

    async def before(self, command: Seen) -> Deed:
        self.commands.append(command.facts.name)
        point = self._point
        if point is None or self._reached is not None or not self._is_it(point):
            return Deed.PASS
        self._reached = command
        return self._end() if point.moment is Moment.BEFORE else Deed.PASS

    async def after(self, command: Seen) -> Deed:
        if command is not self._reached or self._point is None:
            return Deed.PASS
        if self._point.moment is Moment.UNANSWERED:
            return self._end()
        self._ends = asyncio.create_task(self._end_soon(self._point.turns))
        return Deed.PASS

    @property
    def reached(self) -> bool:
        return self._reached is not None

    def _is_it(self, point: Point) -> bool:
        if not point.name:
            return len(self.commands) == point.nth
        return self.commands[-1] == point.name and self.commands.count(point.name) == point.nth

    def _end(self) -> Deed:
        assert self.member is not None
        self._world.kill(self.member)
        return Deed.CUT

    async def _end_soon(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        self._end()


class CrashPlans:
    """One plan for each generation of replicas in a world."""

    def __init__(self, world: World, points: Iterable[Point]) -> None:
        self._points = {point.generation: point for point in points}
        self._world = world
        self.plans: list[CrashAt] = []

    def follow(self, member: Member, generation: int) -> CrashAt:
        """Watch and end that member. Its commands count from now."""
        plan = CrashAt(self._world, self._points.get(generation))
        plan.member = member
        member.proxy.plan = plan
        self.plans.append(plan)
        return plan

    @property
    def reached(self) -> int:
        return sum(plan.reached for plan in self.plans)


def every_point(commands: Iterable[str], generation: int, seed: int) -> list[Point]:
    """Each moment of each command in that order of names. Of renewals, which come by the clock, the
    first ones alone: how many come depends on the machine."""
    chance = random.Random(seed)
    counted: dict[str, int] = {}
    points: list[Point] = []
    for name in commands:
        counted[name] = counted.get(name, 0) + 1
        if name == "renew" and counted[name] > MAX_RENEWALS:
            continue
        points += [
            Point(generation, name, counted[name], moment, chance.randrange(MAX_TURNS))
            for moment in Moment
        ]
    return points


def sample(points: list[Point], seed: int) -> list[Point]:
    """One point for each moment of each name."""
    chance = random.Random(seed)
    by_kind: dict[tuple[str, Moment], list[Point]] = {}
    for point in points:
        by_kind.setdefault((point.name, point.moment), []).append(point)
    return [chance.choice(group) for group in by_kind.values()]


def random_points(seed: int) -> list[Point]:
    """A conversation in which two to four replicas die, each at a random command of its own. Deaths
    are so far apart that no unit is submitted more often than allowed."""
    chance = random.Random(seed)
    return [
        Point(
            generation,
            "",
            chance.randrange(25, 60),
            chance.choice(list(Moment)),
            chance.randrange(MAX_TURNS),
        )
        for generation in range(chance.randrange(2, 5))
    ]
