"""What a session keeps of its units, in memory and in the ledger."""

import contextlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fake_stage import HIDDEN, rows
from session_kit import MODEL, PROMPT, VOCABULARY, Terms, encode, with_camera

from duplex_api.resolve import resolve_session
from duplex_api.window import WindowBoundary, WindowLimits, WindowMode
from duplex_sidecar.framing.append import NEW_FRAMER
from duplex_sidecar.ledger.records import Opening
from duplex_sidecar.ledger.writing import encode_record
from duplex_sidecar.model.minicpmo45.constants import UNIT_SAMPLES
from duplex_sidecar.model.minicpmo45.decode import GREEDY_SAMPLING, initial_state
from duplex_sidecar.model.minicpmo45.framing import reserve_append
from duplex_sidecar.session.conversation import (
    Conversation,
    decode_conversation,
    encode_conversation,
    first_conversation,
)
from duplex_sidecar.session.opening import (
    UnservedManifestError,
    facts_of,
    opening_of,
    require_served,
    terms_of,
)
from duplex_sidecar.session.prompting import plan_after
from duplex_sidecar.session.recording import RECORDS_KEPT_UNITS, trim_after, unit_seed
from duplex_sidecar.session.rows import (
    RetainedUnits,
    RowsMismatch,
    RowsMissing,
    StoredRows,
    decode_rows,
    encode_rows,
    history_of,
    split_chunks,
)
from duplex_sidecar.stages.envelope import ElementType, EncoderRows, Ids, Rows, Tensor
from duplex_sidecar.window.parts import BlockKind, MediaKind, MediaPart, TextPart
from duplex_sidecar.window.state import Extend, Overflow, Rebuild, WindowState, WindowUnit

pytestmark = pytest.mark.unit


def audio(*names: bytes) -> Tensor:
    return rows(*(name + b"%d" % k for name in names for k in range(10)))


def stored(name: bytes, blocks: tuple[BlockKind, ...] = ()) -> StoredRows:
    vision = tuple(
        rows(*(name + b"v%d %d" % (b, k) for k in range(64))) for b in range(len(blocks))
    )
    return StoredRows(blocks, (audio(name),), vision)


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_cut_by_chunk_and_come_back_from_the_ledger() -> None:
    given = EncoderRows(1, audio(b"a", b"b"), (rows(*[b"v"] * 64),), False, 0)
    cut = split_chunks(given, 2, (BlockKind.SOURCE,))
    assert cut.audio == (audio(b"a"), audio(b"b"))
    assert decode_rows(encode_rows(cut)) == cut


@pytest.mark.parametrize(
    ("count", "chunks", "blocks"), [(10, 0, 0), (11, 2, 0), (10, 1, 1), (20, 3, 0)]
)
def test_other_rows_than_reserved_are_refused(count: int, chunks: int, blocks: int) -> None:
    tensor = Tensor(ElementType.FLOAT32, (count, HIDDEN), bytes(4 * HIDDEN * count))
    with pytest.raises(RowsMismatch):
        split_chunks(EncoderRows(1, tensor, (), False, 0), chunks, (BlockKind.SOURCE,) * blocks)


