"""Conversations through the real session code, the real Thinker process and a real ledger, left in
peace or treated badly, with everything that passed the Thinker on tape."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import psutil
from PIL import Image
from support.exact_defects import Defect
from support.exact_layout import Script, Window
from support.exact_policy import GreedyPolicy, Language
from support.exact_reference import read_script
from support.exact_stages import (
    MAX_SESSIONS,
    EvenCode2Wav,
    EvenTalker,
    SilentCode2Wav,
    SilentTalker,
    Tape,
    TapedEncoder,
    TapedThinker,
    Tapes,
    rows_of,
    start_encoder,
)
from support.material import speech
from support.processes import words_of

from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.commands import AppendInput
from duplex_sidecar.protocol.events import Event, UnitDone
from duplex_sidecar.session.model import ServedModel, load_model
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import ElementType, EncoderReference
from duplex_sidecar.stages.environment import stage_environment
from duplex_sidecar.stages.supervisor import StageSpec, Supervisor
from duplex_sidecar.stages.thinker.client import ThinkerClient
from duplex_sidecar.stages.thinker.config import ThinkerSettings

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    PROMPT,
    RATE_HZ,
    Caller,
    Mode,
    Replica,
    Stages,
    Terms,
    check_events,
    replica,
    tokens,
    with_camera,
)

TESTS = Path(__file__).resolve().parents[1]
CONTEXT_TOKENS = 8160
FEED_TIMEOUT_S = 120.0
PATIENCE = 6
"""Times that the kit's caller waits for an event."""
SPEECH_RMS = 0.01
OWN_VOICE = "default"
WRITTEN = "Tell me what you hear."
SEATS = 2 * MAX_SESSIONS
KV_BYTES = 512 * 1024 * 1024


# --- who talks, and about what --------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """One conversation. voice: what of the shipped recording it hears, and what it sees. named: it
    names its own voice, so that this one's reference clip stands in its prompts. seeded: it opens
    with what a user has written."""

    name: str
    mode: Mode
    camera: bool
    voice: int
    named: bool
    seeded: bool

    def policy(self, language: Language) -> GreedyPolicy:
        """Before its first unit. Seeded text opens a response."""
        seeded = self.seeded
        return GreedyPolicy(
            language, turn_ended=not seeded, response_open=seeded, speech_pending=seeded
        )

    @property
    def terms(self) -> Terms:
        terms = Terms(
            self.mode,
            # Those that talk side by side wait for each other, on a slow machine for long.
            idle="2h",
            park_after="2h",
            greedy=True,
            voice=OWN_VOICE if self.named else None,
            initial_text=WRITTEN if self.seeded else None,
        )
        return with_camera(terms) if self.camera else terms

    @property
    def window(self) -> Window:
        terms = self.terms
        return Window(
            terms.mode, terms.basic_high, terms.basic_low, terms.previous_max, terms.max_units
        )

    def pcm(self, number: int) -> bytes:
        return speech(1, start_s=number - 1 + 7 * self.voice)

    def is_speech(self, number: int) -> bool:
        """Whether any tenth of the second is loud: told to the session, so that nothing rests on
        its own detector."""
        levels = np.frombuffer(self.pcm(number), "<i2").astype(np.float64).reshape(10, -1) / 32_768
        return bool((np.sqrt((levels**2).mean(1)) > SPEECH_RMS).any())

    def sizes(self, number: int) -> list[tuple[int, int]]:
        """Of the frames that come with that second: none, one, or two, of which the first is
        sometimes larger than a tile."""
        if not self.camera:
            return []
        match number % 6:
            case 1:
                return [(160, 120)]
            case 4:
                return [(640, 480) if number % 18 == 4 else (160, 120), (96, 128)]
            case _:
                return []

    def frames(self, number: int) -> tuple[bytes, ...]:
        return tuple(
            picture(width, height, 1000 * self.voice + 10 * number + k)
            for k, (width, height) in enumerate(self.sizes(number))
        )


CASTS = tuple(
    Cast(
        f"{mode}-{'camera' if camera else 'audio'}",
        mode,
        camera,
        voice,
        named=mode == ("basic" if camera else "context"),
        seeded=mode == ("context" if camera else "basic"),
    )
    for voice, (camera, mode) in enumerate(
        (camera, mode) for camera in (False, True) for mode in ("off", "basic", "context")
    )
)
"""The six combinations of window mode and medium; two of them name their voice, two others
begin with text."""


@cache
def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of coarse coloured noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).save(file, "PNG")
    return file.getvalue()


class Speaker(Caller):
    """A caller of the kit who says what the cast says."""

    def __init__(self, cast: Cast, session: str) -> None:
        super().__init__(session)
        self.cast = cast

    async def say(self, through: int) -> None:
        assert self.attachment is not None
        while self.next_second <= through:
            number = self.next_second
            await self.attachment.submit(
                AppendInput(
                    self.cast.pcm(number),
                    frames=self.cast.frames(number),
                    from_sample=RATE_HZ * (number - 1),
                    is_speech=self.cast.is_speech(number),
                )
            )
            self.next_second += 1

    async def next(self) -> Event:
        # A unit waits here while an engine starts.
        for _ in range(PATIENCE):
            with contextlib.suppress(TimeoutError):
                return await super().next()
        raise TimeoutError("no event")


# --- the Thinker ----------------------------------------------------------------------------------


@dataclass
class Engine:
    """One Thinker process under a supervisor."""

    supervisor: Supervisor
    folder: Path

    @property
    def client(self) -> ThinkerClient:
        return ThinkerClient(self.supervisor.link("thinker"), feed_timeout_s=FEED_TIMEOUT_S)

    def kill_core(self) -> None:
        """SIGKILL to vLLM's engine core; the stage process notices, and is started again."""
        (core,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if "EngineCore" in " ".join(words_of(child)) and self._owns(child)
        ]
        os.kill(core.pid, signal.SIGKILL)

    def _owns(self, process: psutil.Process) -> bool:
        return any(str(self.folder) in " ".join(words_of(p)) for p in process.parents())


