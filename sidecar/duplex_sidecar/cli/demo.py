"""`duplex demo`: the main job on one machine, with a kill in the middle.

Makes the tiny checkpoint once, starts a Valkey and a sidecar, opens the session of
`examples/session.yaml`, talks to it over the `openai` SDK with the shipped recording, kills the
sidecar's whole process tree at unit 30, starts another on the same Valkey, and talks on.
"""

import asyncio
import secrets
import tempfile
import time
import wave
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console

from duplex_api.manifest import ManifestError
from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.cli.demo_checks import epoch_begins_anew
from duplex_sidecar.cli.inputs import Count, Factor, InputFolder, OutputPath, os_error_text
from duplex_sidecar.cli.leaving import INTERRUPTED, leaves_in_order
from duplex_sidecar.cli.manifest_file import read_manifest
from duplex_sidecar.cli.output import OutputFailed, require_room, swapped_in, written
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.cli.starting import make_checkpoint, show_start
from duplex_sidecar.client.conversation import (
    OUTPUT_RATE_HZ,
    UNIT_SAMPLES,
    Conversation,
    ConversationFailed,
    Talk,
    lay_out_replies,
)
from duplex_sidecar.client.local_sidecar import (
    READY_TIMEOUT_S,
    ApiError,
    LocalSidecar,
    SidecarFailed,
)
from duplex_sidecar.client.media import MediaError, read_frames, read_speech
from duplex_sidecar.client.table import LiveTable
from duplex_sidecar.client.timeline import draw_timeline
from duplex_sidecar.ledger.embedded import EmbeddedError, EmbeddedValkey
from duplex_sidecar.ledger.export import export_lines
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.session.conversation import decode_conversation
from duplex_sidecar.session.model import load_model
from duplex_sidecar.session.opening import facts_of
from duplex_sidecar.session.same_window import window_is_the_same
from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.otlp_sink import OtlpSink

EXIT_USAGE = 2
REDIAL_FOR_S = READY_TIMEOUT_S + 60
"""The client waits for longer than the second sidecar may take."""
OUTPUT_BYTES = 16 * 1024 * 1024
REBUILD_IN_LEDGER = '"plan":{"action":"rebuild"'
"""Once in the line of a unit. Traces have one more where a unit that was prepared never came."""
CAUSE_IN_SPANS = f'"{names.WINDOW_CAUSE}",[^}}]*'
OUTPUT_FILES = ("reply.wav", "timeline.png", "spans.jsonl", "ledger.jsonl")


@dataclass
class _Stage:
    """The demo's places and what it has started."""

    out: Path
    """Of the new files, until they are all there."""
    work: Path
    console: Console
    valkey: EmbeddedValkey
    sink: OtlpSink
    checkpoint: Path
    sidecar: LocalSidecar | None = None
    at_kill: LoadedSession | None = None
    """What the ledger held of the session while nobody ran it."""

    async def load(self, session: str) -> LoadedSession:
        reader = await LedgerReader.connect(self.valkey.url)
        try:
            return await reader.load(session)
        finally:
            await reader.close()

    def new_sidecar(self, name: str) -> LocalSidecar:
        self.sidecar = LocalSidecar.prepare(
            self.work / name,
            checkpoint=str(self.checkpoint.absolute()),
            redis_url=self.valkey.url,
            cache_dir=str(default_cache_dir().absolute()),
            replica=name,
            otlp_endpoint=self.sink.endpoint,
        )
        return self.sidecar

    def stop_sidecar(self) -> None:
        if self.sidecar is not None:
            self.sidecar.stop()

    def keep_logs(self, out: Path) -> str:
        """Those of the newest sidecar, which go with `work` otherwise. Returns where they are."""
        if self.sidecar is None:
            return ""
        folder = out / f"{self.sidecar.settings.replica}-logs"
        self.sidecar.keep_logs(folder)
        return f"\nlogs: {folder}"


@dataclass(frozen=True)
class Kill:
    """What became of the conversation behind the kill."""

    resumed: int
    same_window: bool
    new_epoch: bool


def demo(
    *,
    out: OutputPath = Path("demo-out"),
    kill_at: Count = 30,
    speed: Factor = 1.0,
    camera: bool = False,
    examples: InputFolder | None = None,
) -> int:
    """A whole conversation on this machine, with a kill in the middle of it.

    Parameters
    ----------
    out
        Folder for reply.wav, timeline.png, spans.jsonl and ledger.jsonl. Those of the run before
        stay in it until the new ones are all there.
    kill_at
        Unit after which the sidecar's process tree is killed; 0 kills nothing.
    speed
        How many times faster than real time the recording is sent.
    camera
        Use the example with camera frames.
    examples
        Folder of the examples. Default: the project's.
    """
    console = Console()
    started = time.monotonic()
    folder = examples or find_examples()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with leaves_in_order():
            return _demo(console, out, folder, kill_at, speed, camera, started)
    except KeyboardInterrupt:
        console.print("duplex demo: interrupted; what it had started is stopped")
        return INTERRUPTED
    except ManifestError as error:
        return _complain(console, f"the example is not a valid DuplexSession:\n{error}")
    except (CheckpointError, EmbeddedError, MediaError, OutputFailed, SidecarFailed) as error:
        return _complain(console, str(error))
    except OSError as error:
        return _complain(console, os_error_text(error) if error.filename else f"{out}: {error}")


