"""A turn whose vocoder is killed sounds as if nothing had happened: the product's speaker over the
real Code2Wav process."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from duplex_sidecar.checkpoint.config import write_config
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.voice import save_voice, seeded_voice
from duplex_sidecar.checkpoint.weights_token2wav import flow_tensor, hift_tensor
from duplex_sidecar.model.minicpmo45.talker import TALKER_SAMPLING
from duplex_sidecar.session.catching_up import FULL_CHUNKS
from duplex_sidecar.session.conversation import Speech, first_speech
from duplex_sidecar.session.speaking import Speaker, VoiceSettings
from duplex_sidecar.session.stages import StageSet, wait_ready
from duplex_sidecar.session.streams import talker_stream
from duplex_sidecar.session.watching import UnitWatch
from duplex_sidecar.stages.code2wav.client import Code2WavClient
from duplex_sidecar.stages.code2wav.config import Code2WavSettings
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import ThinkerAnswer
from duplex_sidecar.stages.environment import stage_environment
from duplex_sidecar.stages.supervisor import RestartPolicy, StageSpec, Supervisor
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import SegmentReason
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_stage import rows
from session_kit import VOCABULARY, WORD_IDS, Stages

pytestmark = pytest.mark.integration
V = VOCABULARY
SETTINGS = TelemetrySettings(replica="r")
UNITS = 7
TOLERANCE = 1e-3


@pytest.fixture
def spec(tmp_path: Path) -> StageSpec:
    """The vocoder's process with a checkpoint of its part alone."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    config = tiny_config()
    sizes = config.token2wav
    write_config(config, checkpoint)
    assets = checkpoint / "assets" / "token2wav"
    assets.mkdir(parents=True)
    torch.save({n: flow_tensor(n, s, 5) for n, s in flow_shapes(sizes).items()}, assets / "flow.pt")
    torch.save({n: hift_tensor(n, s, 5) for n, s in hift_shapes(sizes).items()}, assets / "hift.pt")
    save_voice(checkpoint, seeded_voice("default", 50, 0, sizes))
    settings = Code2WavSettings(checkpoint=str(checkpoint), device=Device.CPU, max_sessions=8)
    path, socket = tmp_path / "config.json", tmp_path / "socket"
    path.write_bytes(msgspec.json.encode(settings))
    module = "duplex_sidecar.stages.code2wav.process"
    argv = (sys.executable, "-m", module, "--socket", str(socket), "--config", str(path))
    environment = stage_environment(os.environ, tmp_path / "cache")
    return StageSpec("code2wav", argv, socket, tmp_path / "log", environment)


def speaker(session: str, client: Code2WavClient) -> Speaker:
    stages = Stages().as_set()
    stages = StageSet(
        stages.encoder,
        stages.thinker,
        stages.talker,
        client,
        thinker_spare=stages.thinker_spare,
        talker_spare=stages.talker_spare,
    )
    tracing = Tracing(SETTINGS)
    return Speaker(
        stages,
        talker_stream(stages, session, 1),
        VoiceSettings(
            session=session,
            voice="default",
            seed=42,
            sampling=TALKER_SAMPLING,
            talker_limit=4096,
            final_prompt_token=10,
        ),
        V,
        tracing.session(session, None, SegmentReason.OPENED),
    )


async def say(one: Speaker, speech: Speech, session: str, unit: int) -> tuple[Speech, bytes]:
    """One unit of a turn that ends with the last unit."""
    ids = (V.speak, WORD_IDS[unit], WORD_IDS[unit + 1])
    ids = (*ids, V.turn_eos, V.listen) if unit == UNITS else (*ids, V.chunk_eos)
    hidden = rows(*(b"%d:%d" % (unit, k) for k in range(len(ids) - 1)))
    answer = ThinkerAnswer(session, f"{session}/1", unit, ids, ids, hidden, 0.0)
    trace = Tracing(SETTINGS).session(session, None, SegmentReason.OPENED).unit(unit, 0, 1000.0)
    watch = UnitWatch(trace, Metrics(SETTINGS))
    voiced = await one.voice(speech, unit, answer, watch)
    return voiced.speech, b"".join(chunk.pcm_s16le for chunk in voiced.chunks)


async def turn(session: str, client: Code2WavClient, kill_after: int, log: Path) -> list[bytes]:
    """Sound of each unit of the turn; the vocoder dies after that unit."""
    one, speech = speaker(session, client), first_speech()
    heard: list[bytes] = []
    for unit in range(1, UNITS + 1):
        speech, pcm = await say(one, speech, session, unit)
        heard.append(pcm)
        if unit == kill_after:
            generation = client.generation
            os.kill(process_of(log), signal.SIGKILL)
            async with asyncio.timeout(180):
                while client.generation == generation:
                    await wait_ready(client, "code2wav")
    await one.close()
    return heard


def process_of(folder: Path) -> int:
    """The stage's process, by the socket in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder / "socket").encode() in line:
                return int(entry.name)
    raise AssertionError("no process")


@pytest.mark.parametrize("kill_after", [1, 4, 6])
async def test_a_killed_vocoder_costs_no_sample(
    tmp_path: Path, spec: StageSpec, kill_after: int
) -> None:
    policy = RestartPolicy(max_failed_starts=1, first_backoff_s=0.05)
    supervisor = Supervisor([spec], lambda report: None, policy)
    await supervisor.start()
    try:
        client = Code2WavClient(supervisor.link("code2wav"))
        calm = await turn("calm", client, 0, tmp_path)
        cut = await turn("cut", client, kill_after, tmp_path)
    finally:
        await supervisor.stop()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert kill_after <= FULL_CHUNKS
    assert [len(pcm) for pcm in cut] == [len(pcm) for pcm in calm]
    assert all(calm), "each unit sounds"
    for ours, theirs in zip(samples(cut), samples(calm), strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE


def samples(units: list[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(pcm, "<i2").astype(np.float32) / 32_768 for pcm in units]