@asynccontextmanager
async def engine(
    checkpoint: Path,
    cache_dir: Path,
    *,
    element_type: ElementType = ElementType.FLOAT32,
    module: str = "duplex_sidecar.stages.thinker.process",
    **settings: int,
) -> AsyncIterator[Engine]:
    """A Thinker that hands out decision rows. settings: of ThinkerSettings, beside those here.
    module: what is run as the stage's process."""
    with tempfile.TemporaryDirectory(prefix="duplex-exact-") as name:
        folder = Path(name)
        values = ThinkerSettings(
            **{
                "checkpoint": str(checkpoint),
                "device": Device.CPU,
                "element_type": element_type,
                "context_tokens": CONTEXT_TOKENS,
                "seats": SEATS,
                "kv_bytes": KV_BYTES,
                "runtime_dir": str(folder),
                "cache_dir": str(cache_dir),
                "decision_rows": True,
                "feed_timeout_s": FEED_TIMEOUT_S,
                **settings,
            }
        )
        config, socket = folder / "config.json", folder / "socket"
        config.write_bytes(msgspec.json.encode(values))
        argv = (sys.executable, "-m", module, "--socket", str(socket), "--config", str(config))
        environment = stage_environment(os.environ, cache_dir)
        environment["PYTHONPATH"] = str(TESTS)
        spec = StageSpec("thinker", argv, socket, folder / "log", environment)
        supervisor = Supervisor([spec], lambda report: None)
        await supervisor.start()
        try:
            yield Engine(supervisor, folder)
        finally:
            await supervisor.stop()


# --- replicas -------------------------------------------------------------------------------------


@dataclass
class ExactStages(Stages):
    """The kit's replica with the stages of the proofs."""

    taped_encoder: TapedEncoder | None = None
    taped_thinker: TapedThinker | None = None
    audible: bool = False

    def as_set(self) -> StageSet:
        assert self.taped_encoder is not None
        assert self.taped_thinker is not None
        return StageSet(
            self.taped_encoder,
            self.taped_thinker,
            EvenTalker() if self.audible else SilentTalker(),
            EvenCode2Wav() if self.audible else SilentCode2Wav(),
            thinker_spare=SpareSeats(MAX_SESSIONS),
            talker_spare=SpareSeats(MAX_SESSIONS),
        )