def test_retained_units_hold_what_they_are_told_and_nothing_else() -> None:
    retained = RetainedUnits()
    for seq in (1, 2, 3):
        retained.put_rows(seq, stored(b"%d" % seq, (BlockKind.SOURCE,)))
        assert not retained.holds([seq]), "not complete yet"
        retained.complete(history_of(seq, retained.rows_of(seq), (7,), 2))
    assert retained.holds([1, 2, 3])
    assert (len(retained), retained.held_bytes) == (3, 3 * 74 * 4 * HIDDEN)
    parts = retained.resolve(
        [
            TextPart((1, 2)),
            MediaPart(MediaKind.AUDIO, 2, 0, 10),
            MediaPart(MediaKind.VISION, 3, 0, 64),
        ]
    )
    assert parts == (
        Ids((1, 2)),
        Rows(audio(b"2")),
        Rows(stored(b"3", (BlockKind.SOURCE,)).vision[0]),
    )
    retained.keep_only([2])
    assert [unit.input.seq for unit in retained.history([2])] == [2]
    for wrong in (
        MediaPart(MediaKind.AUDIO, 1, 0, 10),
        MediaPart(MediaKind.AUDIO, 2, 1, 10),
        MediaPart(MediaKind.AUDIO, 2, 0, 9),
        MediaPart(MediaKind.VISION, 2, 1, 64),
    ):
        with pytest.raises(RowsMissing):
            retained.resolve([wrong])
    for ask in (lambda: retained.rows_of(1), lambda: retained.history([1, 2])):
        with pytest.raises(RowsMissing):
            ask()
    retained.keep_only([])
    assert (len(retained), retained.held_bytes) == (0, 0)


# --- the opening ----------------------------------------------------------------------------------

SEALED: dict[str, Any] = {
    "schema": 1,
    "rows": (),
    "state_sha256": "0" * 64,
    "replica": "replica",
    "at_ms": 1_800_000_000_000,
    "prev_hash": "0" * 64,
}
"""What the ledger adds to a draft."""


@pytest.mark.parametrize("mode", list(WindowMode))
def test_a_session_reads_from_its_opening_what_it_was_opened_with(mode: WindowMode) -> None:
    terms = with_camera(Terms(mode.value, greedy=True, grace="7s"))
    limits = WindowLimits(max_model_tokens=MODEL.max_model_tokens)
    resolved = resolve_session(terms.manifest().spec, None, limits)
    require_served(resolved, MODEL)
    draft, conversation = opening_of("s", resolved, MODEL, "00-0-0-01")
    draft = msgspec.json.decode(msgspec.json.encode(draft), type=type(draft))
    facts, kept = facts_of(draft, MODEL), terms_of(draft)
    assert facts.prompt.prefix_ids == encode(f"<|im_start|>system\n{PROMPT}")
    assert facts.prompt.suffix_ids == encode("<|im_end|>")
    assert facts.layout.context_tokens == len(facts.prompt.prefix_ids) + 1
    assert (facts.policy.mode, facts.policy.context_max_units) == (mode, terms.max_units)
    assert (facts.seed, facts.sampling) == (42, GREEDY_SAMPLING)
    assert (kept.camera.frames_per_unit, kept.lifecycle.disconnect_grace_ms) == (2, 7_000)
    assert kept.voice == "default"
    assert decode_conversation(encode_conversation(conversation)) == conversation
    assert unit_seed(facts, 3) != unit_seed(facts, 4)


def test_what_is_not_served_is_named() -> None:
    manifest = Terms("context").manifest()
    spec = manifest.spec.model_copy(
        update={"window": manifest.spec.window.model_copy(update={"strategy": "shift"})}  # type: ignore[union-attr]
    )
    with pytest.raises(UnservedManifestError) as error:
        require_served(resolve_session(spec, None, WindowLimits(8192)), MODEL)
    assert [problem.path for problem in error.value.problems] == ["spec.window.strategy"]


