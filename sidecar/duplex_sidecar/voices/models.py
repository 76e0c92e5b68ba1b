"""The two models of the reference front end, run by onnxruntime on one thread of a CPU."""

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.layout_front_end import (
    FRONT_END_NAMES,
    SPEAKER_MODEL_NAME,
    TOKENIZER_MODEL_NAME,
    check_front_end,
)
from duplex_sidecar.voices.errors import VoiceError, VoiceFault
from duplex_sidecar.voices.features import Floats

TOKENIZER_FRAMES_PER_CODE = 4
"""Of its 100 a second."""
_ERRORS_ONLY = 3


class FrontEnd:
    """Both models of a checkpoint, loaded."""

    def __init__(self, folder: Path, config: Token2WavConfig) -> None:
        """Raises VoiceError (no_front_end, no_runtime, front_end_failed) and CheckpointError
        (unreadable, shape_mismatch)."""
        for name in FRONT_END_NAMES:
            if not (folder / name).is_file():
                reason = f"{name} is not there: this checkpoint can use voices, not make them"
                raise VoiceError(VoiceFault.NO_FRONT_END, str(folder), reason)
            check_front_end(folder, name, config)
        self._config = config
        self._tokenizer = _Model(folder, TOKENIZER_MODEL_NAME)
        self._speaker = _Model(folder, SPEAKER_MODEL_NAME)

    def codes(self, mel: Floats) -> NDArray[np.int64]:
        """Codes [P] of a log mel [128, 4P]. Raises VoiceError (front_end_failed)."""
        frames = mel.shape[1]
        length = np.array([frames], self._tokenizer.input_type(1))
        codes = self._tokenizer.run(mel[None], length).reshape(-1).astype(np.int64)
        expected = -(-frames // TOKENIZER_FRAMES_PER_CODE)
        if len(codes) != expected:
            raise self._tokenizer.failed(f"{len(codes)} codes for {frames} frames, not {expected}")
        if codes.min() < 0 or codes.max() >= self._config.codebook_size:
            raise self._tokenizer.failed(f"codes outside 0..{self._config.codebook_size - 1}")
        return codes

    def speaker(self, mel: Floats) -> Floats:
        """The speaker vector [speaker size] of a filter bank [T, 80]. Raises VoiceError
        (front_end_failed)."""
        vector = self._speaker.run(mel[None]).reshape(-1).astype(np.float32)
        if vector.shape != (self._config.speaker_dim,) or not np.isfinite(vector).all():
            raise self._speaker.failed(f"no finite vector of {self._config.speaker_dim}")
        return vector


class _Model:
    def __init__(self, folder: Path, name: PurePosixPath) -> None:
        self._path = folder / name
        try:
            import onnxruntime
        except ImportError as error:
            reason = "onnxruntime is not installed; it comes with the extras cpu and cuda"
            raise VoiceError(VoiceFault.NO_RUNTIME, str(self._path), reason) from error
        runtime: Any = onnxruntime
        options = runtime.SessionOptions()
        # One thread: sums are then made in one order, and the same clip gives the same file.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        try:
            self._session: Any = runtime.InferenceSession(
                str(self._path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library has a dozen kinds, all below Exception
            raise self.failed(str(error)) from error
        self._inputs: list[Any] = self._session.get_inputs()

    def input_type(self, index: int) -> type[np.generic]:
        return np.int64 if self._inputs[index].type == "tensor(int64)" else np.int32

    def run(self, *values: NDArray[Any]) -> NDArray[Any]:
        """The first output. Raises VoiceError (front_end_failed)."""
        feed = {port.name: value for port, value in zip(self._inputs, values, strict=True)}
        try:
            return np.asarray(self._session.run(None, feed)[0])
        except Exception as error:  # as above
            raise self.failed(str(error)) from error

    def failed(self, reason: str) -> VoiceError:
        return VoiceError(VoiceFault.FRONT_END_FAILED, str(self._path), reason)
