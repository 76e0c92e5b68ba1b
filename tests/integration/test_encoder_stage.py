"""The encoder as a process: over its socket, against the public modules, and when it dies."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from duplex_sidecar.checkpoint.config import write_config
from duplex_sidecar.checkpoint.layout import encoder_shape
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.voice import save_voice, seeded_voice
from duplex_sidecar.stages.encoder.audio import AudioEncoder, open_state
from duplex_sidecar.stages.encoder.client import EncoderClient
from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.encoder.images import frame_blocks
from duplex_sidecar.stages.encoder.vision import VisionEncoder
from duplex_sidecar.stages.encoder.weights import build, noise
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import (
    ElementType,
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    EncoderRows,
    Tensor,
    ThinkerClose,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.link import StageLink
from duplex_sidecar.stages.process_main import EXIT_FAILED

pytestmark = pytest.mark.integration

START_TIMEOUT_S = 180.0
LOG_NAME = "encoder.log"
FIRST_BYTES, CHUNK_BYTES = 33_120, 32_000
VOICE = seeded_voice("hum", 75, 1, tiny_config().token2wav)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return noise(encoder_shape(tiny_config()), torch.float32, torch.device("cpu"), seed=3)


@pytest.fixture(scope="module")
def checkpoint(weights, tmp_path_factory) -> Path:
    """Only what the encoder reads of one."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_config(tiny_config(), folder)
    save_file(weights, folder / "model.safetensors")
    save_voice(folder, VOICE)
    return folder


