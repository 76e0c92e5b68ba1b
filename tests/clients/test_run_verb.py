"""`duplex run`: a manifest and a recording become a reply. It talks to the shared sidecar here,
which stands for the one that it would start: what a start is, the demo's tests see."""

import asyncio
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ledgers import committed_units
from support.material import EXAMPLES, speech
from support.sidecars import Bed

from duplex_sidecar.cli import run as run_module
from duplex_sidecar.cli.main import app
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.model.minicpmo45.constants import (
    IMAGE_BLOCK_POSITIONS,
    UNIT_APPEND_POSITIONS,
)

pytestmark = pytest.mark.client


@dataclass
class Lent:
    """The shared sidecar as one of `duplex run`'s own: started and stopped by nobody."""

    real: LocalSidecar
    asked: dict[str, Any]
    sessions: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    @property
    def realtime_url(self) -> str:
        return self.real.realtime_url

    @property
    def base_url(self) -> str:
        return self.real.base_url

    def start(self) -> None:
        self.calls.append("start")

    def wait_ready(self, on_progress: Callable[[str], None] = lambda text: None) -> float:
        self.calls.append("ready")
        return self.real.wait_ready(on_progress)

    def open_session(self, session: str, manifest: str, token: str) -> dict[str, Any]:
        self.sessions.append(session)
        return self.real.open_session(session, manifest, token)

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def lent(sidecar: LocalSidecar, monkeypatch: pytest.MonkeyPatch) -> list[Lent]:
    """Those that were asked for."""
    given: list[Lent] = []

    def prepare(folder: Path, **settings: Any) -> Lent:
        given.append(Lent(sidecar, settings))
        return given[-1]

    monkeypatch.setattr(run_module.LocalSidecar, "prepare", prepare)
    return given


def recording(folder: Path, seconds: int) -> Path:
    path = folder / "question.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(speech(seconds))
    return path


def run(*arguments: object) -> int:
    """As the command line calls it."""
    return app(["run", *map(str, arguments)], result_action="return_value")


def appended_tokens(bed: Bed, session: str) -> list[int]:
    """How many positions each unit but the first took, before it was answered."""
    units = asyncio.run(committed_units(bed.valkey.url, session))
    return [
        unit["plan"]["prompt_tokens"]
        - before["plan"]["prompt_tokens"]
        - (len(before["token_ids"]) - 1)
        for before, unit in pairwise(units)
    ]


def sound_of(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def call(bed: Bed, out: Path, audio: Path, manifest: str, *more: object) -> tuple[int, float]:
    """(exit status, seconds) with the ledger that the tests look into."""
    began = time.monotonic()
    status = run(
        *("-f", EXAMPLES / manifest, "--audio", audio, "--out", out),
        *("--redis-url", bed.valkey.url, "--checkpoint", bed.checkpoint, *more),
    )
    return status, time.monotonic() - began


def test_a_recording_gets_its_reply(
    lent: Sequence[Lent], bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten times as fast as it was spoken."""
    out = tmp_path / "answer.wav"
    status, seconds = call(bed, out, recording(tmp_path, 14), "session.yaml", "--speed", 10)
    assert status == 0
    assert seconds < 14
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("starting the sidecar: half a minute to a minute the sidecar ready in ")
    assert f"14 units, replies in {out}" in told
    sound = sound_of(out)
    assert len(sound) > 24_000
    assert np.abs(sound).max() > 100
    (one,) = lent
    assert one.calls == ["start", "ready", "stop"]
    assert one.asked["checkpoint"] == str(bed.checkpoint)
    assert one.asked["redis_url"] == bed.valkey.url
    assert appended_tokens(bed, one.sessions[0]) == [UNIT_APPEND_POSITIONS] * 13


def test_a_clip_is_shown_a_frame_a_second(lent: Sequence[Lent], bed: Bed, tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    clip = EXAMPLES / "video" / "camera.mp4"
    audio = recording(tmp_path, 8)
    status, _ = call(bed, out, audio, "session-camera.yaml", "--speed", 10, "--video", clip)
    assert status == 0
    seen = UNIT_APPEND_POSITIONS + IMAGE_BLOCK_POSITIONS
    assert appended_tokens(bed, lent[0].sessions[0]) == [seen] * 7
    assert len(sound_of(out)) > 0


def test_without_a_speed_it_takes_as_long_as_it_was_spoken(
    lent: Sequence[Lent], bed: Bed, tmp_path: Path
) -> None:
    out = tmp_path / "answer.wav"
    status, seconds = call(bed, out, recording(tmp_path, 3), "session.yaml")
    assert status == 0
    assert seconds >= 3
    assert lent[0].calls[-1] == "stop"
