"""`duplex demo` as a process, on a shorter recording and faster than real time: what it leaves
holds what the README promises of it, over the kill in its middle."""

import json
import os
import subprocess
import sys
import wave
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from support.material import EXAMPLES, speech
from support.sidecars import spans_of

from duplex_sidecar.checkpoint.presets import TINY_VOCAB_SIZE
from duplex_sidecar.checkpoint.tokenizer import SPECIAL_TOKENS
from duplex_sidecar.ledger.export import verify_lines

pytestmark = pytest.mark.fault

UNITS = 30
KILL_AT = 20
WINDOW_UNITS = 16
"""Of examples/session.yaml. The window is full long before the kill."""
LISTENING_TOKENS = 13
"""Positions of a unit of sound that was listened to."""
FIRST_SPECIAL = TINY_VOCAB_SIZE - len(SPECIAL_TOKENS)
CHILDREN = {"encode", "accept", "thinker", "commit", "talker", "code2wav"}
REBUILD = {
    "duplex.session.id",
    "duplex.unit.seq",
    "duplex.window.mode",
    "duplex.window.cause",
    "duplex.window.dropped_units",
    "duplex.window.dropped_tokens",
    "duplex.window.replacement_tokens",
    "duplex.rebuild.predicted_ms",
    "duplex.rebuild.actual_ms",
}
LEDGER = {"seq", "epoch", "turn", "token_ids", "terminator", "plan", "prev_hash", "replica"}


def short_examples(folder: Path) -> Path:
    """The project's session with the first half minute of its recording."""
    (folder / "audio").mkdir(parents=True)
    (folder / "session.yaml").write_bytes((EXAMPLES / "session.yaml").read_bytes())
    samples = np.frombuffer(speech(UNITS), "<i2")[None, :]
    with av.open(str(folder / "audio" / "conversation.flac"), "w", format="flac") as file:
        stream = file.add_stream("flac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 16_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    return folder


@dataclass(frozen=True)
class Left:
    """What a demo printed, and its folder."""

    text: str
    out: Path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "ledger.jsonl").read_text().splitlines()]

    def units(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == "unit"]

    def first_of_second(self) -> int:
        """Number of the first unit that the second sidecar answered."""
        return next(unit["seq"] for unit in self.units() if unit["replica"] == "sidecar-2")

    def spans(self) -> list[dict[str, Any]]:
        exports = (self.out / "spans.jsonl").read_text().splitlines()
        return [span for line in exports for span in spans_of(json.loads(line))]


