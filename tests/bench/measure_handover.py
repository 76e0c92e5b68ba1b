"""A session changes sidecars in the middle of its replies; how much longer does its client hear
nothing?

Two sidecars, a client that speaks in real time and follows the session. What a unit says is
scripted, so that replies are long enough to move in; all else is the model's. The same talk is held
once without a move, with the same seed, so with the same sound at the same units. Silence beyond
that is what the first sound after a move was later than the same sound without one. Each move is
ordered right after a unit that sounded, in a turn that goes on with sound; the turn's end is not
waited for.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.token import token_sha256
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from tests.bench.client import UNIT_BYTES
from tests.bench.figures import Broken, Figure
from tests.bench.paced import Answer, PacedTalk
from tests.bench.rig import Rig
from tests.bench.scenarios import CONTEXT
from tests.bench.stats import spread
from tests.bench.turn_script import turn_script

SILENCE_S = 1.0
MOVES = 50
QUICK_MOVES = 5
UNITS = 72
QUICK_UNITS = 24
MOST_TALKS = 3
LISTENING_UNITS = 2
SPEAKING_UNITS = 10
TEXT_TOKENS = 5
FIRST_UNIT = 4
"""Before it there is hardly a conversation to move."""


@dataclass(frozen=True)
class Move:
    """first_unit: of the new owner, to which late_s, the sound's and without a move, belongs.
    prepare_s, give_s: what the two calls took."""

    first_unit: int
    silence_s: float
    late_s: float
    calm_late_s: float
    prepare_s: float
    give_s: float


def measure_handover(rig: Rig) -> tuple[list[Figure], dict[str, object]]:
    """Raises Broken, ApiError, SidecarFailed."""
    script = reply_script(load_vocabulary(rig.checkpoint))
    here, there = (rig.new_sidecar(name, bench_script=script) for name in ("here", "there"))
    pair = (here, there)
    try:
        for sidecar in pair:
            sidecar.start()
        for sidecar in pair:
            sidecar.wait_ready()
        return asyncio.run(_measure(rig, pair))
    finally:
        for sidecar in pair:
            sidecar.stop()


def reply_script(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Token ids of the units of one turn, in turn: some listen, then a reply that ends."""
    return turn_script(
        vocabulary,
        listening=LISTENING_UNITS,
        speaking=SPEAKING_UNITS,
        text_tokens=TEXT_TOKENS,
        last_tokens=2,
    )


