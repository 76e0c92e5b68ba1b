"""The cases of the public change that this product grew from, by name, on the whole session.

The stages are fakes with the real rules, so that each prompt and each answer is checked; what is
pure of those cases is in tests/unit/window (`12/19`, `9/22`, the 21-token plan against its limits,
the append [1, 11, 2, 1, 11]); the long ones run on the real stages in tests/soak.
"""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.records import Accepted
from duplex_sidecar.protocol.commands import AppendInput
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_encoder import REFERENCE_ROWS, reference_of
from fake_stage import rows_in
from fake_thinker import FakeThinker, Position
from session_kit import (
    MODEL,
    MODES,
    RATE_HZ,
    SYSTEM,
    VOCABULARY,
    VOICE,
    WORD_IDS,
    Caller,
    Mode,
    Replica,
    Stages,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    encode,
    eventually,
    frames_of,
    png,
    replica,
    second,
    speaks,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.integration
Frames = Callable[[int], tuple[bytes, ...]]
SLIDING: tuple[Mode, ...] = ("basic", "context")


def no_frames(_: int) -> tuple[bytes, ...]:
    return ()


def a_frame_a_second(number: int) -> tuple[bytes, ...]:
    return (png(96, number),)


def some_frames(number: int) -> tuple[bytes, ...]:
    """So many that 100 seconds fit into the model with nothing dropped."""
    return () if number % 3 else frames_of(number // 3 + 1, large=number % 2 == 0)


def public_sizes(mode: Mode, *, camera: bool = False) -> Terms:
    """The window of the public change, not the small one of the other tests."""
    terms = Terms(mode, basic_high=8000, basic_low=6000, max_units=24, previous_max=500)
    return replace(terms, camera=camera)


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url) as here:
        yield here


async def called(here: Replica, session: str, terms: Terms, frames: Frames = no_frames) -> Caller:
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    await caller.dial(here)
    return caller


def audio_bytes(caller: Caller) -> int:
    return sum(
        len(event.body.pcm_s16le) for event in caller.sequenced if isinstance(event.body, Audio)
    )


# --- short input, then a new session --------------------------------------------------------------


@pytest.mark.parametrize("voice", [None, VOICE], ids=["no voice", "reference voice"])
@pytest.mark.parametrize("mode", SLIDING)
async def test_short_input_then_a_new_session(
    valkey: EmbeddedValkey, here: Replica, mode: Mode, voice: str | None
) -> None:
    """Nothing of the first session is in the second one: not its window, not its voice's stream.
    A reference voice has its clip in every prompt of both, and speaks in both, bound when the epoch
    opens; two sessions with it agree, and differ from those without."""
    terms, name = Terms(mode, voice=voice), f"{mode}-{voice}"
    said, lone = await undisturbed(valkey.url, f"alone-{name}", terms, 20)
    short = await called(here, f"short-{name}", terms)
    assert short.attachment is not None
    await short.attachment.submit(AppendInput(second(1)[: 2 * 6_400], from_sample=0))
    await short.commit()
    await short.until_unit(1)
    assert short.accepted[-1].to_sample == 6_400
    assert (await short.close()).code is ErrorCode.SESSION_ENDED
    await eventually(lambda: here.stages.held() == [])

    caller = await called(here, f"next-{name}", terms)
    await caller.talk(20)
    check_events(caller)
    assert await tokens(here.ledger, caller.session) == said
    check_prompts([here.stages], caller.session, terms, said, caller)
    assert [u.window_tokens for u in caller.units] == [u.window_tokens for u in lone.units]
    assert audio_bytes(caller) == audio_bytes(lone) > 0
    spoke = {session for session, _ in here.stages.code2wav.opened}
    assert caller.session in spoke
    assert here.stages.code2wav.sessions[caller.session].voice == (voice or "default")
    assert check_stage2(here.stages, caller.session)[0] == 0, "its own epochs, from the first one"

    prompts = [
        one.prompt
        for one in here.stages.thinker.submissions
        if one.session in (short.session, caller.session)
    ]
    assert len(prompts) >= 21
    assert {clips_in(prompt) for prompt in prompts} == {(len(CLIP_FROM),) if voice else ()}
    assert here.stages.encoder.references == ([VOICE, VOICE] if voice else [])
    if voice:
        plain = await called(here, f"plain-{name}", replace(terms, voice=None))
        await plain.talk(1)
        longer = caller.units[0].window_tokens - plain.units[0].window_tokens
        assert longer == REFERENCE_ROWS + len(encode("\n<|audio_start|><|audio_end|>"))


CLIP_FROM = encode(f"{SYSTEM}\n<|audio_start|>")
"""What stands before a reference clip."""


def clips_in(prompt: Sequence[Position]) -> tuple[int, ...]:
    """The places of a prompt where the rows of the reference clip begin."""
    clip = rows_in(reference_of(VOICE))
    return tuple(
        start for start, place in enumerate(prompt) if list(prompt[start:][: len(clip)]) == clip
    )


# --- 131 seconds without a pause ------------------------------------------------------------------


@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("mode", SLIDING)
async def test_131_s_continuous(here: Replica, mode: Mode, camera: bool) -> None:
    terms = public_sizes(mode, camera=camera)
    frames = a_frame_a_second if camera else no_frames
    caller = await called(here, f"131-{mode}-{camera}", terms, frames)
    await caller.talk(131)
    check_events(caller)
    said = await tokens(here.ledger, caller.session)
    assert len(said) == 131
    check_prompts([here.stages], caller.session, terms, said, caller, frames)
    shown = [
        blocks
        for (session, _), blocks in here.stages.encoder.given.items()
        if session == caller.session and len(blocks) > 1
    ]
    assert len(shown) == (131 if camera else 0), "at least 120 frames"
    slides = [unit.unit for unit in caller.units if unit.rebuild_cause == "slide"]
    if mode == "context":
        assert slides == list(range(26, 132)), "from append 26 on, at every one"
    else:
        assert bool(slides) == camera, "8,000 positions are 131 s of audio with frames alone"
    assert audio_bytes(caller) > 0
    assert [unit.audio_samples > 0 for unit in caller.units].count(True) > 30
    epochs = check_stage2(here.stages, caller.session)
    assert len(epochs) in (caller.units[-1].turn, caller.units[-1].turn + 1)


# --- a burst, and a flush at its end --------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_burst_plus_final_flush(valkey: EmbeddedValkey, here: Replica, mode: Mode) -> None:
    """12.4 s at once and a commit: 13 units as if they had come one by one, the last one final and
    no longer than the others; then the conversation goes on."""
    terms = Terms(mode)
    burst = b"".join(second(number) for number in range(1, 13)) + second(13)[: 2 * 6_400]
    caller = await called(here, f"burst-{mode}", terms)
    assert caller.attachment is not None
    await caller.attachment.submit(AppendInput(burst, from_sample=0, is_speech=True))
    await caller.commit()
    await caller.until_unit(13)

    paced = await called(here, f"paced-{mode}", terms)
    assert paced.attachment is not None
    for start in range(0, len(burst), 2 * RATE_HZ):
        piece = AppendInput(
            burst[start : start + 2 * RATE_HZ], from_sample=start // 2, is_speech=True
        )
        await paced.attachment.submit(piece)
    await paced.commit()
    await paced.until_unit(13)

    for each in (caller, paced):
        await each.attachment_takes_mail()
        each.next_second = 14
        await each.attachment.submit(AppendInput(second(14), is_speech=speaks(14)))
        await each.until_unit(14)
        check_events(each)
        assert each.failures == []
    said = await tokens(here.ledger, caller.session)
    assert said == await tokens(here.ledger, paced.session)
    check_prompts([here.stages], caller.session, terms, said, caller)
    loaded = await here.ledger.load(caller.session)
    accepted = [entry.record for entry in loaded.entries if isinstance(entry.record, Accepted)]
    assert [unit.seq for unit in accepted if unit.input.final] == [13]
    assert {unit.input.new_samples for unit in accepted} == {RATE_HZ}, "the last one was padded"
    assert caller.accepted[12].to_sample == 12 * RATE_HZ + 6_400


# --- 100 appends in each configuration ------------------------------------------------------------


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("mode", MODES)
async def test_100_appends(here: Replica, mode: Mode, camera: bool, greedy: bool) -> None:
    terms = Terms(mode, greedy=greedy)
    terms = with_camera(terms) if camera else terms
    frames = some_frames if camera else no_frames
    caller = await called(here, f"100-{mode}-{camera}-{greedy}", terms, frames)
    await caller.talk(100)
    check_events(caller)
    said = await tokens(here.ledger, caller.session)
    assert len(said) == 100
    check_prompts([here.stages], caller.session, terms, said, caller, frames)
    check_stage2(here.stages, caller.session)
    assert caller.failures == []


# --- at the limit, with an answer of 19 tokens ----------------------------------------------------

LONGEST = (VOCABULARY.speak, *[WORD_IDS[0]] * 18, VOCABULARY.chunk_eos)
"""19 tokens and what ends them: no unit says more."""


@pytest.mark.parametrize("mode", ["off", "context"])
async def test_the_longest_answer_at_the_models_limit(valkey: EmbeddedValkey, mode: Mode) -> None:
    """limit - 1, limit, limit + 1: an append is admitted if its prompt leaves room for one token,
    and then answers with all of its 19, in an engine of 32 positions more. One position less and
    the session ends by name, with nothing of the append in its ledger. (Mode `basic` does not get
    there: its high watermark has to lie below the limit.)"""
    terms = Terms(mode, max_units=8, previous_max=100)
    model = replace(MODEL, bench_script=(LONGEST,))
    async with replica(valkey.url, model=model) as calm:
        caller = await called(calm, f"calm-{mode}", terms)
        await caller.talk(40)
        lengths = [unit.window_tokens for unit in caller.units]
    longest = max(lengths)
    full = lengths.index(longest)
    for limit, units in ((longest - 1, full), (longest, full), (longest + 1, 40)):
        engine = FakeThinker(VOCABULARY, WORD_IDS, max_model_len=limit + 32)
        small = replace(model, max_model_tokens=limit)
        async with replica(valkey.url, model=small, stages=Stages(thinker=engine)) as here:
            caller = await called(here, f"limit-{mode}-{limit}", terms)
            await caller.say(40)
            if units == 40:
                await caller.until_unit(40)
            else:
                closed = await caller.until(lambda event: isinstance(event, Closed))
                assert isinstance(closed, Closed)
                assert closed.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
                head = (await here.ledger.load(caller.session)).head
                assert (head.committed_seq, head.open_seq) == (units, None)
            assert len(caller.units) == units
            assert {unit.tokens for unit in caller.units} == {20}
            check_events(caller)


async def test_the_longest_condition_at_the_talkers_limit(valkey: EmbeddedValkey) -> None:
    """limit - 1, limit, limit + 1: a condition of 19 positions extends the prompt that it fills
    exactly; with one position less it rebuilds the prompt, once, and the next one extends it."""
    model = replace(MODEL, bench_script=(LONGEST,))
    async with replica(valkey.url, model=model) as calm:
        caller = await called(calm, "talker-calm", Terms("off"))
        await caller.talk(6)
        fifth = calm.stages.talker.feeds[4]
    # The first token of a unit, `<|speak|>`, is its decision; a middle unit has 25 codes of 26.
    exact = fifth.position + 19 + 26
    for limit, rebuilt in ((exact - 1, 4), (exact, 5), (exact + 1, 5)):
        small = replace(model, max_talker_tokens=limit)
        async with replica(valkey.url, model=small) as here:
            caller = await called(here, f"talker-{limit}", Terms("off"))
            await caller.talk(rebuilt + 3)
            check_events(caller)
            feeds = here.stages.talker.feeds
            assert [number for number, feed in enumerate(feeds) if feed.opens] == [0, rebuilt]
            assert len(feeds[rebuilt].parts) == 3, "the condition before, its codes, and this one"
            assert feeds[rebuilt + 1].position == 19 + 25 + 19 + 25
