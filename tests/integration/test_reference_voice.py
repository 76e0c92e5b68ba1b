"""A session that names its voice has the voice's reference clip in every prompt, as rows that were
made once, when it opened; and the camera's resolution, the other term that changes a prompt."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from duplex_sidecar.contract.check import check_file
from duplex_sidecar.contract.recorder import RecordReport, record
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.refusals import PlacementRefused, Refusal
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODEL,
    MODES,
    VOICE,
    Caller,
    Mode,
    Replica,
    Stages,
    Terms,
    check_events,
    check_prompts,
    frames_of,
    replica,
    tokens,
    with_camera,
)

pytestmark = pytest.mark.integration
UNITS = 40


async def dialled(here: Replica, session: str, terms: Terms) -> Caller:
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    return caller


@pytest.mark.parametrize("mode", MODES)
async def test_the_clip_stands_in_every_prompt_and_is_encoded_once(
    valkey: EmbeddedValkey, mode: Mode, tmp_path: Path
) -> None:
    """Through slides, a lost stream, a lost engine, and a replica that takes the session up."""
    terms, session = Terms(mode, voice=VOICE), f"voice-{mode}"
    stages = [Stages(), Stages()]
    for unit, fault in ((9, StageFault.UNKNOWN_STREAM), (14, StageFault.GONE)):
        stages[0].thinker.fail(unit, fault)
    stages[1].encoder.fail(30, StageFault.GONE)
    async with replica(valkey.url, f"{mode}-a", stages=stages[0], tapes=tmp_path / "tapes") as one:
        caller = await dialled(one, session, terms)
        await caller.talk(20)
        await caller.hang_up()
    async with replica(valkey.url, f"{mode}-b", stages=stages[1], tapes=tmp_path / "tapes") as two:
        await two.open(session, terms)
        await caller.dial(two)
        await caller.talk(UNITS)
        said = await tokens(two.ledger, session)
    check_events(caller)
    check_prompts(stages, session, terms, said, caller)
    assert [each.encoder.references for each in stages] == [[VOICE], []]
    causes = {unit.rebuild_cause for unit in caller.units}
    assert causes >= {"engine_restart", "replica_restart"}
    assert ("slide" in causes) == (mode != "off")

    assert recorded(tmp_path).left_out == ()


def recorded(folder: Path) -> RecordReport:
    """The traces of all tapes there, checked."""
    report = record(sorted((folder / "tapes").glob("*.tape.jsonl")), folder / "traces")
    assert report.findings == ()
    for path, _ in report.files:
        assert check_file(path).differences == ()
    return report


async def test_without_a_named_voice_or_without_a_clip_nothing_is_encoded(
    valkey: EmbeddedValkey,
) -> None:
    for name in (None, "default"):
        stages = Stages()
        async with replica(valkey.url, f"plain-{name}", stages=stages) as here:
            caller = await dialled(here, f"plain-{name}", Terms("context", voice=name))
            await caller.talk(12)
            said = await tokens(here.ledger, caller.session)
            check_prompts([stages], caller.session, Terms("context"), said, caller)
        assert stages.encoder.references == []


async def test_a_session_whose_clip_cannot_be_encoded_is_not_opened(
    valkey: EmbeddedValkey,
) -> None:
    """It leaves nothing in the ledger, and opens when the encoder is back."""
    stages = Stages()
    terms = Terms("context", voice=VOICE)
    async with replica(valkey.url, "away", stages=stages) as here:
        stages.encoder.kill()
        with pytest.raises(ClientError) as refused:
            await here.open("away", terms)
        assert refused.value.code is ErrorCode.NOT_READY
        assert not await here.ledger.exists("away")
        await stages.encoder.health()
        caller = await dialled(here, "away", terms)
        await caller.talk(3)

    # A file of another length than the one that was there when the sidecar started.
    model = replace(MODEL, references={VOICE: 1_600})
    async with replica(valkey.url, "changed", model=model) as here:
        with pytest.raises(ClientError, match="7 rows for 1 positions"):
            await here.open("changed", terms)
        assert not await here.ledger.exists("changed")


async def test_opened_again_encodes_nothing_and_another_voice_is_a_conflict(
    valkey: EmbeddedValkey,
) -> None:
    terms = Terms("context", voice=VOICE)
    async with replica(valkey.url, "again") as here:
        for _ in range(2):
            await here.open("again", terms)
        assert here.stages.encoder.references == [VOICE]
        with pytest.raises(PlacementRefused, match="voice") as refused:
            await here.open("again", Terms("context"))
        assert refused.value.refusal is Refusal.MANIFEST_CONFLICT
    async with replica(valkey.url, "elsewhere") as here:
        await here.open("again", terms)
        assert here.stages.encoder.references == []


@pytest.mark.parametrize("mode", MODES)
async def test_without_high_resolution_no_frame_is_seen_in_slices(
    valkey: EmbeddedValkey, mode: Mode, tmp_path: Path
) -> None:
    """What is reserved is what the encoder gives: two blocks for two frames, however large. The
    recorded layouts know the public rule alone."""
    terms = replace(with_camera(Terms(mode)), high_resolution=False)
    async with replica(valkey.url, f"low-{mode}", tapes=tmp_path / "tapes") as here:
        await here.open(f"low-{mode}", terms)
        caller = Caller(f"low-{mode}", frames=large_frames)
        await caller.dial(here)
        await caller.talk(30)
        said = await tokens(here.ledger, caller.session)
        check_prompts([here.stages], caller.session, terms, said, caller, large_frames)
        assert caller.failures == []
    (left_out,) = recorded(tmp_path).left_out
    assert "layout_sessions" in left_out


def large_frames(number: int) -> tuple[bytes, ...]:
    return frames_of(number, large=True)
