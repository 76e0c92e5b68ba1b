"""The checkpoint's config.json as one frozen value.

The file has the public names of MiniCPM-o 4.5: the Thinker (Qwen3) at the top level, nested
`audio_config` (Whisper), `vision_config` (SigLIP) and `tts_config` (the Talker). What the public
file does not say (sizes of the flow decoder and the vocoder) may stand in `token2wav_config`;
absent means the real sizes. Torch-free: the sidecar process reads it.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1024 * 1024

ElementTypeName = Literal["float32", "bfloat16"]
Size = Annotated[int, msgspec.Meta(gt=0, le=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class ThinkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The language model (contract section H). Names are those of Qwen3."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Size
    max_position_embeddings: Size
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The streaming audio encoder. Names are those of Whisper."""

    d_model: Size
    encoder_layers: Size
    encoder_attention_heads: Size
    encoder_ffn_dim: Size
    num_mel_bins: Size = 80
    max_source_positions: Size = 1500

    @property
    def projector_size(self) -> int:
        """Width at the projector's input (contract H: "projector via ffn/4")."""
        return self.encoder_ffn_dim // 4


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The vision encoder. Names are those of SigLIP."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    patch_size: Size
    image_size: Size
    """Side of the position table in pixels: (image_size / patch_size)^2 positions."""


class TalkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The Talker: a Llama over codec codes (contract sections D and H)."""

    llm_dim: Size
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 20
    num_attention_heads: Size = 12
    num_key_value_heads: Size = 12
    max_position_embeddings: Size = 4096
    num_audio_tokens: Size = 6562
    num_text_tokens: Size = 152064
    num_vq: Literal[1] = 1
    audio_bos_token_id: TokenId = 151687
    text_eos_token_id: TokenId = 151692
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    @property
    def end_code(self) -> int:
        """The code that ends a unit (contract D): the last of the codec vocabulary."""
        return self.num_audio_tokens - 1


class Token2WavConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the flow decoder and the HiFT vocoder. Defaults are the real ones (contract H)."""

    codebook_size: Size = 6561
    conformer_size: Size = 512
    conformer_ffn_size: Size = 2048
    conformer_layers: Size = 6
    conformer_up_layers: Size = 4
    conformer_head_dim: Size = 64
    estimator_size: Size = 512
    estimator_ffn_size: Size = 2048
    estimator_head_dim: Size = 64
    estimator_blocks: Size = 16
    mel_bins: Size = 80
    speaker_dim: Size = 192
    vocoder_size: Size = 512
    f0_size: Size = 512


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the stages and the sidecar need to know about the shapes of a checkpoint."""

    element_type: ElementTypeName
    thinker: ThinkerConfig
    audio: AudioConfig
    audio_pool_step: int
    """Encoder frames (50 a second) averaged into one row: 5 gives 10 rows a second."""
    vision: VisionConfig
    drop_vision_last_layer: bool
    """The last vision layer is in the file but never run."""
    tile_pixels: int
    """Side of an image tile in pixels; a source frame of more than its square is sliced."""
    query_num: int
    """Rows per image block."""
    max_slice_nums: int
    talker: TalkerConfig
    token2wav: Token2WavConfig


class _SliceConfig(msgspec.Struct):
    max_slice_nums: Size = 9
    scale_resolution: Size = 448


class _File(msgspec.Struct, kw_only=True):
    """config.json as it stands; other fields are the public file's own business."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    vocab_size: Size
    max_position_embeddings: Size
    rms_norm_eps: float
    head_dim: Size | None = None
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    torch_dtype: ElementTypeName | None = None
    dtype: ElementTypeName | None = None
    audio_config: AudioConfig
    audio_pool_step: Size = 5
    vision_config: VisionConfig
    drop_vision_last_layer: bool = False
    query_num: Size = 64
    slice_config: _SliceConfig = msgspec.field(default_factory=_SliceConfig)
    tts_config: TalkerConfig
    token2wav_config: Token2WavConfig = msgspec.field(default_factory=Token2WavConfig)


def read_config(folder: Path) -> CheckpointConfig:
    """Parse FOLDER/config.json. Raises CheckpointError (missing, unreadable, invalid_config)."""
    path = folder / CONFIG_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(CheckpointFault.MISSING, str(path), "no such file") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(CheckpointFault.UNREADABLE, str(path), reason) from None
    return parse_config(data, str(path))


