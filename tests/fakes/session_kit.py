"""Whole sessions over fake stages and a real ledger: a replica, a caller, and a second, plain way
to say what each prompt must be."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from fake_encoder import REFERENCE_ROWS, FakeEncoder, reference_of
from fake_stage import rows_in
from fake_thinker import FakeThinker, Position, Submission
from fake_voice import FakeCode2Wav, FakeTalker
from PIL import Image

from duplex_api.manifest import load_manifest
from duplex_api.session import DuplexSession
from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.contract.recorder_stages import Recorder
from duplex_sidecar.ledger.records import Committed
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.store import Ledger, LedgerOptions
from duplex_sidecar.ledger.token import token_sha256
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary
from duplex_sidecar.protocol.commands import (
    AppendInput,
    AudioEncoding,
    Close,
    Command,
    CommitInput,
    Heartbeat,
    SetInputFormat,
)
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    OPENING_STEPS,
    Alive,
    Audio,
    Closed,
    CommandApplied,
    Event,
    Failure,
    InputAccepted,
    Sequenced,
    SessionOpened,
    TurnMark,
    TurnTruncated,
    UnitDone,
)
from duplex_sidecar.session.arrivals import Claim
from duplex_sidecar.session.assembly import Assembly, as_they_are
from duplex_sidecar.session.model import ServedModel
from duplex_sidecar.session.port import Attachment
from duplex_sidecar.session.registry import SessionRegistry
from duplex_sidecar.session.roster import Roster
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.stages.envelope import WaveFeed
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

TOKEN = "open sesame"


def claim(token: str = TOKEN, fence: int | None = None) -> Claim:
    """An order to run a session whose client has that token."""
    return Claim(token_sha256(token), fence)


RATE_HZ = 16_000
PROMPT = "Be brief."
SYSTEM = f"<|im_start|>system\n{PROMPT}"
VOICE = "hum"
"""A voice with a reference clip of so many rows and a rest; the default one has none."""
WAIT_S = 60.0
"""For what comes a moment later; also behind a failover that takes its time."""

# --- the model ------------------------------------------------------------------------------------

_CONTROLS = tuple(ControlToken)
_WORDS = (" yes.", " no", " and", " then", " maybe", " tell me", " more", " of it?", " well", " é")
WORD_IDS = tuple(range(len(_CONTROLS) + 256, len(_CONTROLS) + 256 + len(_WORDS)))
VOCABULARY = Vocabulary(
    control_ids={token: id_ for id_, token in enumerate(_CONTROLS)},
    special_ids=frozenset(),
    bad_ids=frozenset(),
    token_bytes=(
        *(token.value.encode() for token in _CONTROLS),
        *(bytes([byte]) for byte in range(256)),
        *(word.encode() for word in _WORDS),
    ),
)
_CONTROL = re.compile("|".join(re.escape(token.value) for token in _CONTROLS))


def encode(text: str) -> tuple[int, ...]:
    """Control tokens by name, the rest byte by byte."""
    ids: list[int] = []
    position = 0
    for match in _CONTROL.finditer(text):
        ids += [len(_CONTROLS) + byte for byte in text[position : match.start()].encode()]
        ids.append(_CONTROLS.index(ControlToken(match.group())))
        position = match.end()
    ids += [len(_CONTROLS) + byte for byte in text[position:].encode()]
    return tuple(ids)


MODEL = ServedModel(
    config=tiny_config(),
    vocabulary=VOCABULARY,
    encode=encode,
    fingerprint="fake",
    max_model_tokens=8192,
    max_talker_tokens=4096,
    voices=frozenset({"default", VOICE}),
    references={VOICE: 1_600 * REFERENCE_ROWS + 900},
)

# --- what a session is opened with ----------------------------------------------------------------

Mode = Literal["off", "basic", "context"]
MODES: tuple[Mode, ...] = ("off", "basic", "context")


@dataclass(frozen=True)
class Terms:
    """The window is small, so that 60 units slide often."""

    mode: Mode
    camera: bool = False
    basic_high: int = 320
    basic_low: int = 220
    max_units: int = 6
    previous_max: int = 25
    grace: str = "30s"
    idle: str = "30m"
    park_after: str = "2m"
    greedy: bool = False
    hysteresis: int = 1
    boundary: Literal["unit", "sentence", "turn"] = "unit"
    high_resolution: bool = True
    voice: str | None = None
    initial_text: str | None = None

    def manifest(self) -> DuplexSession:
        camera = "  camera:\n    framesPerUnit: 2\n" if self.camera else ""
        if self.camera and not self.high_resolution:
            camera += "    highResolution: false\n"
        voice = f"  voice:\n    name: {self.voice}\n" if self.voice else ""
        text = f"  initialText: {self.initial_text}\n" if self.initial_text else ""
        return load_manifest(f"""
