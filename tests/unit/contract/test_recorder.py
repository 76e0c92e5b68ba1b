"""Tapes and what is measured from them: small tapes by hand. Whole sessions are in the integration
tier."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplex_sidecar.cli.contract import check, record
from duplex_sidecar.contract.check import check_file
from duplex_sidecar.contract.recorder import NOT_RECORDED, RECORDED
from duplex_sidecar.contract.recorder_layout import runs, toy_encode
from duplex_sidecar.contract.recorder_tape import (
    SCHEMA,
    ConditionOf,
    Cut,
    EncoderFed,
    Entry,
    Fault,
    Opening,
    RowsOf,
    TalkerFed,
    TapeError,
    ThinkerAnswered,
    ThinkerFed,
    WaveFed,
    WindowTerms,
    digest,
    encode_entry,
    read_tape,
    row_digests,
)
from duplex_sidecar.contract.vocabulary_file import (
    VOCABULARY_NAME,
    encode_vocabulary,
    recorded_vocabulary,
)
from duplex_sidecar.contract.window_cases import toy_encode as checked_toy_encode
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary
from duplex_sidecar.stages.envelope import ElementType, Tensor

pytestmark = pytest.mark.unit

CONTROLS = tuple(ControlToken)
HALF, OTHER_HALF = 19 + 256, 19 + 257
VOCABULARY = Vocabulary(
    control_ids={token: id_ for id_, token in enumerate(CONTROLS)},
    special_ids=frozenset({19 + 258}),
    bad_ids=frozenset({3}),
    token_bytes=(
        *(token.value.encode() for token in CONTROLS),
        *(bytes([byte]) for byte in range(256)),
        "é".encode()[:1],
        "é".encode()[1:],
        b"<|odd|>",
    ),
)
ODD = 19 + 258
V = VOCABULARY


def ids(text: str) -> tuple[int, ...]:
    found: list[int] = []
    while text:
        token = next((t for t in CONTROLS if text.startswith(t.value)), None)
        found.append(19 + ord(text[0]) if token is None else CONTROLS.index(token))
        text = text[1 if token is None else len(token.value) :]
    return tuple(found)


def opening(mode: str = "context", fence: int = 1, **window: Any) -> Opening:
    terms = {
        "mode": mode,
        "basic_high": 60,
        "basic_low": 45,
        "context_previous_max": 3,
        "context_max_units": 2,
        "hysteresis_units": 1,
        "boundary": "unit",
    }
    return Opening(
        schema=SCHEMA,
        session="s",
        replica="r",
        fence=fence,
        prefix_ids=ids("<|im_start|>system\nA"),
        suffix_ids=ids("<|im_end|>"),
        marker_ids=ids("\n\nprevious: "),
        window=WindowTerms(**(terms | window)),
        max_model_tokens=4096,
        max_talker_tokens=400,
    )


PREFIX, SUFFIX, MARKER = (
    opening().prefix_ids,
    opening().suffix_ids,
    opening().marker_ids,
)
CLOSE = (V.unit_end,)


def audio(unit: int) -> RowsOf:
    return RowsOf(10, digest(b"%d" % unit))


def heard(unit: int) -> EncoderFed:
    first = unit == 1
    return EncoderFed(
        unit=unit,
        samples=16_560 if first else 16_000,
        padding_samples=560 if first else 0,
        frames=(),
        discard=False,
        generation=1,
        rows=(audio(unit),),
        fault=None,
    )


def thought(
    unit: int,
    stream: str,
    position: int,
    parts: tuple[Any, ...],
    said: tuple[int, ...],
    *,
    opens: bool = False,
    generation: int = 1,
) -> ThinkerFed:
    hidden = tuple(digest(b"%d:%d" % (unit, k)) for k in range(len(said) - 1))
    return ThinkerFed(
        unit=unit,
        stream=stream,
        opens=opens,
        position=position,
        parts=parts,
        generation=generation,
        answer=ThinkerAnswered(said, said, hidden),
        fault=None,
    )


LISTENS = (V.listen,)
SAYS = (V.speak, *ids("ab"), V.chunk_eos)
UNIT = (V.unit,)
CONTEXT = len(PREFIX) + len(SUFFIX)
OPENS = len(PREFIX) + len(SUFFIX) + 11


def session_of_four() -> list[Entry]:
    """Two units extend, the window of two is full, and the fourth one slides."""
    first = thought(1, "a", 0, (PREFIX, SUFFIX, UNIT, audio(1)), SAYS, opens=True)
    second = thought(2, "a", OPENS + 3, ((V.chunk_eos, *CLOSE, *UNIT), audio(2)), LISTENS)
    third = thought(3, "a", OPENS + 16, ((V.listen, *CLOSE, *UNIT), audio(3)), LISTENS)
    # Ahead: context with what unit 1 said, units 2 and 3 closed; then unit 4.
    history = (
        (*PREFIX, *MARKER, *ids("ab"), *SUFFIX, *UNIT),
        audio(2),
        (V.listen, *CLOSE, *UNIT),
        audio(3),
        (V.listen, *CLOSE),
    )
    length = CONTEXT + len(MARKER) + 2 + 26
    ahead = thought(3, "b", 0, history, LISTENS, opens=True)
    fourth = thought(4, "b", length, (UNIT, audio(4)), LISTENS)
    spoken = spoke(1, "start", 0, "ab", 20, opens=True)
    inputs = [heard(unit) for unit in range(1, 5)]
    return [opening(), *inputs, first, second, third, ahead, fourth, spoken]


def write(folder: Path, entries: list[Entry], name: str = "s.1.tape.jsonl") -> Path:
    (folder / VOCABULARY_NAME).write_bytes(encode_vocabulary(VOCABULARY))
    path = folder / name
    path.write_bytes(b"".join(encode_entry(entry) + b"\n" for entry in entries))
    return path


def recorded(folder: Path, kind: str) -> Any:
    return json.loads((folder / "out" / f"{kind}.jsonl").read_text())


def differing(folder: Path) -> set[str]:
    return {p.stem for p in (folder / "out").glob("*.jsonl") if check_file(p).differences}


# --- what is measured -----------------------------------------------------------------------------


def test_a_slide_is_measured_from_two_prompts(tmp_path: Path) -> None:
    assert record(write(tmp_path, session_of_four()), output=tmp_path / "out") == 0
    planner = recorded(tmp_path, "planner_sessions")
    assert planner["opening_prompt_len"] == OPENS
    assert [append["generated_ids"] for append in planner["appends"]] == [list(SAYS[:-1]), [], []]
    assert [append["update_len"] for append in planner["appends"]] == [13, 13, 13]
    slide = planner["expected"][2]
    assert slide["action"] == "rebuild"
    assert (slide["drop_units"], slide["dropped_tokens"]) == (1, 16)
    assert slide["previous_ids"] == list(ids("ab"))
    assert slide["retained_unit_lens"] == [13, 13]
    layout = recorded(tmp_path, "layout_sessions")
    assert layout["instructions"] == "A"
    assert layout["appends"][3]["expected"]["action"] == "rebuild"
    assert differing(tmp_path) == set()


def test_a_prompt_that_was_fed_whole_again_is_an_extension(tmp_path: Path) -> None:
    entries = session_of_four()
    third = (
        (*PREFIX, *SUFFIX, *UNIT),
        audio(1),
        (*SAYS, *CLOSE, *UNIT),
        audio(2),
        (V.listen, *CLOSE, *UNIT),
        audio(3),
    )
    entries[7] = thought(3, "c", 0, third, LISTENS, opens=True, generation=2)
    entries[8] = msgspec.structs.replace(entries[8], generation=2)
    entries[9] = msgspec.structs.replace(entries[9], generation=2)
    assert record(write(tmp_path, entries), output=tmp_path / "out") == 0
    expected = recorded(tmp_path, "planner_sessions")["expected"][1]
    assert expected["action"] == "extend"
    assert "fed whole" in expected["note"]
    assert differing(tmp_path) == set()


def one_token_less(part: Any) -> Any:
    return part[:-1]


def another_text(part: Any) -> Any:
    """`previous` says "cb" instead of "ab"."""
    return tuple(ids("c")[0] if id_ == ids("a")[0] else id_ for id_ in part)


@pytest.mark.parametrize("change", [one_token_less, another_text])
def test_another_prompt_is_a_difference(change: Any, tmp_path: Path) -> None:
    entries = session_of_four()
    ahead = entries[8]
    assert isinstance(ahead, ThinkerFed)
    spoilt = (change(ahead.parts[0]), *ahead.parts[1:])
    entries[8] = msgspec.structs.replace(ahead, parts=spoilt)
    lost = len(ahead.parts[0]) - len(spoilt[0])
    entries[9] = msgspec.structs.replace(entries[9], position=entries[9].position - lost)
    record(write(tmp_path, entries), output=tmp_path / "out")
    assert differing(tmp_path) == {"planner_sessions", "layout_sessions"}
    assert check(*(tmp_path / "out").glob("*.jsonl")) == 1


def test_rows_that_are_not_the_units_own_are_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = session_of_four()
    ahead = entries[8]
    assert isinstance(ahead, ThinkerFed)
    swapped = list(ahead.parts)
    swapped[1], swapped[3] = swapped[3], swapped[1]
    entries[8] = msgspec.structs.replace(ahead, parts=tuple(swapped))
    entries[6] = msgspec.structs.replace(entries[6], parts=(entries[6].parts[0], audio(9)))
    assert record(write(tmp_path, entries), output=tmp_path / "out") == 1
    shown = capsys.readouterr().err
    assert "unit 2: its rows are not those that the encoder gave" in shown
    assert "unit 4: an earlier unit in its prompt is not what it was" in shown


def spoke(unit: int, kind: str, position: int, text: str, codes: int, **more: Any) -> TalkerFed:
    condition = ConditionOf(
        ids(text), tuple(digest(b"%d:%d" % (unit, k + 1)) for k in range(len(text)))
    )
    return TalkerFed(
        unit=unit,
        stream=more.pop("stream", "t"),
        opens=more.pop("opens", False),
        position=position,
        parts=(*more.pop("before", ()), condition),
        kind=kind,
        recent_codes=more.pop("recent", ()),
        generation=more.pop("generation", 1),
        codes=tuple(range(codes)),
        fault=None,
    )


def wave(unit: int, epoch: int, sequence: int, codes: tuple[int, ...], **more: Any) -> WaveFed:
    return WaveFed(
        unit=unit,
        turn=1,
        epoch=epoch,
        sequence=sequence,
        codes=codes,
        code_count=len(codes),
        last_chunk=more.pop("last", False),
        generation=more.pop("generation", 1),
        samples=more.pop("samples", 100),
        fault=more.pop("fault", None),
    )


SILENCE = (4218,) * 3


def voiced(talker: list[TalkerFed], waves: list[WaveFed], says: int) -> list[Entry]:
    """A session whose first units speak. says: how many."""
    entries: list[Entry] = [opening("off")]
    position = 0
    for unit in range(1, says + 1):
        head = (*PREFIX, *SUFFIX, *UNIT) if unit == 1 else (V.chunk_eos, *CLOSE, *UNIT)
        parts = (head, audio(unit))
        entries += [heard(unit), thought(unit, "a", position, parts, SAYS, opens=unit == 1)]
        position += len(head) + 10 + 3
    return [*entries, *talker, *waves]


def test_what_the_talker_said_and_the_vocoder_took(tmp_path: Path) -> None:
    talker = [
        spoke(1, "start", 0, "ab", 20, opens=True),
        spoke(2, "mid", 23, "ab", 25, recent=tuple(range(4, 20))),
    ]
    first = (*SILENCE, *range(20))
    second = (17, 18, 19, *range(25))
    refused = Fault("out_of_order", "stale_or_reordered_chunk")
    waves = [
        wave(1, 0, 0, first),
        wave(2, 0, 1, second),
        wave(2, 0, 3, second, fault=refused, samples=None),
    ]
    assert record(write(tmp_path, voiced(talker, waves[:2], 2)), output=tmp_path / "out") == 0
    assert differing(tmp_path) == set()
    handoff = recorded(tmp_path, "handoff_sessions")["steps"][1]["expected"]
    assert (handoff["ids"], handoff["hidden_rows"]) == (list(ids("ab")), [1, 2])
    assert handoff["text"] == "ab"
    assert recorded(tmp_path, "talker_context_sessions")["steps"] == [
        {
            "confirmed_codes": 20,
            "condition_seq": 1,
            "condition_len": 3,
            "reserve": 26,
            "turn_start": False,
            "expected": {"action": "extend", "prompt_len_after": 26},
        }
    ]
    # A chunk out of order is refused by that very name.
    record(write(tmp_path, voiced(talker, waves, 2)), output=tmp_path / "out")
    assert "consumer_sessions" not in differing(tmp_path)
    assert recorded(tmp_path, "consumer_sessions")["steps"][2]["expected"] == {
        "accepted": False,
        "reason": "stale_or_reordered_chunk",
        "codes_to_vocoder": 0,
        "state": {"epoch": 0, "seq": 1},
    }


def test_a_lost_talker_begins_another_line_at_the_next_reply(tmp_path: Path) -> None:
    condition = ConditionOf(ids("ab"), (digest(b"1:1"), digest(b"1:2")))
    talker = [
        spoke(1, "start", 0, "ab", 20, opens=True),
        spoke(
            2,
            "mid",
            0,
            "ab",
            25,
            opens=True,
            recent=(1,),
            generation=2,
            stream="u",
            before=(condition, tuple(range(20))),
        ),
        spoke(3, "start", 0, "ab", 20, opens=True, generation=2, stream="v"),
        spoke(4, "mid", 23, "ab", 25, recent=(1,), generation=2, stream="v"),
    ]
    assert record(write(tmp_path, voiced(talker, [], 4)), output=tmp_path / "out") == 0
    lines = (tmp_path / "out" / "talker_context_sessions.jsonl").read_text().splitlines()
    assert [(json.loads(line)["id"], len(json.loads(line)["steps"])) for line in lines] == [
        ("s", 0),
        ("s#2", 1),
    ]
    assert "talker_context_sessions" not in differing(tmp_path)


# --- what cannot be used or said ------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"hysteresis_units": 2}, {"boundary": "turn"}])
def test_options_that_the_schema_lacks_are_left_out(
    option: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = session_of_four()
    entries[0] = opening(**option)
    assert record(write(tmp_path, entries), output=tmp_path / "out") == 0
    assert not (tmp_path / "out" / "planner_sessions.jsonl").exists()
    assert "hysteresisUnits and boundary" in capsys.readouterr().err


def test_a_special_id_without_a_name_has_no_place_in_the_toy_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [*session_of_four()[:6], spoke(1, "start", 0, "ab", 20, opens=True)]
    entries[5] = thought(1, "a", 0, (PREFIX, SUFFIX, UNIT, audio(1)), (ODD, *SAYS), opens=True)
    more = ((V.chunk_eos, *CLOSE, *UNIT), audio(2))
    entries.append(thought(2, "a", OPENS + 4, more, LISTENS))
    assert record(write(tmp_path, entries), output=tmp_path / "out") == 0
    assert not (tmp_path / "out" / "layout_sessions.jsonl").exists()
    assert "special id" in capsys.readouterr().err
    assert "planner_sessions" not in differing(tmp_path)


def test_a_cut_tape_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, [*session_of_four(), Cut(77)])
    assert record(path, output=tmp_path / "out") == 0
    assert "left out: s: from unit 5 on: the tape was cut at 77 bytes" in capsys.readouterr().err


def test_a_line_that_a_killed_sidecar_left_half_is_no_line(tmp_path: Path) -> None:
    path = write(tmp_path, session_of_four())
    path.write_bytes(path.read_bytes() + b'{"type":"thin')
    assert len(read_tape(path)) == len(session_of_four())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "does not begin with an opening"),
        (b'{"type":"cut","at_bytes":3}\n', "does not begin with an opening"),
        (b"{}\n", "line 1"),
        (encode_entry(msgspec.structs.replace(opening(), schema=SCHEMA + 1)) + b"\n", "newer"),
    ],
)
def test_what_is_no_tape_is_named(
    content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, [])
    path.write_bytes(content)
    assert record(path, output=tmp_path / "out") == 2
    assert problem in capsys.readouterr().err


def test_tapes_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path, session_of_four())
    same = write(tmp_path, session_of_four(), "copy.tape.jsonl")
    assert record(one, same, output=tmp_path / "out") == 2
    assert "two tapes of session s with fence 1" in capsys.readouterr().err
    (tmp_path / VOCABULARY_NAME).unlink()
    assert record(one, output=tmp_path / "out") == 2
    assert VOCABULARY_NAME in capsys.readouterr().err
    assert record(output=tmp_path / "out") == 2
    assert record(tmp_path / "nothing.tape.jsonl", output=tmp_path / "out") == 2


def test_a_position_that_a_stream_does_not_hold_is_a_contradiction(tmp_path: Path) -> None:
    entries = session_of_four()
    entries[7] = msgspec.structs.replace(entries[7], position=3)
    assert record(write(tmp_path, entries), output=tmp_path / "out") == 2
    with pytest.raises(TapeError, match="does not hold 3 positions"):
        raise_from(tmp_path)


def raise_from(folder: Path) -> None:
    from duplex_sidecar.contract.recorder import record as write_traces

    write_traces([folder / "s.1.tape.jsonl"], folder / "out")


# --- small things ---------------------------------------------------------------------------------


def test_the_vocabulary_of_a_tape_holds_parts_of_characters(tmp_path: Path) -> None:
    (tmp_path / VOCABULARY_NAME).write_bytes(encode_vocabulary(VOCABULARY))
    again = recorded_vocabulary(tmp_path / "x.jsonl")
    assert again == VOCABULARY
    assert again.text((HALF, OTHER_HALF)) == "é"


def test_the_toy_tokenizer_is_the_checks() -> None:
    text = "<|im_start|>system\nA é <image> x</unit"
    assert toy_encode(text) == checked_toy_encode(text)
    assert runs([1, 1, 2, 1]) == [[1, 2], [2, 1], [1, 1]]


def test_rows_are_told_apart_one_by_one() -> None:
    data = bytes(range(24))
    one, two = row_digests(Tensor(ElementType.FLOAT32, (2, 3), data))
    assert (one, two) == (digest(data[:12]), digest(data[12:]))
    assert one != two


def test_the_list_says_what_is_recorded_and_what_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(list_=True) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in RECORDED)
    assert all(subject in shown for subject in NOT_RECORDED)
    assert "decode_cases, talker_steps: logits do not leave the engines" in shown
