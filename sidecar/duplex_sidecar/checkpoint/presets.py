"""The two checkpoints that we can make: tiny (tests, demo) and the real shapes (benches).

Both have every part and the public names; only sizes and numbers differ. Torch-free.
"""

from enum import StrEnum

from duplex_sidecar.checkpoint.config import (
    AudioConfig,
    CheckpointConfig,
    TalkerConfig,
    ThinkerConfig,
    Token2WavConfig,
    VisionConfig,
)
from duplex_sidecar.checkpoint.tokenizer import AUDIO_BOS, SPECIAL_TOKENS, TEXT_EOS


class Shape(StrEnum):
    TINY = "tiny"
    FULL = "8b"


TINY_VOCAB_SIZE = 1024
FULL_VOCAB_SIZE = 151_748
FULL_LAYERS = 36

_KNOWN_IDS = {
    "<|endoftext|>": 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    AUDIO_BOS: 151_687,
    TEXT_EOS: 151_692,
    "<|tts_bos|>": 151_703,
    "<|tts_eos|>": 151_704,
}
"""Where the public checkpoint has them (contract sections A and D)."""


def full_special_ids() -> tuple[int, ...]:
    """Ids of `SPECIAL_TOKENS` in the real shapes; the others stand from 151,646 on."""
    free = iter(range(151_646, FULL_VOCAB_SIZE))
    taken = set(_KNOWN_IDS.values())
    return tuple(
        _KNOWN_IDS.get(token) or next(id_ for id_ in free if id_ not in taken)
        for token in SPECIAL_TOKENS
    )


def tiny_config() -> CheckpointConfig:
    """Milliseconds a unit on one core; position tables and the codec keep their real sizes."""
    first_special = TINY_VOCAB_SIZE - len(SPECIAL_TOKENS)
    return CheckpointConfig(
        element_type="float32",
        thinker=ThinkerConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=TINY_VOCAB_SIZE,
            max_position_embeddings=8192,
            rope_theta=1_000_000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
        audio=AudioConfig(
            d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=256
        ),
        audio_pool_step=5,
        vision=VisionConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=14,
            image_size=980,
        ),
        drop_vision_last_layer=False,
        tile_pixels=448,
        query_num=64,
        max_slice_nums=9,
        talker=TalkerConfig(
            llm_dim=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_text_tokens=TINY_VOCAB_SIZE,
            audio_bos_token_id=first_special + SPECIAL_TOKENS.index(AUDIO_BOS),
            text_eos_token_id=first_special + SPECIAL_TOKENS.index(TEXT_EOS),
        ),
        token2wav=Token2WavConfig(
            conformer_size=64,
            conformer_ffn_size=128,
            conformer_layers=2,
            conformer_up_layers=1,
            conformer_head_dim=32,
            estimator_size=64,
            estimator_ffn_size=128,
            estimator_head_dim=32,
            estimator_blocks=2,
            vocoder_size=64,
            f0_size=64,
        ),
    )


def full_config(thinker_layers: int = FULL_LAYERS) -> CheckpointConfig:
    """The real shapes (contract section H). Fewer layers: the same code path in less space."""
    return CheckpointConfig(
        element_type="bfloat16",
        thinker=ThinkerConfig(
            hidden_size=4096,
            intermediate_size=12_288,
            num_hidden_layers=thinker_layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=FULL_VOCAB_SIZE,
            max_position_embeddings=40_960,
            rope_theta=1_000_000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
        audio=AudioConfig(
            d_model=1024, encoder_layers=24, encoder_attention_heads=16, encoder_ffn_dim=4096
        ),
        audio_pool_step=5,
        vision=VisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            patch_size=14,
            image_size=980,
        ),
        drop_vision_last_layer=True,
        tile_pixels=448,
        query_num=64,
        max_slice_nums=9,
        talker=TalkerConfig(llm_dim=4096),
        token2wav=Token2WavConfig(),
    )