def noise_pcm(seconds: int, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    samples = random.standard_normal(16_560 + 16_000 * (seconds - 1)) * 3_000
    return samples.astype("<i2").tobytes()


def photo(width: int, height: int) -> bytes:
    random = np.random.default_rng(width)
    coarse = random.integers(0, 255, (9, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def rows_of(tensor: Tensor) -> torch.Tensor:
    values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    return torch.from_numpy(values.copy())


def write_settings(folder: Path, checkpoint: Path, **changes: object) -> Path:
    settings = EncoderSettings(
        checkpoint=str(checkpoint),
        device=Device.CPU,
        element_type=ElementType.FLOAT32,
        max_sessions=2,
    )
    path = folder / "encoder.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(settings, **changes)))
    return path


def start(folder: Path, config: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The process, with our end of its stdin, and the socket it will serve at."""
    socket = folder / "encoder.sock"
    command = [sys.executable, "-m", "duplex_sidecar.stages.encoder.process"]
    with (folder / LOG_NAME).open("ab") as log:
        process = subprocess.Popen(
            [*command, "--socket", str(socket), "--config", str(config)],
            stdin=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return process, socket


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


async def connect(link: StageLink, process: subprocess.Popen[bytes], socket: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return await link.attach(socket)
        except OSError:
            assert process.poll() is None, socket.with_name(LOG_NAME).read_text()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(
    folder: Path, checkpoint: Path, **changes: object
) -> AsyncIterator[tuple[StageLink, subprocess.Popen[bytes]]]:
    process, socket = start(folder, write_settings(folder, checkpoint, **changes))
    link = StageLink("encoder")
    try:
        await connect(link, process, socket)
        yield link, process
    finally:
        await link.detach()
        finish(process)


async def fault_of(client: EncoderClient, request: EncoderFeed) -> StageFault:
    with pytest.raises(StageError) as caught:
        await client.feed(request)
    return caught.value.fault


async def test_a_conversation_with_failures_over_the_socket(checkpoint, weights, tmp_path):
    """Rows as in this process, faults by kind, and a failed append that changes nothing."""
    modules = build(encoder_shape(tiny_config()), weights)
    shape = encoder_shape(tiny_config())
    audio = AudioEncoder(shape, modules.apm, modules.audio_projection_layer)
    vision = VisionEncoder(shape, modules.vpm, modules.resampler)
    pcm = noise_pcm(32, 1)
    frames = (photo(1280, 720), photo(640, 480))
    async with serving(tmp_path, checkpoint) as (link, _):
        client = EncoderClient(link)
        health = await client.health()
        assert health.stage == "encoder"
        assert health.limits["hidden_size"] == 256
        await client.open(EncoderOpen("s", 0))
        await client.open(EncoderOpen("t", 0))
        with pytest.raises(StageError, match="2 sessions"):
            await client.open(EncoderOpen("u", 0))
        assert (await client.health()).streams == ("s", "t")

        state, marks = open_state(0), []
        for unit in range(32):
            begin = 0 if unit == 0 else FIRST_BYTES + CHUNK_BYTES * (unit - 1)
            chunk = pcm[begin : FIRST_BYTES + CHUNK_BYTES * unit]
            if unit in (0, 1, 29):
                bad = EncoderFeed("s", unit, chunk, (b"no image",), True, False)
                assert await fault_of(client, bad) is StageFault.UNDECODABLE
                short = EncoderFeed("s", unit, chunk[:-2], (), True, False)
                assert await fault_of(client, short) is StageFault.REFUSED
            seen = frames if unit == 1 else ()
            answer = await client.feed(EncoderFeed("s", unit, chunk, seen, True, False))
            (step,) = audio.step([(state, chunk)])
            state = step.state
            assert answer.audio.shape == (10, 256)
            assert (rows_of(answer.audio) - step.rows).abs().max() <= 1e-5
            assert answer.encoder_reset is (unit == 29)
            assert answer.reset_mark_samples == (160_000 if unit >= 29 else 0)
            marks.append(answer.reset_mark_samples)
            if seen:
                expected = vision.encode(frame_blocks(seen))
                assert [block.shape for block in answer.vision] == [(64, 256)] * 4
                for block, rows in zip(answer.vision, expected, strict=True):
                    assert (rows_of(block) - rows).abs().max() <= 1e-4

        restored = await restore(client, "t", pcm, seconds=31, mark_samples=marks[30])
        again = await client.feed(EncoderFeed("t", 32, pcm[-CHUNK_BYTES:], (), True, False))
        assert restored.audio.shape == (0, 256)
        assert (rows_of(again.audio) - rows_of(answer.audio)).abs().max() <= 1e-5

        await client.close(EncoderClose("s"))
        assert await fault_of(client, EncoderFeed("s", 99, b"", (), True, False)) is (
            StageFault.UNKNOWN_STREAM
        )
        with pytest.raises(StageError, match="not for the encoder"):
            await link.call(ThinkerClose("x"), EncoderRows, 60.0)


async def test_sessions_that_share_passes_have_the_rows_of_single_ones(
    checkpoint, weights, tmp_path
):
    """Over the socket, of ages from 0 to 3 s, each with a frame; a fifth one's frame is none."""
    shape = encoder_shape(tiny_config())
    modules = build(shape, weights)
    audio = AudioEncoder(shape, modules.apm, modules.audio_projection_layer)
    vision = VisionEncoder(shape, modules.vpm, modules.resampler)
    sounds = {name: noise_pcm(6, seed) for seed, name in enumerate("abcd")}
    states = {name: open_state(0) for name in sounds}

    def second(name: str, unit: int) -> bytes:
        begin = 0 if unit == 0 else FIRST_BYTES + CHUNK_BYTES * (unit - 1)
        return sounds[name][begin : FIRST_BYTES + CHUNK_BYTES * unit]

    def alone(name: str, unit: int) -> torch.Tensor:
        (step,) = audio.step([(states[name], second(name, unit))])
        states[name] = step.state
        assert step.rows is not None
        return step.rows

    async with serving(tmp_path, checkpoint, max_sessions=5, max_batch=4) as (link, _):
        client = EncoderClient(link)
        assert (await client.health()).limits["max_batch"] == 4
        await client.open(EncoderOpen("bad", 0))
        for age, name in enumerate(sounds):
            await client.open(EncoderOpen(name, 0))
            for unit in range(age):
                await client.feed(EncoderFeed(name, unit, second(name, unit), (), True, False))
                alone(name, unit)
        bad = EncoderFeed("bad", 0, second("a", 0), (b"no image",), True, False)
        for step in range(3):
            frames = (photo(320 + 64 * step, 240),)
            units = {name: age + step for age, name in enumerate(sounds)}
            fault, *answers = await asyncio.gather(
                fault_of(client, bad),
                *(
                    client.feed(EncoderFeed(name, unit, second(name, unit), frames, True, False))
                    for name, unit in units.items()
                ),
            )
            assert fault is StageFault.UNDECODABLE
            (seen,) = vision.encode(frame_blocks(frames))
            for (name, unit), answer in zip(units.items(), answers, strict=True):
                assert (rows_of(answer.audio) - alone(name, unit)).abs().max() <= 1e-5
                assert (rows_of(answer.vision[0]) - seen).abs().max() <= 1e-4


async def test_a_voices_clip_is_encoded_by_its_name(checkpoint, weights, tmp_path):
    shape = encoder_shape(tiny_config())
    modules = build(shape, weights)
    audio = AudioEncoder(shape, modules.apm, modules.audio_projection_layer)
    async with serving(tmp_path, checkpoint) as (link, _):
        client = EncoderClient(link)
        rows = (await client.reference(EncoderReference("hum"))).rows
        assert rows.shape == (30, 256)
        assert (rows_of(rows) - audio.reference(VOICE.reference_16khz)).abs().max() <= 1e-5
        for unknown in ("nobody", "../voices/hum"):
            with pytest.raises(StageError) as caught:
                await client.reference(EncoderReference(unknown))
            assert caught.value.fault is StageFault.REFUSED
        assert (await client.health()).streams == ()


async def restore(
    client: EncoderClient, session: str, pcm: bytes, *, seconds: int, mark_samples: int
) -> EncoderRows:
    """Replay from a mark what was heard in the first `seconds` seconds."""
    await client.open(EncoderOpen(session, mark_samples))
    heard = pcm[2 * mark_samples : FIRST_BYTES + CHUNK_BYTES * (seconds - 1)]
    return await client.feed(EncoderFeed(session, seconds, heard, (), True, True))


async def test_dummy_weights_in_bfloat16_need_only_the_config(tmp_path):
    write_config(tiny_config(), tmp_path)
    changes = {"load_format": "dummy", "element_type": ElementType.BFLOAT16, "max_batch": 2}
    async with serving(tmp_path, tmp_path, **changes) as (link, _):
        client = EncoderClient(link)
        for session in ("s", "t"):
            await client.open(EncoderOpen(session, 0))
        answers = await asyncio.gather(
            *(
                client.feed(EncoderFeed(session, 0, noise_pcm(1, 2), (photo(60, 60),), True, False))
                for session in ("s", "t")
            )
        )
        for answer in answers:
            assert answer.audio.element_type is ElementType.BFLOAT16
            assert len(answer.audio.data) == 10 * 256 * 2
            assert answer.vision[0].shape == (64, 256)


async def test_a_killed_process_is_gone_and_the_next_one_restores(checkpoint, tmp_path):
    pcm = noise_pcm(4, 3)
    link = StageLink("encoder")
    client = EncoderClient(link)
    config = write_settings(tmp_path, checkpoint)
    process, socket = start(tmp_path, config)
    await connect(link, process, socket)
    await client.open(EncoderOpen("s", 0))
    await client.feed(EncoderFeed("s", 1, pcm[:-CHUNK_BYTES], (), True, False))
    last = await client.feed(EncoderFeed("s", 2, pcm[-CHUNK_BYTES:], (), True, False))
    generation = client.generation
    process.send_signal(signal.SIGKILL)
    finish(process)
    with pytest.raises(StageError) as caught:
        await client.feed(EncoderFeed("s", 3, bytes(CHUNK_BYTES), (), True, False))
    assert caught.value.fault is StageFault.GONE

    process, socket = start(tmp_path, config)
    try:
        await link.detach()
        socket.unlink()
        await connect(link, process, socket)
        assert client.generation > generation
        assert await fault_of(client, EncoderFeed("s", 3, bytes(CHUNK_BYTES), (), True, False)) is (
            StageFault.UNKNOWN_STREAM
        )
        await restore(client, "s", pcm, seconds=3, mark_samples=0)
        again = await client.feed(EncoderFeed("s", 4, pcm[-CHUNK_BYTES:], (), True, False))
        assert (rows_of(again.audio) - rows_of(last.audio)).abs().max() <= 1e-5
    finally:
        await link.detach()
        finish(process)


async def test_the_process_leaves_when_its_stdin_is_closed(checkpoint, tmp_path):
    async with serving(tmp_path, checkpoint) as (link, process):
        client = EncoderClient(link)
        await client.open(EncoderOpen("s", 0))
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 60) == 0


async def test_a_wrong_checkpoint_ends_the_start_with_all_its_faults(weights, tmp_path):
    write_config(tiny_config(), tmp_path)
    wrong = {name: tensor for name, tensor in weights.items() if name != "apm.conv1.bias"}
    wrong["resampler.proj"] = torch.zeros(256, 255)
    save_file(wrong, tmp_path / "model.safetensors")
    process, _ = start(tmp_path, write_settings(tmp_path, tmp_path))
    # Its stdin stays open: a stage whose sidecar has gone says nothing more.
    assert await asyncio.to_thread(process.wait, START_TIMEOUT_S) == EXIT_FAILED
    finish(process)
    errors = (tmp_path / LOG_NAME).read_text()
    assert "apm.conv1.bias missing" in errors
    assert "resampler.proj is (256, 255), expected (256, 256)" in errors


def test_rows_equal_those_of_the_public_modules(weights, tmp_path):
    """vLLM's SigLIP and resampler, transformers' Whisper encoder over the whole clip at once."""
    shape = encoder_shape(tiny_config())
    modules = build(shape, weights)
    random = np.random.default_rng(4)
    sizes = [(448, 448), (336, 602), (602, 336), (14, 1120), (490, 490)]
    pictures = [random.uniform(-1, 1, (3, *size)).astype(np.float32) for size in sizes]
    pcm = noise_pcm(29, 5)
    inputs = {f"pixels.{i}": torch.from_numpy(picture) for i, picture in enumerate(pictures)}
    inputs["pcm"] = torch.from_numpy(np.frombuffer(pcm, "<i2").copy())
    save_file(weights, tmp_path / "weights")
    save_file(inputs, tmp_path / "inputs")
    oracle = Path(__file__).with_name("encoder_oracle.py")
    files = [str(tmp_path / name) for name in ("weights", "inputs", "outputs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run([sys.executable, str(oracle), *files], check=True, timeout=240, env=environment)
    expected = load_file(tmp_path / "outputs")

    rows = VisionEncoder(shape, modules.vpm, modules.resampler).encode(pictures)
    for index, row in enumerate(rows):
        assert (row - expected[f"rows.{index}"]).abs().max() <= 1e-4
    audio = AudioEncoder(shape, modules.apm, modules.audio_projection_layer)
    state = open_state(0)
    for second in range(29):
        begin = 0 if second == 0 else FIRST_BYTES + CHUNK_BYTES * (second - 1)
        (step,) = audio.step([(state, pcm[begin : FIRST_BYTES + CHUNK_BYTES * second])])
        state = step.state
        assert step.rows is not None
        whole = expected["audio"][10 * second : 10 * (second + 1)]
        assert (step.rows - whole).abs().max() <= 1e-5