apiVersion: duplex.dev/v1alpha1
kind: DuplexSession
metadata:
  name: test
spec:
  poolRef:
    name: test
  prompt: {PROMPT}
  window:
    mode: "{self.mode}"
    basicWindowHighTokens: {self.basic_high}
    basicWindowLowTokens: {self.basic_low}
    contextMaxUnits: {self.max_units}
    contextPreviousMaxTokens: {self.previous_max}
    hysteresisUnits: {self.hysteresis}
    boundary: {self.boundary}
{camera}{voice}{text}  sampling:
    seed: 42
    greedy: {"true" if self.greedy else "false"}
  lifecycle:
    disconnectGrace: {self.grace}
    idleTimeout: {self.idle}
    parkAfter: {self.park_after}
""")


def with_camera(terms: Terms) -> Terms:
    """Frames take 66 positions each."""
    return replace(terms, camera=True, basic_high=1200, basic_low=800)


def second(number: int, voice: int = 0) -> bytes:
    """The caller's second `number`, from 1: 16,000 samples, s16le."""
    random = np.random.default_rng((number, voice))
    return random.integers(-2000, 2000, RATE_HZ, dtype="<i2").tobytes()


def speaks(number: int) -> bool:
    """Whether somebody speaks in that second."""
    return number % 7 in (1, 2, 3)


def frames_of(number: int, *, large: bool = False) -> tuple[bytes, ...]:
    """None, one or two frames; with two the first may be cut into slices."""
    side = 640 if large else 96
    return tuple(png(side, number * 10 + k) for k in range(number % 3))


def png(side: int, shade: int) -> bytes:
    file = BytesIO()
    Image.new("L", (side, side), shade % 256).save(file, "PNG")
    return file.getvalue() + b"%d" % shade


# --- a replica ------------------------------------------------------------------------------------


@dataclass
class Stages:
    """spare: seats for rebuilds, beside one for each of the replica's 4 slots."""

    encoder: FakeEncoder = field(default_factory=FakeEncoder)
    thinker: FakeThinker = field(default_factory=lambda: FakeThinker(VOCABULARY, WORD_IDS))
    talker: FakeTalker = field(default_factory=FakeTalker)
    code2wav: FakeCode2Wav = field(default_factory=FakeCode2Wav)

    def as_set(self) -> StageSet:
        return StageSet(
            self.encoder,
            self.thinker,
            self.talker,
            self.code2wav,
            thinker_spare=SpareSeats(2),
            talker_spare=SpareSeats(2),
        )

    def chunks(self) -> Sequence[WaveFeed]:
        """Everything that the vocoder was fed, in its order."""
        return self.code2wav.fed

    def held(self) -> list[str]:
        """What any stage still holds of any session."""
        return [
            *self.encoder.sessions,
            *self.thinker.streams,
            *self.talker.streams,
            *self.code2wav.sessions,
        ]


@dataclass
class Replica:
    name: str
    registry: SessionRegistry
    stages: Stages
    ledger: Ledger
    stage_set: StageSet

    async def open(self, session: str, terms: Terms, fence: int | None = None) -> None:
        await self.registry.open(session, terms.manifest(), claim(fence=fence))


