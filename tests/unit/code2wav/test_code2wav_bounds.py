"""A stream's memory is bounded however long the turn is."""

import pytest

from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.stream import Chunk

pytestmark = pytest.mark.unit


def test_caches_stop_growing(formula, voice_a: Voice) -> None:
    """Attention: prompt + 100 frames. Conformer: prompt + what the settings say."""
    vocoder = formula.vocoder(conformer_keep_frames=224)
    state = vocoder.start(voice_a)
    for _ in range(8):
        ((sound, state),) = vocoder.advance([state], [Chunk((5,) * 28, False, "turn")])
        assert sound.isfinite().all()
    assert state.flow.estimator.keys.shape[4] == 24 + 100
    assert state.flow.encoder.low[0].shape[2] == 12 + 112
    assert state.flow.encoder.high[0].shape[2] == 24 + 224
