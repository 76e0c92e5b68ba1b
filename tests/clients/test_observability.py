"""What an on-call engineer sees of a conversation: probes, the status page, metrics, spans, logs;
and that nothing of what was said is among it."""

import asyncio
import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.material import manifest, picture, speech
from support.patience import PATIENCE_S
from support.realtime import Heard, conversing
from support.sidecars import Bed, get, whole_lines

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.session import lateness

pytestmark = pytest.mark.client

UNITS = 24
PROMPT = "Zebras prefer marmalade on thursdays."
TEXT = manifest(
    prompt=PROMPT,
    window={"mode": "context", "contextMaxUnits": 10, "contextPreviousMaxTokens": 100},
)
STEPS = ("duplex.encode", "duplex.accept", "duplex.thinker", "duplex.commit")
VOICE_STEPS = ("duplex.talker", "duplex.code2wav")
Span = dict[str, Any]


async def conversation(sidecar: LocalSidecar) -> tuple[str, Heard]:
    async with conversing(sidecar, TEXT, "seen") as client:
        await client.speak(speech(UNITS))
        await client.until_unit(UNITS)
        return client.session, client.heard


async def spans_of(bed: Bed, session: str, wanted: int) -> list[Span]:
    """Spans leave once a second."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = [
                span
                for span in bed.spans()
                if span["attributes"].get("duplex.session.id") == session
            ]
            if len([span for span in found if span["name"] == "duplex.unit"]) >= wanted:
                return found
            await asyncio.sleep(0.2)


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span["name"] == name]


def test_the_probes_and_the_status_page(sidecar: LocalSidecar) -> None:
    assert get(sidecar, "/livez") == (200, '{"status":"ok"}')
    status, body = get(sidecar, "/readyz")
    assert status == 200
    answer = json.loads(body)
    assert answer == {"ready": True, "waiting_for": None, "replica": sidecar.settings.replica}
    status, page = get(sidecar, "/statusz")
    assert status == 200
    assert page.count("<td>ready</td>") == 4
    assert sidecar.settings.admin_token not in page


async def test_the_status_page_shows_a_session_as_numbers(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, TEXT, "shown") as client:
        await client.speak(speech(2))
        await client.until_unit(2)
        page = (await asyncio.to_thread(get, sidecar, "/statusz"))[1]
        assert f"<td>{client.session}</td>" in page
        assert PROMPT not in page


async def test_the_metrics_page_counts(sidecar: LocalSidecar) -> None:
    before = await asyncio.to_thread(samples, sidecar)
    _, heard = await conversation(sidecar)
    after = await asyncio.to_thread(samples, sidecar)

    def grown(name: str, label: str = "") -> float:
        return sum(
            value - before.get(key, 0.0)
            for key, value in after.items()
            if key.startswith(name) and label in key
        )

    spoken = [unit for unit in heard.units if unit["decision"] == "speak"]
    slides = [unit for unit in heard.units if unit["rebuild_cause"] == "slide"]
    assert slides
    assert grown("duplex_units_total", '"listen"') == UNITS - len(spoken)
    assert grown("duplex_units_total", '"speak"') == len(spoken) > 0
    assert grown("duplex_unit_wall_milliseconds_count") == UNITS
    assert grown("duplex_window_rebuilds_total", '"slide"') == len(slides)
    assert grown("duplex_stage_time_milliseconds_count", '"thinker"') == UNITS
    assert grown("duplex_stage_time_milliseconds_count", '"talker"') >= len(spoken)
    assert grown("duplex_ledger_time_milliseconds_count", '"commit"') == UNITS
    assert grown("duplex_stage2_epochs_total") > 0
    assert grown("duplex_stage_restarts_total") == 0


def samples(sidecar: LocalSidecar) -> dict[str, float]:
    """The Prometheus page: series -> value."""
    status, page = get(sidecar, "/metrics")
    assert status == 200
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {series: float(value) for series, value in pairs}


async def test_every_unit_is_a_span_with_its_steps(sidecar: LocalSidecar, bed: Bed) -> None:
    session, heard = await conversation(sidecar)
    spans = await spans_of(bed, session, UNITS)
    (root,) = named(spans, "duplex.session")
    assert root["attributes"]["duplex.segment.reason"] == "opened"
    units = {span["attributes"]["duplex.unit.seq"]: span for span in named(spans, "duplex.unit")}
    assert sorted(units) == list(range(1, UNITS + 1))
    children: dict[str, list[Span]] = {}
    for span in spans:
        children.setdefault(span.get("parentSpanId", ""), []).append(span)
        assert span["traceId"] == root["traceId"]
        # A rebuild made ahead of a unit that never came is given up.
        ahead = span["attributes"].get("duplex.unit.seq", 0) > UNITS
        assert ahead or span.get("status", {}).get("code", 0) != 2
    for facts in heard.units:
        span = units[facts["unit"]]
        assert span["parentSpanId"] == root["spanId"]
        attributes = span["attributes"]
        assert attributes["duplex.unit.decision"] == facts["decision"]
        assert attributes["duplex.unit.tokens"] == facts["tokens"]
        assert attributes["duplex.unit.window_tokens"] == facts["window_tokens"]
        assert attributes["duplex.unit.audio_ms"] == 1000
        assert attributes["duplex.unit.redo"] is False
        names = [child["name"] for child in children[span["spanId"]]]
        assert [names.count(step) for step in STEPS] == [1, 1, 1, 1]
        if facts["audio_samples"]:
            assert [names.count(step) for step in VOICE_STEPS] == [1, 1]
        for child in children[span["spanId"]]:
            assert int(child["startTimeUnixNano"]) >= int(span["startTimeUnixNano"])
            assert int(child["endTimeUnixNano"]) <= int(span["endTimeUnixNano"])


async def test_every_rebuild_is_a_span_and_every_epoch_an_event(
    sidecar: LocalSidecar, bed: Bed
) -> None:
    session, heard = await conversation(sidecar)
    spans = await spans_of(bed, session, UNITS)
    rebuilt = {unit["unit"]: unit for unit in heard.units if unit["rebuild_cause"]}
    rebuilds = {
        span["attributes"]["duplex.unit.seq"]: span["attributes"]
        for span in named(spans, "duplex.window.rebuild")
    }
    assert set(rebuilt) <= set(rebuilds)
    for number, unit in rebuilt.items():
        attributes = rebuilds[number]
        assert attributes["duplex.window.mode"] == "context"
        assert attributes["duplex.window.cause"] == unit["rebuild_cause"] == "slide"
        assert attributes["duplex.window.dropped_units"] == unit["dropped_units"] > 0
        assert attributes["duplex.window.dropped_tokens"] > 0
        assert attributes["duplex.window.replacement_tokens"] > 0
        assert attributes["duplex.rebuild.actual_ms"] > 0
        assert attributes["duplex.rebuild.predicted_ms"] > 0
    events = [event for span in spans for event in span["events"]]
    opened = {
        event["attributes"]["duplex.stage2.epoch"]: event["attributes"]["duplex.stage2.cause"]
        for event in events
        if event["name"] == "duplex.stage2.epoch"
    }
    sounded = {event["duplex"]["epoch"] for event in heard.of_type("response.output_audio.delta")}
    assert set(opened) == sounded
    assert set(opened.values()) == {"open", "turn_end"}


async def test_nothing_that_was_said_is_in_spans_or_logs(sidecar: LocalSidecar, bed: Bed) -> None:
    session, heard = await conversation(sidecar)
    await spans_of(bed, session, UNITS)
    text = "".join(e["delta"] for e in heard.of_type("response.output_audio_transcript.delta"))
    said = [word for word in re.findall(r"\w+", text) if len(word) > 4]
    assert said
    sound = [e["delta"][:200] for e in heard.of_type("response.output_audio.delta")]
    heard_speech = base64.b64encode(speech(1, 2)).decode()[1_000:1_100]
    secrets = [PROMPT, "Zebras", sidecar.settings.admin_token, *sound, heard_speech]
    sentences = [text[start : start + 12] for start in range(0, len(text) - 12, 6)]
    written = everything_written(sidecar, bed)
    assert len(written) == 6
    for file, content in written.items():
        found = [secret for secret in (*secrets, *sentences) if secret in content]
        assert found == [], file


def everything_written(sidecar: LocalSidecar, bed: Bed) -> dict[str, str]:
    """Exported spans, the sidecar's log, the logs of its four stages."""
    folder = Path(sidecar.settings.runtime_dir)
    files = [bed.spans_file, sidecar.log, *folder.glob("*/log")]
    return {str(file): file.read_text(errors="replace") for file in files}