async def _measure(
    rig: Rig, pair: tuple[LocalSidecar, LocalSidecar]
) -> tuple[list[Figure], dict[str, object]]:
    wanted, units = (QUICK_MOVES, QUICK_UNITS) if rig.quick else (MOVES, UNITS)
    seconds = len(rig.speech) // UNIT_BYTES
    speech = (rig.speech[: seconds * UNIT_BYTES] * (units // seconds + 1))[: units * UNIT_BYTES]
    calm = _Talk(rig, pair, speech)
    await calm.hold(moves_after=())
    after = sounding_pairs(calm.answers)
    moves: list[Move] = []
    talks = 0
    while len(moves) < wanted and talks < MOST_TALKS and after:
        talk = _Talk(rig, pair, speech)
        await talk.hold(moves_after=after)
        moves += talk.moves(calm.answers)
        talks += 1
    return _figures(moves, wanted, calm.answers), {
        "units_a_talk": units,
        "talks": talks,
        "calm_late_s": [round(answer.late_s, 3) for answer in calm.answers.values()],
        "moves": [
            {name: round(value, 3) for name, value in asdict(move).items()} for move in moves
        ],
    }


def sounding_pairs(answers: Mapping[int, Answer]) -> tuple[int, ...]:
    """Units that sounded in a turn that went on with sound; none next to another."""
    found: list[int] = []
    for unit, answer in sorted(answers.items()):
        later = answers.get(unit + 1)
        if later is None or unit < FIRST_UNIT or (found and unit < found[-1] + 2):
            continue
        both = answer.sound_late_s is not None and later.sound_late_s is not None
        if both and answer.turn == later.turn:
            found.append(unit)
    return tuple(found)


class _Talk:
    """One talk in real time, and the moves of it."""

    def __init__(self, rig: Rig, pair: tuple[LocalSidecar, LocalSidecar], speech: bytes) -> None:
        self._pair = pair
        self._manifest = CONTEXT.manifest()
        session, token = f"bench-moves-{secrets.token_hex(4)}", secrets.token_urlsafe(32)
        self._client = PacedTalk(session, token, speech)
        self._places: asyncio.Queue[LocalSidecar] = asyncio.Queue()
        self._calls: list[tuple[float, float]] = []
        pair[0].open_session(session, self._manifest, token)

    @property
    def answers(self) -> dict[int, Answer]:
        return self._client.answers

    async def hold(self, moves_after: tuple[int, ...]) -> None:
        """moves_after: units right after which the session is to move."""
        self._places.put_nowait(self._pair[0])
        moving = asyncio.create_task(self._move_after(moves_after))
        try:
            await self._client.talk(self._places)
            await moving
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
        end = self._pair[len(self._calls) % 2].admin
        await asyncio.to_thread(end, "DELETE", f"/sessions/{self._client.session}")

    async def _move_after(self, units: tuple[int, ...]) -> None:
        for unit in units:
            await self._client.answered(unit - 1)
            number = len(self._calls)
            here, there = self._pair[number % 2], self._pair[(number + 1) % 2]
            fence, session = number + 2, self._client.session
            body = {
                "manifest": self._manifest,
                "tokenHash": token_sha256(self._client.token),
                "fence": fence,
            }
            began_s = time.monotonic()
            await asyncio.to_thread(there.admin, "POST", f"/sessions/{session}/prepare", body)
            prepared_s = time.monotonic()
            await self._client.answered(unit)
            order = {"target": there.settings.replica, "fence": fence, "graceSeconds": 0}
            ordered_s = time.monotonic()
            await asyncio.to_thread(here.admin, "POST", f"/sessions/{session}/hand-over", order)
            self._calls.append((prepared_s - began_s, time.monotonic() - ordered_s))
            self._places.put_nowait(there)

    def moves(self, calm: Mapping[int, Answer]) -> list[Move]:
        """Those in the middle of a turn that sounded on both sides, by where the session was."""
        found: list[Move] = []
        calls = iter(self._calls)
        for unit, answer in sorted(self.answers.items()):
            before, still = self.answers.get(unit - 1), calm.get(unit)
            if before is None or before.replica == answer.replica:
                continue
            call = next(calls)
            speaks = before.sound_late_s is not None and before.turn == answer.turn
            if not speaks or answer.sound_late_s is None:
                continue
            if still is None or still.sound_late_s is None:
                raise Broken(f"unit {unit} sounded after a move and not without one")
            silence_s = answer.sound_late_s - still.sound_late_s
            found.append(Move(unit, silence_s, answer.sound_late_s, still.sound_late_s, *call))
        return found


def _figures(moves: list[Move], wanted: int, calm: Mapping[int, Answer]) -> list[Figure]:
    silence = spread([move.silence_s for move in moves]) if len(moves) >= wanted else None
    late = spread([answer.late_s for answer in calm.values()])
    prepare = spread([move.prepare_s for move in moves])
    give = spread([move.give_s for move in moves])
    note = f"{len(moves)} moves in the middle of a reply"
    name = "hand-over: silence beyond the undisturbed talk"
    return [
        Figure(f"{name}, p95", silence.p95 if silence else None, "s", SILENCE_S, note),
        Figure(f"{name}, p50", silence.p50 if silence else None, "s"),
        Figure(f"{name}, longest", silence.most if silence else None, "s"),
        Figure(
            "undisturbed talk in real time: a unit's answer after its last sample, p50",
            late.p50 if late else None,
            "s",
        ),
        Figure("hand-over: making ready, p50", prepare.p50 if prepare else None, "s"),
        Figure("hand-over: giving away, p50", give.p50 if give else None, "s"),
    ]