@pytest.mark.parametrize("field", ["prompt", "initialText"])
@pytest.mark.parametrize(("max_tokens", "longest"), [(8_192, 8_100), (1 << 20, 50_000)])
def test_a_context_that_cannot_be_opened_is_refused(
    field: str, max_tokens: int, longest: int
) -> None:
    model = replace(MODEL, max_model_tokens=max_tokens)
    spec = Terms("context").manifest().spec

    def opened(characters: int) -> int:
        """Tokens of the context, of which the kit has one a byte."""
        name = "initial_text" if field == "initialText" else field
        resolved = resolve_session(
            spec.model_copy(update={name: "x" * characters}), None, WindowLimits(max_tokens)
        )
        require_served(resolved, model)
        draft, _ = opening_of("s", resolved, model, "")
        encode_record("s", Opening(**msgspec.structs.asdict(draft), **SEALED))
        return facts_of(draft, model).layout.context_tokens

    with pytest.raises(UnservedManifestError) as error:
        opened(longest * 2)
    (problem,) = error.value.problems
    assert problem.path == f"spec.{field}"
    assert "makes a context of" in problem.message
    fits = int(problem.allowed.split()[2])
    assert longest < fits < longest * 2
    beside = opened(1) - 1
    assert fits - 20 <= opened(fits - beside - 10) <= fits
    with pytest.raises(UnservedManifestError):
        opened(fits - beside + 1_000)


def test_a_context_leaves_room_for_one_unit() -> None:
    spec = Terms("context").manifest().spec
    plain = resolve_session(spec, None, WindowLimits(8_192))
    least = 0
    for tokens in range(1, 400):
        with contextlib.suppress(UnservedManifestError):
            require_served(plain, replace(MODEL, max_model_tokens=tokens))
            least = tokens
            break
    for tokens, planned in ((least - 1, Overflow), (least, Extend | Rebuild)):
        draft, conversation = opening_of("s", plain, replace(MODEL, max_model_tokens=tokens), "")
        facts = facts_of(draft, replace(MODEL, max_model_tokens=tokens))
        slots = reserve_append(1, UNIT_SAMPLES, (), facts.layout.context_tokens).slots
        assert isinstance(plan_after(facts, conversation, slots, None)[0], planned)


def test_without_a_seed_each_session_has_its_own() -> None:
    manifest = Terms("off").manifest()
    spec = manifest.spec.model_copy(update={"sampling": None})
    resolved = resolve_session(spec, None, WindowLimits(8192))
    seeds = {opening_of("s", resolved, MODEL, "")[0].seed for _ in range(20)}
    assert len(seeds) == 20


# --- what a commit may drop -----------------------------------------------------------------------


def after(seq: int, first_unit: int | None, mark_samples: int) -> Conversation:
    units = range(first_unit, seq) if first_unit is not None else ()
    window = WindowState(
        prompt_tokens=100,
        open_start=50,
        units=tuple(WindowUnit(unit, 13, (), WindowBoundary.UNIT) for unit in units),
        unit_tokens=13 * len(units),
        previous_ids=(),
    )
    start = first_conversation(initial_state(seeded_text=False), NEW_FRAMER)
    return msgspec.structs.replace(start, seq=seq, window=window, encoder_mark_samples=mark_samples)


@pytest.mark.parametrize("mode", list(WindowMode))
@pytest.mark.parametrize("seq", [1, 2, 30, 1_201, 1_202, 5_000])
@pytest.mark.parametrize("retained", [None, 0, 24])
@pytest.mark.parametrize("heard", [0, 3, 58])
def test_a_trim_never_drops_what_a_redo_or_a_restore_needs(
    mode: WindowMode, seq: int, retained: int | None, heard: int
) -> None:
    first = None if retained is None else max(1, seq - retained)
    state = after(seq, first if first is not None and first < seq else None, 0)
    mark = 16_000 * max(0, seq - heard)
    trim = trim_after(mode, msgspec.structs.replace(state, encoder_mark_samples=mark))
    trim.check(seq)
    kept = {unit.seq for unit in state.window.units} | {seq}
    assert trim.window_below <= min(kept)
    assert trim.pcm_below <= max(1, mark // 16_000)
    assert trim.records_below <= min(*kept, trim.pcm_below, max(1, seq - RECORDS_KEPT_UNITS))
    if mode is WindowMode.OFF:
        assert (trim.window_below, trim.records_below) == (1, 1)


def test_the_vocabulary_of_these_tests_is_whole() -> None:
    assert len(VOCABULARY.token_bytes) == len({*VOCABULARY.token_bytes})