@pytest.fixture(scope="module")
def left(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    assert tiny_checkpoint.is_dir()
    folder = tmp_path_factory.mktemp("demo")
    examples = short_examples(folder / "examples")
    options = ("--speed", "20", "--kill-at", str(KILL_AT), "--examples", str(examples))
    done = subprocess.run(
        [sys.executable, "-m", "duplex_sidecar.cli.main", "demo", "--out", "demo-out", *options],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return Left(done.stdout, folder / "demo-out")


def test_it_leaves_four_files_and_says_that_all_is_well(left: Left) -> None:
    names = {path.name for path in left.out.iterdir()}
    assert names == {"reply.wav", "timeline.png", "spans.jsonl", "ledger.jsonl"}
    (verdict,) = [line for line in left.text.splitlines() if line.startswith("OK: ")]
    assert f"{UNITS} units contiguous=True" in verdict
    assert "resumed 1x on sidecar-1 -> sidecar-2" in verdict
    assert "same window=True, new epoch from chunk 0=True" in verdict
    assert "killed " in left.text
    for name in names:
        assert f"demo-out/{name}" in left.text


def test_the_reply_is_a_sound(left: Left) -> None:
    with wave.open(str(left.out / "reply.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float64)
    assert KILL_AT < len(samples) / 24_000 < 2 * UNITS
    second = np.sqrt((samples[: len(samples) // 24_000 * 24_000].reshape(-1, 24_000) ** 2).mean(1))
    assert (second > 100).sum() >= 3
    assert (second == 0).any(), "it pauses while it listens"


def test_the_picture_is_one(left: Left) -> None:
    with Image.open(left.out / "timeline.png") as image:
        assert image.format == "PNG"
        assert image.width >= 1_000
        assert image.height >= 600
        colours = image.convert("RGB").getcolors(image.width * image.height)
    assert colours is not None
    assert len(colours) > 20


def test_units_go_on_over_the_kill_in_one_chain(left: Left) -> None:
    lines, units = left.lines(), left.units()
    assert all(line.keys() >= LEDGER for line in lines)
    assert [unit["seq"] for unit in units] == list(range(1, UNITS + 1))
    assert all(unit["committed"] and unit["token_ids"] for unit in units)
    assert all(unit["terminator"] for unit in units)
    for before, line in pairwise(lines):
        assert line["prev_hash"] == before["hash"]
    assert verify_lines((left.out / "ledger.jsonl").read_bytes().splitlines()) == UNITS
    began = left.first_of_second()
    assert KILL_AT < began <= UNITS
    replicas = [unit["replica"] for unit in units]
    assert replicas == ["sidecar-1"] * (began - 1) + ["sidecar-2"] * (UNITS - began + 1)
    sound = [unit for unit in units if unit["decision"] == "speak"]
    assert {unit["seq"] < began for unit in sound} == {True, False}, "spoken before and behind it"


def test_the_window_is_the_same_before_and_after(left: Left) -> None:
    """Counted anew, from what was answered and what left: as long and as many units as ever."""
    units = left.units()
    began = left.first_of_second()
    assert units[began - 1]["plan"]["cause"] == "replica_restart"
    gone, seen_words = 0, False
    for before, unit in pairwise(units):
        plan = unit["plan"]
        gone += plan["dropped_units"]
        assert before["seq"] - gone == min(before["seq"], WINDOW_UNITS)
        said = len(before["token_ids"]) - 1
        stays_as_text = plan["prompt_tokens"] - (
            before["plan"]["prompt_tokens"] + said + LISTENING_TOKENS - plan["dropped_tokens"]
        )
        # Of a unit that spoke its words stay, and before the first of them there is a marker.
        dropped = units[gone - 1]["token_ids"] if plan["dropped_units"] else []
        words = sum(token < FIRST_SPECIAL for token in dropped)
        marker = 0 if seen_words or not words else stays_as_text - words
        seen_words = seen_words or words > 0
        assert marker >= 0
        assert stays_as_text == words + marker, unit["seq"]
    assert seen_words
    assert gone == UNITS - 1 - WINDOW_UNITS


def test_the_spans_tell_each_unit_and_rebuild_and_link_over_the_kill(left: Left) -> None:
    spans, began = left.spans(), left.first_of_second()
    units = {
        span["attributes"]["duplex.unit.seq"]: span
        for span in spans
        if span["name"] == "duplex.unit"
    }
    # Up to a second of the killed process is lost with it; nothing of the other one is.
    assert set(units) >= set(range(began, UNITS + 1))
    spoken = [unit["seq"] for unit in left.units() if unit["decision"] == "speak"]
    for seq, unit in units.items():
        children = {s["name"] for s in spans if s.get("parentSpanId") == unit["spanId"]}
        wanted = {f"duplex.{name}" for name in CHILDREN}
        if seq not in spoken:
            wanted -= {"duplex.talker", "duplex.code2wav"}
        if unit["attributes"]["duplex.unit.redo"]:
            wanted -= {"duplex.encode", "duplex.accept"}
        if seq >= began:
            assert children >= wanted, seq
    rebuilds = [span for span in spans if span["name"] == "duplex.window.rebuild"]
    assert rebuilds
    assert all(span["attributes"].keys() >= REBUILD for span in rebuilds)
    causes = {
        span["attributes"]["duplex.unit.seq"]: span["attributes"]["duplex.window.cause"]
        for span in rebuilds
    }
    assert causes[began] == "replica_restart"
    assert "slide" in causes.values()
    opening = json.loads(left.lines()[0]["records"][0])
    (resumed,) = [
        span
        for span in spans
        if span["name"] == "duplex.session"
        and span["attributes"]["duplex.segment.reason"] == "resumed"
    ]
    assert resumed["attributes"]["duplex.replica"] == "sidecar-2"
    assert [link["traceId"] for link in resumed["links"]] == [opening["traceparent"].split("-")[1]]


def test_stage_2_goes_on_in_a_new_epoch(left: Left) -> None:
    """Of chunk 0 the demo's own verdict tells, which every chunk that came is looked at for."""
    began = left.first_of_second()
    epochs: dict[bool, list[int]] = {True: [], False: []}
    for span in left.spans():
        for event in span["events"]:
            if event["name"] == "duplex.stage2.epoch":
                behind = span["attributes"]["duplex.unit.seq"] >= began
                epochs[behind].append(event["attributes"]["duplex.stage2.epoch"])
    assert epochs[True]
    known = {unit["epoch"] for unit in left.units() if unit["seq"] < began}
    assert min(epochs[True]) > max(epochs[False], default=0)
    assert min(epochs[True]) >= max(known)