@asynccontextmanager
async def replica(
    url: str,
    name: str = "replica-a",
    *,
    model: ServedModel = MODEL,
    stages: Stages | None = None,
    slots: int = 4,
    hold_s: float = 10.0,
    clock_s: Callable[[], float] = time.monotonic,
    rebuild_ahead: bool = True,
    call_timeout_ms: int = 3_000,
    durability: Durability = Durability.MEMORY,
    tapes: Path | None = None,
    placed: bool = False,
    address: str = "",
    pod_uid: str = "",
) -> AsyncIterator[Replica]:
    """One sidecar's sessions. At the end it lets go of them as in an orderly shutdown.

    call_timeout_ms: generous, so that a busy machine is not taken for a lost ledger. tapes: folder
    for what passes between sessions and stages. placed: an operator says what runs here. address:
    of its door, for the lease. pod_uid: of the pod in which it runs.
    """
    stages = stages or Stages()
    options = LedgerOptions(call_timeout_ms=call_timeout_ms, durability=durability)
    ledger = await Ledger.connect(url, options)
    settings = TelemetrySettings(replica=name)
    tracing, metrics = Tracing(settings), Metrics(settings)
    recorder = tapes and Recorder(tapes, model.vocabulary, model.max_talker_tokens)
    stage_set = stages.as_set()
    assembly = Assembly(
        model=model,
        stages=stage_set,
        ledger=ledger,
        tracing=tracing,
        metrics=metrics,
        replica=name,
        ledger_hold_s=hold_s,
        clock_s=clock_s,
        rebuild_ahead=rebuild_ahead,
        stages_of=recorder.stages_of if recorder else as_they_are,
        address=address,
        pod_uid=pod_uid,
    )
    registry = SessionRegistry(assembly, ledger, Roster(slots), lambda: True, placed=placed)
    try:
        yield Replica(name, registry, stages, ledger, stage_set)
    finally:
        await registry.close()
        await ledger.close()
        tracing.close(500)
        metrics.close(500)


