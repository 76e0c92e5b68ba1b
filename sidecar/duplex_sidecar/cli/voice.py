"""`duplex voice`: make a voice file of a recording, or look at one."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from duplex_api.given_voices import GIVEN_VOICE_PREFIX, is_given
from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.checkpoint.voice_format import (
    CODE_RATE_HZ,
    REFERENCE_RATE_HZ,
    VOICE_NAME,
    VOICE_SUFFIX,
)
from duplex_sidecar.cli.inputs import CheckpointPath, Duration, InputFile, OutputPath
from duplex_sidecar.cli.places import default_checkpoint
from duplex_sidecar.voices.errors import VoiceError

app = App(name="voice", help="Make a voice file of a recording, or look at one.")

EXIT_REFUSED = 1
EXIT_FAILED = 2


@app.command
def make(
    clip: InputFile,
    *,
    checkpoint: CheckpointPath | None = None,
    output: Annotated[OutputPath, Parameter(name=["--output", "-o"])],
    start_s: Duration = 0.0,
    length_s: Duration | None = None,
) -> int:
    """Make a voice file of somebody's speech, for one checkpoint; the same clip, the same file.

    The file's name is the voice's: put it into the checkpoint's folder `voices`, or into that of a
    pool or of `voices_dir`, and name it in `spec.voice.name`. The exit status is 1 for a clip that
    is no voice, 2 when the checkpoint cannot make one or the file cannot be written.

    Parameters
    ----------
    clip
        Any audio file of 1 to 30 s: the voice is of its first 6 s, the model hears all of it.
    checkpoint
        Checkpoint folder with the reference front end in `assets/token2wav`. Default: the tiny one.
    output
        NAME.safetensors, where NAME is of lower-case letters, digits and hyphens.
    start_s
        Where in the file the clip begins.
    length_s
        How long it is. Default: to the end of the file.
    """
    console = Console()
    is_name = VOICE_NAME.fullmatch(output.stem) and not is_given(output.stem)
    if output.suffix != VOICE_SUFFIX or not is_name:
        expected = (
            f"NAME{VOICE_SUFFIX}, NAME of lower-case letters, digits and hyphens, and not"
            f" beginning with {GIVEN_VOICE_PREFIX}"
        )
        console.print(f"{output} is no voice's file: it must be {expected}", style="red")
        return EXIT_FAILED
    folder = default_checkpoint() if checkpoint is None else checkpoint
    try:
        return _make(console, clip, folder, output, start_s, length_s)
    except VoiceError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return EXIT_REFUSED if error.fault.startswith("clip_") else EXIT_FAILED
    except CheckpointError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
    except OSError as error:
        console.print(
            f"{output}: {error.strerror or error}", style="red", markup=False, soft_wrap=True
        )
    return EXIT_FAILED


@app.command
def show(file: InputFile, *, checkpoint: CheckpointPath | None = None) -> int:
    """Print what a voice file holds; nothing of its sound. The exit status is 2 for a file that is
    none, or that does not fit the checkpoint.

    Parameters
    ----------
    file
        NAME.safetensors.
    checkpoint
        Checkpoint folder that it is to fit. Default: the tiny one.
    """
    console = Console()
    folder = default_checkpoint() if checkpoint is None else checkpoint
    try:
        _print(console, folder, file)
    except CheckpointError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return EXIT_FAILED
    return 0


def _make(
    console: Console,
    clip: Path,
    folder: Path,
    output: Path,
    start_s: float,
    length_s: float | None,
) -> int:
    # Imported late: FFmpeg is of no use to --help.
    from duplex_sidecar.checkpoint.voice import write_voice
    from duplex_sidecar.checkpoint.voice_origin import origin_of
    from duplex_sidecar.voices.clip import read_clip
    from duplex_sidecar.voices.making import make_voice

    config = read_config(folder).token2wav
    heard = read_clip(clip, start_s, length_s)
    with console.status("making the voice"):
        voice = make_voice(output.stem, heard, folder, config)
        write_voice(output, voice, origin_of(folder))
    _print(console, folder, output)
    return 0


def _print(console: Console, folder: Path, file: Path) -> None:
    from duplex_sidecar.checkpoint.voice import read_voice
    from duplex_sidecar.checkpoint.voice_origin import read_origin

    voice = read_voice(file, file.stem, folder, read_config(folder).token2wav)
    origin = read_origin(file)
    codes, samples = len(voice.prompt_codes), len(voice.reference_16khz)
    lines = (
        f"{file}: voice {voice.name!r}",
        f"  {codes} prompt codes ({codes / CODE_RATE_HZ:g} s),"
        f" a clip of {samples / REFERENCE_RATE_HZ:.2f} s",
        f"  for checkpoint {origin.checkpoint}, made by front end {origin.front_end}"
        if origin
        else "  does not say which checkpoint it is for",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
