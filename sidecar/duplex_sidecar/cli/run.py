"""`duplex run`: one conversation from a manifest and a recording, on a sidecar of its own."""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from duplex_api.manifest import ManifestError
from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.cli.demo import write_wave
from duplex_sidecar.cli.inputs import (
    CheckpointPath,
    Factor,
    InputFile,
    InputFolder,
    LedgerUrl,
    OutputPath,
    os_error_text,
)
from duplex_sidecar.cli.leaving import INTERRUPTED, leaves_in_order
from duplex_sidecar.cli.manifest_file import read_manifest
from duplex_sidecar.cli.output import OutputFailed, require_room
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.cli.run_checks import NotRunnable, require_ledger, require_servable
from duplex_sidecar.cli.starting import make_checkpoint, show_start
from duplex_sidecar.client.conversation import (
    OUTPUT_RATE_HZ,
    Conversation,
    ConversationFailed,
    lay_out_replies,
)
from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar, SidecarFailed
from duplex_sidecar.client.media import MediaError, read_frames, read_speech
from duplex_sidecar.client.table import LiveTable
from duplex_sidecar.ledger.embedded import EmbeddedError, EmbeddedValkey


def run(
    *,
    file: Annotated[InputFile, Parameter(name=["--file", "-f"])],
    audio: InputFile,
    video: InputFile | None = None,
    speed: Factor = 1.0,
    out: OutputPath = Path("reply.wav"),
    checkpoint: CheckpointPath | None = None,
    redis_url: LedgerUrl | None = None,
    contract_tape: OutputPath | None = None,
    voices_dir: InputFolder | None = None,
) -> int:
    """Open the session of a manifest on a sidecar of its own and stream a recording to it.

    Parameters
    ----------
    file
        DuplexSession manifest, for example examples/session.yaml.
    audio
        Recording: any audio file.
    video
        Clip whose first picture of each second is sent as a camera frame.
    speed
        How many times faster than real time the recording is sent.
    out
        Where the replies go (24 kHz WAV).
    checkpoint
        Checkpoint folder. Default: the tiny one, made if it is not there.
    redis_url
        Redis or Valkey. Default: an embedded one for this run.
    contract_tape
        Folder for a tape of the session, for `duplex contract record`. It holds content.
    voices_dir
        Folder of voice files (`duplex voice make`), looked into before the checkpoint's own.
    """
    console = Console()
    try:
        manifest = read_manifest(file)
        if redis_url is not None:
            require_ledger(redis_url)
        speech = read_speech(audio)
        frames = read_frames(video) if video else None
        # At most as long as the recording and one reply more.
        require_room(out.absolute().parent, 2 * OUTPUT_RATE_HZ * (len(speech) // 32_000 + 60))
        path = checkpoint or default_checkpoint()
        if checkpoint is None:
            make_checkpoint(console, path)
        places = {
            "checkpoint": str(path.absolute()),
            "cache_dir": str(default_cache_dir().absolute()),
            "contract_tape_dir": "" if contract_tape is None else str(contract_tape.absolute()),
            "voices_dir": "" if voices_dir is None else str(voices_dir.absolute()),
        }
        require_servable(manifest, places)
        with leaves_in_order():
            return _run(console, manifest, speech, frames, speed, out, redis_url, places)
    except KeyboardInterrupt:
        console.print("duplex run: interrupted; what it had started is stopped")
        return INTERRUPTED
    except ManifestError as error:
        console.print(f"{file} is not a valid DuplexSession:\n{error}", style="red", markup=False)
    except (CheckpointError, EmbeddedError, MediaError, OutputFailed, SidecarFailed) as error:
        console.print(str(error), style="red", markup=False)
    except (ApiError, ConversationFailed, NotRunnable) as error:
        console.print(str(error), style="red", markup=False)
    except OSError as error:
        console.print(os_error_text(error), style="red", markup=False)
    return 1


def _run(
    console: Console,
    manifest: str,
    speech: bytes,
    frames: list[bytes] | None,
    speed: float,
    out: Path,
    redis_url: str | None,
    places: Mapping[str, str],
) -> int:
    work = Path(tempfile.mkdtemp(prefix="duplex-run-"))
    valkey = EmbeddedValkey(work / "ledger") if redis_url is None else None
    sidecar: LocalSidecar | None = None
    try:
        if valkey is not None:
            valkey.start()
        sidecar = LocalSidecar.prepare(
            work / "sidecar", redis_url=redis_url or (valkey.url if valkey else ""), **places
        )
        sidecar.start()
        show_start(console, sidecar, "the sidecar")
        session, token = f"run-{secrets.token_hex(4)}", secrets.token_urlsafe(32)
        sidecar.open_session(session, manifest, token)
        with LiveTable(console) as table:
            talk = asyncio.run(
                Conversation(
                    sidecar.realtime_url,
                    session,
                    token,
                    speech,
                    frames,
                    speed=speed,
                    on_event=lambda event: (
                        table.unit(event) if event["type"] == "duplex.unit" else None
                    ),
                ).run()
            )
        write_wave(out, lay_out_replies(talk.replies))
        console.print(f"{len(talk.units)} units, replies in {out}", highlight=False)
        return 0
    finally:
        if sidecar is not None:
            sidecar.stop()
        if valkey is not None:
            valkey.stop()
        shutil.rmtree(work, ignore_errors=True)