@dataclass
class World:
    """What conversations need: a checkpoint, a ledger, a Thinker."""

    checkpoint: Path
    url: str
    engine: Engine
    model: ServedModel
    language: Language
    element_type: ElementType = ElementType.FLOAT32
    _scripts: dict[tuple[bool, bool], Script] = field(default_factory=dict)
    """By whether a clip stands in them and whether text does; known when there was an encoder."""
    _replicas: int = 0

    def script_of(self, cast: Cast) -> Script:
        """The session context of that conversation."""
        return self.script_in(cast.name)

    def script_in(self, session: str) -> Script:
        (cast,) = [cast for cast in CASTS if session.endswith(cast.name)]
        return self._scripts[cast.named, cast.seeded]

    async def _write_scripts(self, encoder: TapedEncoder) -> None:
        clip = tuple(rows_of((await encoder.reference(EncoderReference(OWN_VOICE))).rows))
        for named, seeded in {(cast.named, cast.seeded) for cast in CASTS}:
            self._scripts[named, seeded], _ = read_script(
                self.checkpoint, PROMPT, clip if named else (), WRITTEN if seeded else None
            )

    @asynccontextmanager
    async def replica(
        self,
        tapes: Tapes,
        *,
        shadowed: Callable[[str, int], bool] = lambda session, unit: False,
        spoils: Mapping[tuple[str, int], Defect] | None = None,
        audible: bool = False,
    ) -> AsyncIterator[Replica]:
        """A sidecar's sessions with an encoder of their own, all on the one Thinker. audible: a
        spoken unit has a second of sound, else none."""
        self._replicas += 1
        encoder = await start_encoder(self.checkpoint, tapes, self.element_type)
        if not self._scripts:
            await self._write_scripts(encoder)
        thinker = TapedThinker(self.engine.client, tapes, self.script_in, shadowed, spoils)
        stages = ExactStages(taped_encoder=encoder, taped_thinker=thinker, audible=audible)
        name = f"exact-{id(self)}-{self._replicas}"
        try:
            async with replica(
                self.url, name, model=self.model, stages=stages, slots=MAX_SESSIONS
            ) as made:
                yield made
        finally:
            await encoder.end()


def make_world(
    checkpoint: Path,
    url: str,
    engine: Engine,
    element_type: ElementType = ElementType.FLOAT32,
) -> World:
    settings = SidecarSettings(
        checkpoint=str(checkpoint),
        redis_url=url,
        runtime_dir=str(engine.folder),
        cache_dir=str(engine.folder),
        max_model_tokens=CONTEXT_TOKENS,
    )
    _, language = read_script(checkpoint, PROMPT)
    return World(checkpoint, url, engine, load_model(settings), language, element_type)


# --- conversations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talk:
    """One conversation that is over. said: emitted ids of each unit, as the ledger has them. cuts:
    by the unit behind which a reply was stopped, how many ids of which units were heard."""

    cast: Cast
    said: list[tuple[int, ...]]
    tape: Tape
    units: list[UnitDone]
    cuts: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def until(self, unit: int) -> "Talk":
        """Its first units."""
        answers = [said for said in self.tape.answers if said.unit <= unit]
        return replace(
            self,
            said=self.said[:unit],
            tape=replace(self.tape, answers=answers),
            units=self.units[:unit],
        )

    def spoilt(self, unit: int, defect: Defect) -> "Talk":
        """As far as `unit`, whose context had that defect."""
        wrong = self.tape.spoilt[unit, defect]
        cut = self.until(unit)
        answers = [*(said for said in cut.tape.answers if said.unit < unit), wrong]
        return replace(
            cut, said=[*cut.said[:-1], wrong.emitted], tape=replace(cut.tape, answers=answers)
        )


async def talk(
    world: World,
    casts: Sequence[Cast],
    units: int,
    *,
    label: str,
    longer: Mapping[str, int] | None = None,
    shadowed: Callable[[str, int], bool] = lambda session, unit: False,
    spoils: Mapping[tuple[str, int], Defect] | None = None,
) -> dict[str, Talk]:
    """Conversations side by side in which nothing happens, by the cast's name. longer: how many
    units some of them have instead."""
    tapes: Tapes = {}
    lengths = longer or {}
    async with world.replica(tapes, shadowed=shadowed, spoils=spoils) as here:
        speakers = [await open_speaker(here, cast, label) for cast in casts]
        await asyncio.gather(
            *(speaker.talk(lengths.get(speaker.cast.name, units)) for speaker in speakers)
        )
        return await over(speakers, tapes, here.ledger)


async def open_speaker(here: Replica, cast: Cast, label: str) -> Speaker:
    session = f"{label}-{cast.name}"
    await here.open(session, cast.terms)
    speaker = Speaker(cast, session)
    await speaker.dial(here)
    return speaker


async def over(speakers: Iterable[Speaker], tapes: Tapes, ledger: Ledger) -> dict[str, Talk]:
    talks: dict[str, Talk] = {}
    for speaker in speakers:
        check_events(speaker)
        assert speaker.failures == []
        session = speaker.session
        said = await tokens(ledger, session)
        talks[speaker.cast.name] = Talk(speaker.cast, said, tapes[session], speaker.units)
        await speaker.close()
    return talks


