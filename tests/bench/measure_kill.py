"""A sidecar's whole tree is killed; how long until the conversation goes on at a second one?

The session wanders: what takes it over from the first victim is the next victim, and each time the
one after that is started and ready before the kill. A client holds the next unit, as a microphone
would have recorded it meanwhile, dials the second sidecar at once and sends it.

Then eight sessions at once, with a client each: how long until the last of them goes on?
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import psutil

from duplex_sidecar.client.local_sidecar import LocalSidecar
from tests.bench.client import ANSWER_TIMEOUT_S, Seen, Unit, UnitClient, quiet_at_end, script
from tests.bench.figures import Broken, Figure
from tests.bench.processes import kill_at_once
from tests.bench.rig import Rig
from tests.bench.scenarios import CONTEXT
from tests.bench.stats import spread

AGAIN_S, AGAIN_UNPROVEN_S, AGAIN_ALL_S = 3.0, 4.5, 5.0
CROWD = 8
UNITS_BETWEEN = 6
MOST_UNITS_BETWEEN = 30
IN_FLIGHT_S = 0.02
"""A kill in the middle of a unit comes so long after its last slice."""


@dataclass(frozen=True)
class Kill:
    """Seconds from the SIGKILL. proven: the second sidecar is told of the death, else the lease has
    to run out. in_flight: a unit was under way. audio_s: first sound of the next unit, None when it
    listened."""

    proven: bool
    in_flight: bool
    killed_s: float
    resumed_s: float
    next_unit_s: float
    audio_s: float | None
    decision: str
    first_unit: int

    @property
    def whole_s(self) -> float:
        """To the next unit and all of its sound."""
        return max(self.next_unit_s, self.audio_s or 0.0)


def measure_kill(rig: Rig, first: LocalSidecar) -> tuple[list[Figure], dict[str, object]]:
    """`first` is the first victim. Raises Broken, ApiError, SidecarFailed."""
    proven, unproven = (2, 1) if rig.quick else (6, 2)
    client = rig.open(first, CONTEXT)
    client.dial()
    walk = _Walk(rig, client, script(rig.speech, 600, forced=rig.forced))
    kills: list[Kill] = []
    try:
        for number in range(proven + unproven):
            second, _ = rig.start_sidecar(f"second-{number}")
            kills.append(walk.kill(second, proven=number < proven, in_flight=number % 2 == 1))
        client.close_session()
    finally:
        client.hang_up()
    client.sidecar.stop()
    crowds = _kill_crowds(rig, 1 if rig.quick else 3)
    return [*_figures(kills), *_crowd_figures(crowds)], {
        "kills": [_row(kill) for kill in kills],
        "units": walk.seq,
        "kills_of_a_crowd": [[_row(kill) for kill in kills] for kills in crowds],
    }


def _kill_crowds(rig: Rig, count: int) -> list[list[Kill]]:
    """So many kills of a sidecar with `CROWD` sessions, each with a client of its own; the second
    sidecar is ready and is told of the death. Raises Broken, ApiError, SidecarFailed."""
    units = script(rig.speech, 600, forced=rig.forced)
    victim, _ = rig.start_sidecar("crowd-0", slots=CROWD)
    walks = [_Walk(rig, rig.open(victim, CONTEXT), units) for _ in range(CROWD)]
    kills: list[list[Kill]] = []
    with ThreadPoolExecutor(CROWD) as pool:
        try:
            list(pool.map(_Walk.dial, walks))
            for number in range(count):
                second, _ = rig.start_sidecar(f"crowd-{number + 1}", slots=CROWD)
                in_flight = number % 2 == 1
                list(pool.map(_Walk.talk_up_to_a_reply, walks))
                if in_flight:
                    list(pool.map(_Walk.send_next, walks))
                death = _Death.of(walks[0].sidecar, second, proven=True, in_flight=in_flight)
                kills.append(list(pool.map(lambda walk: walk.go_on(death), walks)))  # noqa: B023
                death.bury()
            list(pool.map(_Walk.end, walks))
        finally:
            for walk in walks:
                walk.hang_up()
    walks[0].sidecar.stop()
    return kills


@dataclass(frozen=True)
class _Death:
    """A SIGKILL to a sidecar's whole tree. began: by `perf_counter`."""

    second: LocalSidecar
    tree: Sequence[psutil.Process]
    began: float
    killed_s: float
    proven: bool
    in_flight: bool

    @classmethod
    def of(
        cls, victim: LocalSidecar, second: LocalSidecar, *, proven: bool, in_flight: bool
    ) -> "_Death":
        tree = victim.tree()
        began = time.perf_counter()
        kill_at_once(victim, tree)
        killed_s = time.perf_counter() - began
        if proven:
            second.declare_dead(victim.settings.replica)
        return cls(second, tree, began, killed_s, proven, in_flight)

    def bury(self) -> None:
        psutil.wait_procs(self.tree, timeout=30)