def parse_config(data: bytes, name: str = CONFIG_NAME) -> CheckpointConfig:
    """Parse and check the bytes of a config.json; `name` is for the error text."""
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid(name, f"longer than {MAX_CONFIG_BYTES} bytes")
    try:
        file = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise _invalid(name, str(error)) from None
    config = CheckpointConfig(
        element_type=file.torch_dtype or file.dtype or "bfloat16",
        thinker=ThinkerConfig(
            hidden_size=file.hidden_size,
            intermediate_size=file.intermediate_size,
            num_hidden_layers=file.num_hidden_layers,
            num_attention_heads=file.num_attention_heads,
            num_key_value_heads=file.num_key_value_heads,
            head_dim=file.head_dim or file.hidden_size // file.num_attention_heads,
            vocab_size=file.vocab_size,
            max_position_embeddings=file.max_position_embeddings,
            rope_theta=file.rope_theta,
            rms_norm_eps=file.rms_norm_eps,
            tie_word_embeddings=file.tie_word_embeddings,
        ),
        audio=file.audio_config,
        audio_pool_step=file.audio_pool_step,
        vision=file.vision_config,
        drop_vision_last_layer=file.drop_vision_last_layer,
        tile_pixels=file.slice_config.scale_resolution,
        query_num=file.query_num,
        max_slice_nums=file.slice_config.max_slice_nums,
        talker=file.tts_config,
        token2wav=file.token2wav_config,
    )
    if file.attention_bias:
        raise _invalid(name, "attention_bias must be false: the Thinker is a Qwen3")
    _check(config, name)
    return config


def _check(config: CheckpointConfig, name: str) -> None:
    """What a field alone cannot tell."""
    thinker, audio, vision, talker = config.thinker, config.audio, config.vision, config.talker
    token2wav = config.token2wav
    divisible = (
        ("num_attention_heads", thinker.num_attention_heads, thinker.num_key_value_heads),
        ("audio_config.d_model", audio.d_model, audio.encoder_attention_heads),
        ("vision_config.hidden_size", vision.hidden_size, vision.num_attention_heads),
        ("vision_config.image_size", vision.image_size, vision.patch_size),
        ("tts_config.hidden_size", talker.hidden_size, talker.num_attention_heads),
        ("tts_config.num_attention_heads", talker.num_attention_heads, talker.num_key_value_heads),
        (
            "token2wav_config.conformer_size",
            token2wav.conformer_size,
            token2wav.conformer_head_dim,
        ),
        (
            "token2wav_config.estimator_size",
            token2wav.estimator_size,
            token2wav.estimator_head_dim,
        ),
        ("token2wav_config.vocoder_size", token2wav.vocoder_size, 8),
    )
    for field, whole, part in divisible:
        if whole % part:
            raise _invalid(name, f"{field} = {whole} is not a multiple of {part}")
    if audio.projector_size != audio.d_model:
        raise _invalid(name, f"audio_config.encoder_ffn_dim must be 4 x {audio.d_model}")
    if talker.llm_dim != thinker.hidden_size:
        raise _invalid(name, f"tts_config.llm_dim = {talker.llm_dim}, not {thinker.hidden_size}")
    if talker.num_audio_tokens != token2wav.codebook_size + 1:
        raise _invalid(name, f"tts_config.num_audio_tokens must be {token2wav.codebook_size + 1}")
    for field, token in (
        ("audio_bos_token_id", talker.audio_bos_token_id),
        ("text_eos_token_id", talker.text_eos_token_id),
    ):
        if token >= talker.num_text_tokens:
            raise _invalid(name, f"tts_config.{field} = {token} is outside the text table")


def write_config(config: CheckpointConfig, folder: Path) -> None:
    """Write FOLDER/config.json in the public form; `read_config` gives `config` back."""
    document: dict[str, object] = {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "version": "4.5",
        "torch_dtype": config.element_type,
        "hidden_act": "silu",
        "attention_bias": False,
        **msgspec.to_builtins(config.thinker),
        "audio_config": {"model_type": "whisper", **msgspec.to_builtins(config.audio)},
        "audio_pool_step": config.audio_pool_step,
        "audio_chunk_length": 1.0,
        "vision_config": {
            "model_type": "siglip_vision_model",
            **msgspec.to_builtins(config.vision),
        },
        "drop_vision_last_layer": config.drop_vision_last_layer,
        "image_size": config.tile_pixels,
        "patch_size": config.vision.patch_size,
        "query_num": config.query_num,
        "slice_mode": True,
        "slice_config": {
            "model_type": "minicpmv",
            "patch_size": config.vision.patch_size,
            "max_slice_nums": config.max_slice_nums,
            "scale_resolution": config.tile_pixels,
        },
        "tts_config": {"model_type": "minicpmtts", **msgspec.to_builtins(config.talker)},
        "token2wav_config": msgspec.to_builtins(config.token2wav),
    }
    (folder / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n")


def _invalid(name: str, reason: str) -> CheckpointError:
    return CheckpointError(CheckpointFault.INVALID_CONFIG, name, reason)