# --- disturbances ---------------------------------------------------------------------------------

EVICTION, ENGINE, CRASH, MOVE = "eviction", "engine restart", "crash", "move"
DISTURBANCES = (EVICTION, ENGINE, CRASH, MOVE)


@dataclass
class Plan:
    """Before which units what happens to one conversation. A crash and half of the evictions meet
    the unit under way, an engine restart meets all of them so."""

    evictions: list[int] = field(default_factory=list[int])
    stops: list[int] = field(default_factory=list[int])
    """One for each disturbance that all conversations share, in order."""

    def behind(self) -> tuple[int, ...]:
        """Units whose context is made after each disturbance, and after one eviction: that of the
        first unit behind a disturbance may have been made before it."""
        evicted = self.evictions[len(self.evictions) // 2 :][:1]
        return tuple(unit + 2 for unit in (*self.stops, *evicted))


def plan_for(kinds: Sequence[str], units: int, random_: random.Random) -> tuple[list[str], Plan]:
    """The disturbances that all conversations share, spread over the units, and this one's units
    for them; evictions at random units between."""
    shared = [kind for kind in kinds if kind != EVICTION]
    pieces = len(shared) + 1
    stops = [
        units * number // pieces + random_.randint(-units // 12, units // 12)
        for number in range(1, pieces)
    ]
    count = units // 12 if EVICTION in kinds else 0
    free = [unit for unit in range(3, units) if all(abs(unit - stop) > 1 for stop in stops)]
    return shared, Plan(sorted(random_.sample(free, count)), stops)


def plans_for(
    casts: Sequence[Cast], kinds: Sequence[str], units: int, seed: int
) -> tuple[list[str], dict[str, Plan]]:
    """What `talk_badly` does: the shared disturbances, and the plan of each conversation."""
    random_ = random.Random(seed)
    plans: dict[str, Plan] = {}
    shared: list[str] = []
    for cast in casts:
        shared, plans[cast.name] = plan_for(kinds, units, random_)
    return shared, plans


async def talk_badly(
    world: World,
    casts: Sequence[Cast],
    units: int,
    *,
    label: str,
    kinds: Sequence[str],
    seed: int,
    shadowed: Callable[[str, int], bool] = lambda session, unit: False,
) -> dict[str, Talk]:
    """The same conversations while streams are evicted, the engine is killed, the replica dies
    under them and a later one parks them for yet another to wake."""
    tapes: Tapes = {}
    shared, plans = plans_for(casts, kinds, units, seed)
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(world.replica(tapes, shadowed=shadowed))
        speakers = [await open_speaker(here, cast, label) for cast in casts]
        for number, kind in enumerate(shared):
            stops = [plans[speaker.cast.name].stops[number] for speaker in speakers]
            await _talk_until(here, speakers, stops, plans)
            if kind != MOVE:
                for speaker, stop in zip(speakers, stops, strict=True):
                    await speaker.say(stop + 1)
                await asyncio.sleep(0.02 * number)
            if kind == ENGINE:
                world.engine.kill_core()
                continue
            lost = here
            here = await stack.enter_async_context(world.replica(tapes, shadowed=shadowed))
            if kind == MOVE:
                for speaker in speakers:
                    await lost.registry.departures.park(
                        speaker.session, grace_s=0.1, unit_s=FEED_TIMEOUT_S
                    )
            else:
                here.registry.declare_dead(lost.name)
            for speaker in speakers:
                await speaker.dial(here)
        await _talk_until(here, speakers, [units] * len(speakers), plans)
        return await over(speakers, tapes, here.ledger)


async def _talk_until(
    here: Replica, speakers: Sequence[Speaker], stops: Sequence[int], plans: Mapping[str, Plan]
) -> None:
    assert isinstance(here.stages, ExactStages)
    thinker = here.stages.taped_thinker
    assert thinker is not None

    async def one(speaker: Speaker, stop: int) -> None:
        plan = plans[speaker.cast.name]
        while plan.evictions and plan.evictions[0] <= stop:
            unit = plan.evictions.pop(0)
            await speaker.talk(unit - 1)
            if unit % 2:
                await speaker.say(unit)
                await asyncio.sleep(0.01)
            if not await thinker.evict(speaker.session):
                # The lost owner had answered: this one has not opened a stream so far.
                plan.evictions.insert(0, unit + 1)
        await speaker.talk(stop)

    await asyncio.gather(*(one(*pair) for pair in zip(speakers, stops, strict=True)))
