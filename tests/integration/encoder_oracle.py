"""The public modules on given weights, run in a process of their own (they start global state).

    python encoder_oracle.py WEIGHTS INPUTS OUTPUTS        (safetensors files)

INPUTS holds `pixels.N` [3, height, width] and `pcm` int16 [16,560 + 16,000 * n], n < 29. OUTPUTS
gets `rows.N` [64, hidden] of each image block, made by vLLM's SigLIP and resampler, and `audio`
[10 * (n + 1), hidden], made by transformers' feature extractor and Whisper encoder over the whole
clip at once with a one-second block mask.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import SiglipVisionConfig, WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.idefics2_vision_model import Idefics2VisionTransformer
from vllm.model_executor.models.minicpmv import Resampler4_5

from duplex_sidecar.checkpoint.presets import tiny_config

CONFIG = tiny_config()


def below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def finished(module: nn.Module) -> nn.Module:
    """What vLLM's model loader does last: its linear layers cannot be called on a CPU before."""
    for part in module.modules():
        method = getattr(part, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(part)
    return module.eval()


def vision_rows(weights: dict[str, Tensor], pictures: list[Tensor]) -> list[Tensor]:
    """Padded to the largest picture and masked, as the public model does it."""
    vision = CONFIG.vision
    config = SiglipVisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_hidden_layers=vision.num_hidden_layers,
        num_attention_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
    )
    hidden_size = CONFIG.thinker.hidden_size
    tower = Idefics2VisionTransformer(config, apply_encoder_attention_mask=True)
    tower.load_weights(below(weights, "vpm.").items())
    resampler = Resampler4_5(
        num_queries=CONFIG.query_num,
        embed_dim=hidden_size,
        num_heads=hidden_size // 128,
        kv_dim=vision.hidden_size,
    )
    resampler.load_state_dict(below(weights, "resampler."), strict=True)
    finished(tower)
    finished(resampler)

    side = vision.patch_size
    sizes = torch.tensor([[p.shape[1] // side, p.shape[2] // side] for p in pictures])
    counts = sizes.prod(-1)
    packed = torch.zeros(len(pictures), 3, side, side * int(counts.max()))
    mask = torch.zeros(len(pictures), 1, int(counts.max()), dtype=torch.bool)
    for index, picture in enumerate(pictures):
        patches = picture.unfold(1, side, side).unfold(2, side, side)
        strip = patches.permute(0, 3, 1, 2, 4).reshape(3, side, -1)
        packed[index, :, :, : strip.shape[-1]] = strip
        mask[index, :, : counts[index]] = True
    seen = tower(packed, patch_attention_mask=mask, tgt_sizes=sizes)
    return list(resampler(seen, sizes))


def audio_rows(weights: dict[str, Tensor], pcm: Tensor) -> Tensor:
    audio = CONFIG.audio
    config = WhisperConfig(
        d_model=audio.d_model,
        encoder_layers=audio.encoder_layers,
        encoder_attention_heads=audio.encoder_attention_heads,
        encoder_ffn_dim=audio.encoder_ffn_dim,
        num_mel_bins=audio.num_mel_bins,
        max_source_positions=audio.max_source_positions,
        attn_implementation="eager",
    )
    encoder = WhisperEncoder(config).eval()
    encoder.load_state_dict(below(weights, "apm."), strict=True)
    extractor = WhisperFeatureExtractor(feature_size=audio.num_mel_bins)
    features = extractor(
        pcm.numpy() / 32768.0, sampling_rate=16_000, return_tensors="pt", padding=False
    )["input_features"]

    frames = torch.nn.functional.gelu(encoder.conv1(features))
    frames = torch.nn.functional.gelu(encoder.conv2(frames)).transpose(1, 2)
    seconds = frames.shape[1] // 50
    frames = frames[:, : 50 * seconds] + encoder.embed_positions.weight[: 50 * seconds]
    block = torch.arange(50 * seconds) // 50
    mask = torch.zeros(1, 1, 50 * seconds, 50 * seconds)
    mask[0, 0][block[:, None] < block[None, :]] = float("-inf")
    for layer in encoder.layers:
        frames = layer(frames, mask)
    projector = nn.Sequential(
        nn.Linear(audio.d_model, CONFIG.thinker.hidden_size),
        nn.ReLU(),
        nn.Linear(CONFIG.thinker.hidden_size, CONFIG.thinker.hidden_size),
    )
    names = {"linear1.weight": "0.weight", "linear1.bias": "0.bias"}
    names |= {"linear2.weight": "2.weight", "linear2.bias": "2.bias"}
    projection = below(weights, "audio_projection_layer.")
    projector.load_state_dict({names[name]: tensor for name, tensor in projection.items()})
    rows = projector(encoder.layer_norm(frames)).transpose(1, 2)
    return torch.nn.functional.avg_pool1d(rows, 5, stride=5)[0].T


def main(weights_path: str, inputs_path: str, outputs_path: str) -> None:
    torch.set_num_threads(1)
    weights, inputs = load_file(weights_path), load_file(inputs_path)
    pictures = [inputs[name] for name in sorted(inputs) if name.startswith("pixels.")]
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))),
        torch.inference_mode(),
    ):
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'group'}", 0, "gloo")
        initialize_model_parallel(1, 1)
        outputs = {f"rows.{i}": rows for i, rows in enumerate(vision_rows(weights, pictures))}
        outputs["audio"] = audio_rows(weights, inputs["pcm"])
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, outputs_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