def find_examples() -> Path:
    """The project's examples: beside the sources, or here."""
    source = Path(str(resources.files("duplex_sidecar"))).parents[1] / "examples"
    return source if source.is_dir() else Path("examples")


def _complain(console: Console, text: str, status: int = 1) -> int:
    console.print(f"duplex demo: {text}", style="red", markup=False, soft_wrap=True)
    return status


def _demo(
    console: Console,
    out: Path,
    examples: Path,
    kill_at: int,
    speed: float,
    camera: bool,
    started: float,
) -> int:
    # Refused here, with its paths, before anything is started.
    manifest = read_manifest(examples / ("session-camera.yaml" if camera else "session.yaml"))
    speech = read_speech(examples / "audio" / "conversation.flac")
    frames = read_frames(examples / "video" / "camera.mp4") if camera else None
    units = -(-len(speech) // (2 * UNIT_SAMPLES))
    if kill_at >= units:
        told = f"the recording has {units} units: --kill-at has to be less than that"
        return _complain(console, told, EXIT_USAGE)
    require_room(out, OUTPUT_BYTES)
    checkpoint = default_checkpoint()
    make_checkpoint(console, checkpoint)
    with ExitStack() as started_things:
        work = started_things.enter_context(_short_work_folder())
        valkey = EmbeddedValkey(work / "ledger")
        started_things.callback(valkey.stop)
        valkey.start()
        new = started_things.enter_context(swapped_in(out, OUTPUT_FILES))
        sink = started_things.enter_context(OtlpSink(new / "spans.jsonl", None))
        stage = _Stage(new, work, console, valkey, sink, checkpoint)
        started_things.callback(stage.stop_sidecar)
        try:
            talk, kill = asyncio.run(_run(stage, manifest, speech, frames, kill_at, speed))
        except (ApiError, ConversationFailed, SidecarFailed) as error:
            raise SidecarFailed(f"{error}{stage.keep_logs(out)}") from error
    return summary(console, out, talk, kill, time.monotonic() - started)


@contextmanager
def _short_work_folder() -> Generator[Path]:
    """Sockets lie below it, and their paths have a limit."""
    with tempfile.TemporaryDirectory(prefix="duplex-demo-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


async def _run(
    stage: _Stage,
    manifest: str,
    speech: bytes,
    frames: list[bytes] | None,
    kill_at: int,
    speed: float,
) -> tuple[Talk, Kill | None]:
    session, token = f"demo-{secrets.token_hex(4)}", secrets.token_urlsafe(32)
    first = stage.new_sidecar("sidecar-1")
    first.start()
    await _ready(first, show_start, stage.console, first, first.settings.replica)
    await asyncio.to_thread(first.open_session, session, manifest, token)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    talk: Talk
    with LiveTable(stage.console) as table:
        conversation = Conversation(
            first.realtime_url,
            session,
            token,
            speech,
            frames,
            speed=speed,
            redial_for_s=REDIAL_FOR_S,
            on_event=events.put_nowait,
        )
        talking = asyncio.create_task(conversation.run())
        watching = asyncio.create_task(_watch(stage, session, events, table, kill_at, first))
        try:
            await asyncio.wait((talking, watching), return_when=asyncio.FIRST_COMPLETED)
            if not talking.done():  # nobody watches any more: the other sidecar did not start
                await watching
            talk = await talking
        finally:
            for task in (talking, watching):
                task.cancel()
            await asyncio.gather(talking, watching, return_exceptions=True)
            while not events.empty():
                _show(events.get_nowait(), table)
    sidecar = stage.sidecar
    assert sidecar is not None
    await asyncio.to_thread(sidecar.stop)
    end = await stage.load(session)
    with written(stage.out / "ledger.jsonl") as path:
        path.write_bytes(b"".join(export_lines(end)))
    write_wave(stage.out / "reply.wav", lay_out_replies(talk.replies))
    with written(stage.out / "timeline.png") as path:
        draw_timeline(path, talk, speech, kill_at or None)
    return talk, _judged(stage, talk, end, len(frames or ())) if kill_at else None


def _judged(stage: _Stage, talk: Talk, end: LoadedSession, frames: int) -> Kill:
    """Nothing is the same where nobody was killed: the recording was shorter than that. frames: one
    was sent with each of the first so many units."""
    at_kill, sidecar = stage.at_kill, stage.sidecar
    if at_kill is None or sidecar is None:
        return Kill(len(talk.resumes), same_window=False, new_epoch=False)
    facts = facts_of(end.opening, load_model(sidecar.settings))
    killed = talk.units[0]["replica"]
    last_unit = max(unit["unit"] for unit in talk.units if unit["replica"] == killed)
    before = decode_conversation(at_kill.state)
    seen = 1 if before.seq < frames else 0
    return Kill(
        len(talk.resumes),
        same_window=window_is_the_same(
            facts, before, seen, [entry.record for entry in end.entries]
        ),
        new_epoch=epoch_begins_anew(talk.replies, last_unit),
    )


async def _ready(sidecar: LocalSidecar, wait: Callable[..., object], *arguments: object) -> None:
    """`wait` in a thread, which ends with the sidecar when nobody waits any more."""
    try:
        await asyncio.to_thread(wait, *arguments)
    except asyncio.CancelledError:
        sidecar.ask_to_stop()
        raise


async def _watch(
    stage: _Stage,
    session: str,
    events: "asyncio.Queue[dict[str, Any]]",
    table: LiveTable,
    kill_at: int,
    first: LocalSidecar,
) -> None:
    while True:
        event = await events.get()
        _show(event, table)
        if event["type"] == "duplex.unit" and kill_at and event["unit"] == kill_at:
            await _kill_and_replace(stage, session, table, first)


async def _kill_and_replace(
    stage: _Stage, session: str, table: LiveTable, first: LocalSidecar
) -> None:
    began = time.monotonic()
    processes = len(first.tree())
    await asyncio.to_thread(first.kill_tree)
    stage.at_kill = await stage.load(session)
    table.note(f"killed {processes} processes of sidecar-1 (SIGKILL); starting sidecar-2")
    second = stage.new_sidecar("sidecar-2")
    # The address stays the same for the client, as a service's would.
    second.settings = structs.replace(second.settings, port=first.settings.port)
    second.start()
    await _ready(second, second.wait_ready, table.status)
    second.declare_dead(first.settings.replica)
    table.note(f"sidecar-2 ready {time.monotonic() - began:.0f} s after the kill")


def _show(event: dict[str, Any], table: LiveTable) -> None:
    match event["type"]:
        case "duplex.unit":
            table.unit(event)
        case "session.resumed":
            facts = event["duplex"]
            table.note(
                f"resumed: next unit {facts['next_unit']}, input durable up to sample "
                f"{facts['acknowledged_sample']}, last event {facts['last_sequence']}"
            )
        case "error":
            table.note(f"error {event['error']['code']}: {event['error']['message']}")
        case _:
            pass


def write_wave(path: Path, pcm_s16le: bytes) -> None:
    """24 kHz mono. Raises OutputFailed."""
    with written(path) as new, wave.open(str(new), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(OUTPUT_RATE_HZ)
        file.writeframes(pcm_s16le)


def summary(console: Console, out: Path, talk: Talk, kill: Kill | None, seconds: float) -> int:
    """The closing lines. Returns the exit status: 1 where something claimed does not hold."""
    numbers = [unit["unit"] for unit in talk.units]
    contiguous = numbers == list(range(1, len(numbers) + 1))
    spoken = sum(unit["decision"] == "speak" for unit in talk.units)
    walls = sorted(unit["wall_ms"] for unit in talk.units)
    rebuilds = [unit for unit in talk.units if unit["rebuild_cause"]]
    epochs = sorted({unit["epoch"] for unit in talk.units if unit["stage2_sequence"] is not None})
    audio_s = sum(unit["audio_samples"] for unit in talk.units) / OUTPUT_RATE_HZ
    replicas = sorted({unit["replica"] for unit in talk.units})
    ok, told = contiguous, ""
    if kill is not None:
        ok &= kill.resumed >= 1 and len(replicas) == 2 and kill.same_window and kill.new_epoch
        told = (
            f"resumed {kill.resumed}x on {' -> '.join(replicas)}, away {talk.away_s():.0f} s, "
            f"same window={kill.same_window}, new epoch from chunk 0={kill.new_epoch}, "
        )
    console.print(
        f"\n{'OK' if ok else 'FAILED'}: {len(numbers)} units contiguous={contiguous}, "
        f"{spoken} spoken in {len(talk.transcript)} turns ({audio_s:.1f} s of audio), "
        f"{len(rebuilds)} rebuilds, {len(epochs)} epochs, p50 {walls[len(walls) // 2]:.0f} ms "
        f"a unit, {told}{seconds:.0f} s in all",
        style="bold",
        highlight=False,
        markup=False,
    )
    console.print(
        f"  listen     {out / 'reply.wav'}\n"
        f"  look       {out / 'timeline.png'}\n"
        f"  rebuilds   grep -c '{REBUILD_IN_LEDGER}' {out / 'ledger.jsonl'}\n"
        f"  ledger     head -n 3 {out / 'ledger.jsonl'}\n"
        f"  causes     grep -o '{CAUSE_IN_SPANS}' {out / 'spans.jsonl'} | sort | uniq -c\n"
        "  go on      .venv/bin/duplex run -f examples/session.yaml --audio FILE\n"
        "  check up   .venv/bin/duplex doctor",
        highlight=False,
        markup=False,
    )
    return 0 if ok else 1
