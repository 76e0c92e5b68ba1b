"""A simple energy detector of speech (contract section F, barge-in): pure, in client samples.

It works on whole blocks of 20 ms counted from the start of the stream, so how the client slices its
audio never changes what is heard.
"""

from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from duplex_sidecar.framing.pcm import Samples

BLOCK_MS: Final = 20


class VadPolicy(msgspec.Struct, frozen=True):
    """rms_threshold: a block of at least this root mean square is voiced. Speech starts after
    min_speech_ms of voiced blocks, reported prefix_ms earlier, and stops after silence_ms without
    one."""

    rms_threshold: float = 0.003
    min_speech_ms: int = 96
    prefix_ms: int = 300
    silence_ms: int = 500


class VadState(msgspec.Struct, frozen=True):
    """position_samples: samples seen in whole blocks. rest: the samples after them, f32le.

    run_blocks: length of the present run of voiced blocks (while quiet), or of unvoiced ones (while
    speaking). speech_end_samples: end of the last voiced block of speech so far, 0 for none.
    """

    position_samples: int = 0
    rest: bytes = b""
    speaking: bool = False
    run_blocks: int = 0
    speech_end_samples: int = 0


class VadEventKind(StrEnum):
    STARTED = "speech_started"
    STOPPED = "speech_stopped"


class VadEvent(msgspec.Struct, frozen=True):
    """at_samples: client samples from the start to where speech began (with prefix) or ended."""

    kind: VadEventKind
    at_samples: int


def advance_vad(
    state: VadState, policy: VadPolicy, samples: Samples, rate_hz: int
) -> tuple[VadState, tuple[VadEvent, ...]]:
    """The state after `samples` more, and what began or ended in them."""
    block = rate_hz * BLOCK_MS // 1000
    if state.rest:
        samples = np.concatenate((np.frombuffer(state.rest, "<f4"), samples))
    blocks = len(samples) // block
    whole, rest = samples[: blocks * block], samples[blocks * block :]
    energy = np.add.reduce(np.square(whole, dtype=np.float64).reshape(blocks, block), axis=1)
    threshold = policy.rms_threshold * policy.rms_threshold * block
    events: list[VadEvent] = []
    loud: list[bool] = (energy >= threshold).tolist()
    if loud.count(state.speaking) == blocks:
        state = _went_on(state, blocks * block)
    else:
        for one in loud:
            state = _step(state, policy, one, block, events)
    return _with_rest(state, rest), tuple(events)


def spoke_since(state: VadState, from_samples: int) -> bool:
    """Whether speech was heard after `from_samples`."""
    return state.speech_end_samples > from_samples


def _went_on(state: VadState, samples: int) -> VadState:
    """So many samples further, all in whole blocks that say what was so already."""
    position = state.position_samples + samples
    speech_end = position if state.speaking and samples else state.speech_end_samples
    run = 0 if samples else state.run_blocks
    return VadState(position, b"", state.speaking, run, speech_end)


def _step(
    state: VadState,
    policy: VadPolicy,
    loud: bool,
    block: int,
    events: list[VadEvent],
) -> VadState:
    """One block further."""
    position = state.position_samples + block
    # A run counts blocks that speak against the present state; any other block ends it.
    run = state.run_blocks + 1 if loud is not state.speaking else 0
    speaking, speech_end = state.speaking, state.speech_end_samples
    if not speaking and run >= _blocks(policy.min_speech_ms):
        prefix = block * policy.prefix_ms // BLOCK_MS
        start = max(position - run * block - prefix, speech_end)
        events.append(VadEvent(VadEventKind.STARTED, start))
        speaking, run = True, 0
    elif speaking and run >= _blocks(policy.silence_ms):
        events.append(VadEvent(VadEventKind.STOPPED, speech_end))
        speaking, run = False, 0
    if speaking and loud:
        speech_end = position
    return VadState(position, b"", speaking, run, speech_end)


def _blocks(length_ms: int) -> int:
    """Whole blocks, at least one, that last `length_ms`."""
    return max(1, -(-length_ms // BLOCK_MS))


def _with_rest(state: VadState, rest: Samples) -> VadState:
    return msgspec.structs.replace(state, rest=rest.astype("<f4").tobytes())