class _Walk:
    """The wandering session."""

    def __init__(self, rig: Rig, client: UnitClient, units: list[Unit]) -> None:
        self.seq = 0
        self._rig = rig
        self._client = client
        self._units = units

    @property
    def sidecar(self) -> LocalSidecar:
        return self._client.sidecar

    def dial(self) -> None:
        self._client.dial()

    def end(self) -> None:
        self._client.close_session()

    def hang_up(self) -> None:
        self._client.hang_up()

    def kill(self, second: LocalSidecar, *, proven: bool, in_flight: bool) -> Kill:
        self.talk_up_to_a_reply()
        if in_flight:
            self.send_next()
        death = _Death.of(self.sidecar, second, proven=proven, in_flight=in_flight)
        kill = self.go_on(death)
        death.bury()
        return kill

    def send_next(self) -> None:
        """It is under way when this returns."""
        self._client.send(self._next_unit(), self.seq + 1)
        time.sleep(IN_FLIGHT_S)

    def go_on(self, death: _Death) -> Kill:
        """At the second sidecar."""
        client = self._client
        client.hang_up()
        client.sidecar = death.second
        facts = client.dial(resume=True, for_s=ANSWER_TIMEOUT_S)
        resumed_s = time.perf_counter() - death.began
        seen = self._first_answer(int(facts["next_unit"]), death.began)
        return Kill(
            proven=death.proven,
            in_flight=death.in_flight,
            killed_s=death.killed_s,
            resumed_s=resumed_s,
            next_unit_s=seen.client_ms / 1000,
            audio_s=None if seen.first_audio_ms is None else seen.first_audio_ms / 1000,
            decision=seen.decision,
            first_unit=seen.unit,
        )

    def talk_up_to_a_reply(self) -> None:
        """At least a few units, then on until the next one will very likely be spoken."""
        for number in range(MOST_UNITS_BETWEEN):
            upcoming = self._next_unit()
            if number >= UNITS_BETWEEN and self._speaks_next():
                return
            self._client.say(upcoming, self.seq + 1)
            self.seq += 1
        raise Broken(f"nothing in {MOST_UNITS_BETWEEN} units that would be answered")

    def _speaks_next(self) -> bool:
        """A fitted checkpoint answers the first quiet after speech."""
        before, upcoming = self._units[(self.seq - 1) % len(self._units)], self._next_unit()
        if self._rig.forced:
            return not upcoming.force_listen
        return quiet_at_end(upcoming.pcm_s16le) and not quiet_at_end(before.pcm_s16le)

    def _first_answer(self, next_unit: int, began: float) -> Seen:
        """The first unit that the second sidecar answers: the pending one, or the one behind it
        when the victim had got it into the journal. next_unit: what it wants to hear next; one that
        was accepted before the kill is not sent again."""
        while True:
            wanted = self.seq + 1
            if next_unit not in (wanted, wanted + 1):
                raise Broken(f"unit {next_unit} follows on unit {self.seq}")
            if next_unit == wanted:
                self._client.send(self._next_unit(), wanted, gap_s=0.0)
                next_unit += 1
            seen = self._client.wait(wanted, began)
            self.seq = wanted
            if seen.replica == self._client.sidecar.settings.replica:
                return seen

    def _next_unit(self) -> Unit:
        return self._units[self.seq % len(self._units)]


def _figures(kills: list[Kill]) -> list[Figure]:
    figures: list[Figure] = []
    for proven, how in ((True, "proof of death"), (False, "no proof: the lease runs out")):
        some = [kill for kill in kills if kill.proven is proven]
        whole = spread([kill.whole_s for kill in some])
        spoken = [kill.audio_s for kill in some if kill.audio_s is not None]
        audio = spread(spoken)
        resumed = spread([kill.resumed_s for kill in some])
        note = f"{len(some)} kills, {len(spoken)} with sound"
        figures += [
            Figure(
                f"kill to the next unit and its audio, {how}, p50",
                whole.p50 if whole else None,
                "s",
                AGAIN_S if proven else AGAIN_UNPROVEN_S,
                note,
            ),
            Figure(f"the same, {how}, slowest", whole.most if whole else None, "s"),
            Figure(f"kill to first sound, {how}, p50", audio.p50 if audio else None, "s"),
            Figure(f"kill to resumed, {how}, p50", resumed.p50 if resumed else None, "s"),
        ]
    return figures


def _crowd_figures(crowds: list[list[Kill]]) -> list[Figure]:
    """Of each kill the session that had to wait longest."""
    last = spread([max(kill.whole_s for kill in kills) for kills in crowds])
    each = spread([kill.whole_s for kills in crowds for kill in kills])
    spoken = sum(kill.audio_s is not None for kills in crowds for kill in kills)
    name = f"kill to the next unit and its audio, {CROWD} sessions, proof of death"
    note = f"{len(crowds)} kills, {spoken} sessions with sound"
    return [
        Figure(f"{name}, the last one", last.most if last else None, "s", AGAIN_ALL_S, note),
        Figure(f"{name}, p50 of all", each.p50 if each else None, "s"),
    ]


def _row(kill: Kill) -> dict[str, object]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(kill).items()
    }
