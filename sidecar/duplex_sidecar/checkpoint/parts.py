"""What every checkpoint that we make has beside its safetensors file(s): config, tokenizer, flow
decoder, vocoder, reference front end and one voice."""

from pathlib import Path

from duplex_sidecar.checkpoint.config import CheckpointConfig, write_config
from duplex_sidecar.checkpoint.folder import write_state_dict
from duplex_sidecar.checkpoint.layout import FLOW_NAME, HIFT_NAME, TOKENIZER_NAME
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.checkpoint.voice import DEFAULT_VOICE, Voice, save_voice, seeded_voice
from duplex_sidecar.checkpoint.voice_format import MAX_PROMPT_CODES
from duplex_sidecar.checkpoint.weights_front_end import write_front_end
from duplex_sidecar.checkpoint.weights_token2wav import flow_tensor, hift_tensor


def write_parts(folder: Path, config: CheckpointConfig, tokenizer_data: bytes, seed: int) -> Voice:
    """Write them; returns the voice. Raises OSError."""
    write_config(config, folder)
    (folder / TOKENIZER_NAME).write_bytes(tokenizer_data)
    flow = {
        key: flow_tensor(key, shape, seed) for key, shape in flow_shapes(config.token2wav).items()
    }
    write_state_dict(folder / FLOW_NAME, flow)
    hift = {
        key: hift_tensor(key, shape, seed) for key, shape in hift_shapes(config.token2wav).items()
    }
    write_state_dict(folder / HIFT_NAME, hift)
    write_front_end(folder, config.token2wav, seed)
    voice = seeded_voice(DEFAULT_VOICE, MAX_PROMPT_CODES, seed, config.token2wav)
    save_voice(folder, voice)
    return voice