async def lines_of(sidecar: LocalSidecar, session: str, wanted: int) -> list[dict[str, Any]]:
    """What the sidecar's log has of a session, once it has so many lines of it. Left out is what it
    says of late units: whether there are any is this machine's business."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            lines = [json.loads(line) for line in whole_lines(sidecar.log)]
            assert all(line["replica"] == sidecar.settings.replica for line in lines)
            mine = [line for line in lines if line.get("session") == session]
            mine = [line for line in mine if line["logger"] != lateness.__name__]
            if len(mine) >= wanted:
                return mine
            await asyncio.sleep(0.1)


async def test_log_lines_carry_their_session(sidecar: LocalSidecar) -> None:
    session, _ = await conversation(sidecar)
    mine = await lines_of(sidecar, session, 2)
    assert [line["message"] for line in mine] == [
        "session runs here",
        "session no longer runs here",
    ]
    assert mine[-1]["fields"] == {"reason": "session_ended", "units": UNITS}


async def test_a_line_about_a_unit_carries_its_number(sidecar: LocalSidecar) -> None:
    """Of two conversations at a time one is shown pictures until a unit does not fit any more."""
    frames = [base64.b64encode(picture(1_280, 960, shade=shade)).decode() for shade in (10, 200)]
    wide = manifest(camera={"framesPerUnit": 2, "highResolution": True})
    async with (
        conversing(sidecar, TEXT, "heard") as other,
        conversing(sidecar, wide, "wide") as client,
    ):
        await other.speak(speech(2))
        await other.until_unit(2)
        for second in range(12):
            await client.append(speech(1, second), video_frames=frames)
            event = await client.until(("duplex.unit", "session.closed"))
            if event["type"] == "session.closed":
                break
        assert event["reason"] == "context_length_exceeded"
        units = len(client.heard.units)
    mine = await lines_of(sidecar, client.session, 3)
    about = [(line["level"], line["message"], line["unit"]) for line in mine if "unit" in line]
    assert about == [("warning", "unit failed: context_length_exceeded", units + 1)]
    assert all("unit" not in line for line in await lines_of(sidecar, other.session, 2))
