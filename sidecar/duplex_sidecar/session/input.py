"""A client's input until it is a unit: its format, its position, what is refused by name."""

from collections.abc import Generator
from contextlib import contextmanager

from duplex_sidecar.framing.append import Append
from duplex_sidecar.framing.errors import FramingError
from duplex_sidecar.framing.frames import read_frame
from duplex_sidecar.framing.pcm import AudioFormat, decode_audio, require_rate, sample_bytes
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.protocol.commands import AppendInput, SetInputFormat
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import InputFormatSet
from duplex_sidecar.session.framing_errors import framing_code

DEFAULT_INPUT_RATE_HZ = 24_000


class InputDesk:
    """What of a session's input has come in and is not taken yet. Everything that it refuses it
    raises as ClientError, and then nothing has changed."""

    def __init__(self, framer: UnitFramer, rate_hz: int, frames_per_unit: int) -> None:
        """rate_hz: of the input so far, 0 before the first. frames_per_unit: 0 refuses frames."""
        self._framer = framer
        self._format = AudioFormat.PCM16
        self._frames_per_unit = frames_per_unit
        self.rate_hz = rate_hz or DEFAULT_INPUT_RATE_HZ
        self._may_commit = framer.received_samples > 0
        """Whether audio came since the last commit. What came over an earlier connection, or to an
        earlier owner, counts: who resumes may say a commit again whose answer was lost."""

    @property
    def received_samples(self) -> int:
        """Client samples that are here or durable: a client goes on behind them."""
        return self._framer.received_samples

    @property
    def sample_bytes(self) -> int:
        """Of one sample in the client's present format."""
        return sample_bytes(self._format)

    @property
    def missing_bytes(self) -> int:
        """Audio in that format that the next unit lacks."""
        return self._framer.missing_samples * self.sample_bytes

    @property
    def has_unit(self) -> bool:
        return self._framer.ready_units > 0

    def new_client(self) -> None:
        """Another connection, which has said no format yet; the rate stays that of the first input
        if there was any."""
        self._format = AudioFormat.PCM16
        self._may_commit = self._framer.received_samples > 0
        if not self._framer.received_samples:
            self.rate_hz = DEFAULT_INPUT_RATE_HZ

    def take(self) -> Append | None:
        """The oldest closed unit; None when there is none."""
        return self._framer.take()

    def without_frames(self, append: Append) -> Append:
        """The same append with its sound alone."""
        return self._framer.without_frames(append)

    def append(self, command: AppendInput) -> None:
        if len(command.frames) > self._frames_per_unit:
            raise ClientError(
                ErrorCode.TOO_MANY_FRAMES,
                f"this session takes {self._frames_per_unit} frames a second",
                "video_frames",
            )
        with _typed():
            self._append(command)

    def _append(self, command: AppendInput) -> None:
        samples = decode_audio(command.audio, self._format)
        frames = tuple(read_frame(frame) for frame in command.frames)
        if command.from_sample is not None:
            held = self._framer.received_samples
            if command.from_sample > held:
                raise ClientError(
                    ErrorCode.OUT_OF_ORDER_EVENT,
                    f"samples {held} to {command.from_sample} are missing",
                    "from_sample",
                )
            if command.from_sample < held:
                # Sent again after a reconnect. Frames belong to the first sample, which was here
                # before, and so were they.
                samples, frames = samples[held - command.from_sample :], ()
        self._framer.push(
            samples,
            self.rate_hz,
            frames,
            is_speech=command.is_speech,
            force_listen=command.force_listen,
        )
        # Also of what closed its unit by itself, or is held already: a commit of it is answered.
        self._may_commit = self._may_commit or bool(command.audio)

    def commit(self) -> None:
        """Close the waiting samples into units, the last one padded with zeros."""
        if not self._may_commit:
            raise ClientError(ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY)
        self._framer.flush()
        self._may_commit = False

    def clear(self) -> None:
        """Forget what waits."""
        self._framer.clear()
        self._may_commit = False

    def set_format(self, command: SetInputFormat) -> InputFormatSet:
        """The encoding may change at any time, the rate before the first input alone."""
        if command.rate_hz != self.rate_hz and self._framer.received_samples:
            raise ClientError(
                ErrorCode.IMMUTABLE_SETTING,
                "the sample rate is fixed by the first input",
                "session.audio.input.format.rate",
            )
        with _typed():
            require_rate(command.rate_hz)
        self._format = AudioFormat(command.encoding.value)
        self.rate_hz = command.rate_hz
        return InputFormatSet(command.encoding, self.rate_hz)


@contextmanager
def _typed() -> Generator[None]:
    """Framing's refusals in the words of the protocol."""
    try:
        yield
    except FramingError as error:
        raise ClientError(framing_code(error.code), error.reason) from error