async def eventually(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Wait for something that happens a moment later."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# --- a caller -------------------------------------------------------------------------------------


class Caller:
    """A client as it should be: resumes behind the last event that it has seen, sends input again
    from the acknowledged position, never takes an event twice."""

    def __init__(
        self,
        session: str,
        *,
        voice: int = 0,
        frames: Callable[[int], tuple[bytes, ...]] = lambda _: (),
    ) -> None:
        self.session = session
        self._voice = voice
        self._frames = frames
        self.events: list[Event] = []
        self.sequenced: list[Sequenced] = []
        self.openings: list[SessionOpened] = []
        self.accepted: list[InputAccepted] = []
        self.next_second = 1
        self.attachment: Attachment | None = None

    @property
    def last_sequence(self) -> int:
        return self.sequenced[-1].sequence if self.sequenced else 0

    @property
    def units(self) -> list[UnitDone]:
        return [event.body for event in self.sequenced if isinstance(event.body, UnitDone)]

    @property
    def failures(self) -> list[Failure]:
        return [event for event in self.events if isinstance(event, Failure)]

    async def dial(self, replica: Replica) -> SessionOpened:
        """Attach, for the first time or again."""
        first = self.attachment is None
        self.attachment = await replica.registry.attach(
            self.session, TOKEN, None if first else self.last_sequence
        )
        await self.attachment.submit(SetInputFormat(AudioEncoding.PCM16, RATE_HZ))
        opened = await self.until(lambda event: isinstance(event, SessionOpened))
        assert isinstance(opened, SessionOpened)
        self.next_second = opened.acknowledged_sample // RATE_HZ + 1
        return opened

    async def hang_up(self) -> None:
        assert self.attachment is not None
        await self.attachment.detach()

    async def say(self, through: int) -> None:
        """Send the seconds up to `through`, faster than anybody speaks."""
        assert self.attachment is not None
        while self.next_second <= through:
            number = self.next_second
            await self.attachment.submit(
                AppendInput(
                    second(number, self._voice),
                    frames=self._frames(number),
                    from_sample=RATE_HZ * (number - 1),
                    is_speech=speaks(number),
                )
            )
            self.next_second += 1

    async def talk(self, through: int) -> None:
        """Send up to that second and wait until its unit is done."""
        await self.say(through)
        await self.until_unit(through)

    async def until_unit(self, number: int) -> UnitDone:
        done = [unit for unit in self.units if unit.unit == number]
        while not done:
            event = await self.next()
            if isinstance(event, Sequenced) and isinstance(event.body, UnitDone):
                done = [event.body] if event.body.unit == number else []
        return done[0]

    async def until(self, wanted: Callable[[Event], bool]) -> Event:
        while True:
            event = await self.next()
            if wanted(event):
                return event

    async def until_failure(self) -> Failure:
        failure = await self.until(lambda event: isinstance(event, Failure))
        assert isinstance(failure, Failure)
        return failure

    async def next(self) -> Event:
        assert self.attachment is not None
        async with asyncio.timeout(WAIT_S):
            event = await self.attachment.next_event()
        assert event is not None, f"nothing comes after the end: {self.events[-1:]}"
        self.events.append(event)
        match event:
            case Sequenced():
                self.sequenced.append(event)
            case SessionOpened():
                self.openings.append(event)
            case InputAccepted():
                self.accepted.append(event)
            case _:
                pass
        return event

    async def attachment_takes_mail(self) -> None:
        """The session has looked at everything that was submitted."""
        assert self.attachment is not None
        await self.attachment.submit(Heartbeat("mail"))
        await self.until(lambda event: isinstance(event, Alive))

    async def tell(self, command: Command) -> None:
        """Say it, whatever comes of it."""
        assert self.attachment is not None
        await self.attachment.submit(command)

    async def ask(self, command: Command) -> Event:
        """Say a numbered command; what answers it: that it is applied, or its refusal."""
        await self.tell(command)
        number = getattr(command, "client_sequence", None)
        return await self.until(
            lambda event: (
                isinstance(event, Failure)
                or (isinstance(event, CommandApplied) and event.client_sequence == number)
            )
        )

    async def commit(self) -> None:
        assert self.attachment is not None
        await self.attachment.submit(CommitInput())

    async def close(self) -> Closed:
        assert self.attachment is not None
        await self.attachment.submit(Close())
        closed = await self.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        return closed


def check_events(caller: Caller) -> None:
    """What holds of every caller's events, whatever happened on the way."""
    assert [event.sequence for event in caller.sequenced] == list(
        range(1, len(caller.sequenced) + 1)
    )
    assert [unit.unit for unit in caller.units] == list(range(1, len(caller.units) + 1))
    assert [unit.head for unit in caller.units] == sorted({unit.head for unit in caller.units})
    accepted = [event.unit for event in caller.accepted]
    assert accepted == sorted(set(accepted))
    open_turn: int | None = None
    steps: list[str] = []
    samples = turns = 0
    place = (-1, -1)
    for event in caller.sequenced:
        body = event.body
        match body:
            case TurnMark():
                steps.append(body.step)
                if body.step == OPENING_STEPS[0]:
                    assert open_turn is None
                    assert body.turn == turns + 1
                    open_turn, turns, samples = body.turn, body.turn, 0
                assert body.turn == open_turn
                if body.step in CLOSING_STEPS:
                    assert body.samples == samples
                if body.step == CLOSING_STEPS[-1]:
                    open_turn = None
            case Audio():
                assert body.turn == open_turn
                assert body.from_sample == samples
                samples += len(body.pcm_s16le) // 2
                now = (body.epoch, body.stage2_sequence)
                assert now > place
                place = now
            case UnitDone() | TurnTruncated():
                pass
            case _:
                assert body.turn == open_turn
    whole = [*OPENING_STEPS, *CLOSING_STEPS]
    assert steps == (whole * (len(steps) // len(whole) + 1))[: len(steps)]


def check_stage2(stages: Stages, session: str) -> list[int]:
    """Every epoch of a vocoder began at chunk 0 and went on without a gap. Returns the epochs."""
    epochs: dict[int, list[int]] = {}
    for feed in stages.code2wav.fed:
        if feed.session == session:
            epochs.setdefault(feed.epoch, []).append(feed.sequence)
    for sequences in epochs.values():
        assert sequences == list(range(len(sequences)))
    assert list(epochs) == sorted(epochs)
    return list(epochs)


# --- what was said --------------------------------------------------------------------------------


async def committed(ledger: Ledger, session: str) -> list[Committed]:
    return list((await ledger.load(session)).committed)


async def tokens(ledger: Ledger, session: str) -> list[tuple[int, ...]]:
    """Emitted ids of each unit, as the ledger has them."""
    units = await committed(ledger, session)
    assert [unit.seq for unit in units] == list(range(1, len(units) + 1))
    return [unit.token_ids for unit in units]


async def undisturbed(
    url: str,
    session: str,
    terms: Terms,
    units: int,
    *,
    voice: int = 0,
    frames: Callable[[int], tuple[bytes, ...]] = lambda _: (),
) -> tuple[list[tuple[int, ...]], Caller]:
    """A conversation in which nothing happens: its tokens and its caller."""
    async with replica(url, f"calm-{session}") as calm:
        await calm.open(session, terms)
        caller = Caller(session, voice=voice, frames=frames)
        await caller.dial(calm)
        await caller.talk(units)
        check_events(caller)
        said = await tokens(calm.ledger, session)
        await caller.close()
    return said, caller


# --- what each prompt must be: written without a look at the product's planner and renderer -------


@dataclass(frozen=True)
class _Unit:
    input: tuple[Position, ...]
    spoken: tuple[int, ...]
    closing: tuple[int, ...]
    ends: tuple[str, ...]

    @property
    def whole(self) -> tuple[Position, ...]:
        return (*self.input, *self.spoken, *self.closing)


Cuts = Mapping[int, Mapping[int, tuple[int, ...]]]
"""By the first unit whose prompt shows it: units with another answer than the one they gave."""


def expected_prompts(
    terms: Terms,
    inputs: Sequence[tuple[Position, ...]],
    said: Sequence[tuple[int, ...]],
    cuts: Cuts = MappingProxyType({}),
) -> list[tuple[Position, ...]]:
    """The prompt of each unit, from what each append put in and what was said before it."""
    said = list(said)
    prefix: tuple[Position, ...] = encode(SYSTEM)
    suffix = encode("<|im_end|>")
    if terms.voice:
        clip = rows_in(reference_of(terms.voice))
        prefix, suffix = (
            (*prefix, *encode("\n<|audio_start|>"), *clip),
            encode("<|audio_end|><|im_end|>"),
        )
    marker = encode("\n\nprevious: ")
    unit_end = encode("</unit>")
    specials = set(range(len(_CONTROLS)))
    window: list[_Unit] = []
    previous: list[int] = []
    prompts: list[tuple[Position, ...]] = []

    def render(pending: tuple[Position, ...]) -> tuple[Position, ...]:
        text = [*marker, *previous] if previous else []
        units = [position for unit in window for position in unit.whole]
        return (*prefix, *text, *suffix, *units, *pending)

    def leaves(count: int) -> int:
        """So many units at least, and then up to a boundary that is not too far away."""
        count = min(len(window), max(count, terms.hysteresis))
        for more in range(count, min(len(window), count + 8) + 1):
            if terms.boundary in window[more - 1].ends:
                return more
        return count

    turn_ended = True
    for number, pending in enumerate(inputs):
        for unit, answer in cuts.get(number + 1, {}).items():
            said[unit - 1] = answer
            if unit < number:
                place = len(window) - (number - unit)
                assert place >= 0, "what has left the window is not cut"
                closing = (answer[-1], *unit_end)
                window[place] = replace(window[place], spoken=answer[:-1], closing=closing)
        if number:
            before = said[number - 1]
            ends, turn_ended = _ends(before, turn_ended)
            window.append(_Unit(inputs[number - 1], before[:-1], (before[-1], *unit_end), ends))
        due = 0
        if terms.mode == "context":
            due = max(0, len(window) - terms.max_units)
        if terms.mode == "basic" and len(render(pending)) > terms.basic_high:
            excess = len(render(pending)) - terms.basic_low
            while due < len(window) and excess > 0:
                excess -= len(window[due].whole)
                due += 1
        for gone in [window.pop(0) for _ in range(leaves(due) if due else 0)]:
            if terms.mode == "context":
                previous += [id_ for id_ in gone.spoken if id_ not in specials]
        previous = previous[-terms.previous_max :]
        prompts.append(render(pending))
    return prompts


def _ends(ids: tuple[int, ...], turn_ended: bool) -> tuple[tuple[str, ...], bool]:
    """At which boundaries an answer ends, and whether the turn is over after it."""
    if ids == (VOCABULARY.listen,) and turn_ended:
        return ("unit", "sentence", "turn"), True
    for id_ in ids[:-1]:
        turn_ended = id_ == VOCABULARY.turn_eos
    if VOCABULARY.turn_eos in ids:
        return ("unit", "sentence", "turn"), turn_ended
    whole = VOCABULARY.text(ids[:-1]).rstrip().endswith((".", "?"))
    return ("unit", "sentence") if whole else ("unit",), turn_ended


def unit_inputs(
    encoder: FakeEncoder, session: str, units: int, blocks: Callable[[int], Sequence[str]]
) -> list[tuple[Position, ...]]:
    """What each append put in: `<unit>`, image blocks, audio rows. blocks: of a unit, each "image"
    or "slice"."""
    inputs: list[tuple[Position, ...]] = []
    for number in range(1, units + 1):
        given = encoder.given[session, number]
        names = list(blocks(number))
        positions: list[Position] = [*encode("<unit>")]
        for name, block in zip(names, given, strict=False):
            positions += [*encode(f"<{name}>"), *block, *encode(f"</{name}>")]
        positions += [row for chunk in given[len(names) :] for row in chunk]
        inputs.append(tuple(positions))
    return inputs


def image_blocks(frames: Sequence[bytes], *, high_resolution: bool) -> list[str]:
    """Of two frames the first is cut into two slices when it is larger than a tile."""
    large = bool(frames) and Image.open(BytesIO(frames[0])).width > 448
    if len(frames) == 2 and large and high_resolution:
        return ["image", "slice", "slice", "image"]
    return ["image"] * len(frames)


def check_prompts(
    stages: Iterable[Stages],
    session: str,
    terms: Terms,
    said: Sequence[tuple[int, ...]],
    caller: Caller,
    frames: Callable[[int], tuple[bytes, ...]] = lambda _: (),
    cuts: Cuts = MappingProxyType({}),
) -> list[Submission]:
    """Every prompt that any Thinker answered to is the one that it must be, and has the length that
    the client was told. Returns the submissions."""
    all_stages = list(stages)
    encoder = FakeEncoder()
    for each in all_stages:
        encoder.given.update(each.encoder.given)
    inputs = unit_inputs(
        encoder,
        session,
        len(said),
        lambda number: image_blocks(frames(number), high_resolution=terms.high_resolution),
    )
    prompts = expected_prompts(terms, inputs, said, cuts)
    submissions = [
        one
        for each in all_stages
        for one in each.thinker.submissions
        if one.session == session and one.unit <= len(said)
    ]
    assert {one.unit for one in submissions} == set(range(1, len(said) + 1))
    for one in submissions:
        assert one.prompt == prompts[one.unit - 1], f"prompt of unit {one.unit}"
        assert one.emitted == said[one.unit - 1], f"answer to unit {one.unit}"
    for unit in caller.units:
        assert unit.window_tokens == len(prompts[unit.unit - 1])
    return submissions
