"""The proofs' own layout against recorded behaviour, so that both sides of a proof stand on it."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.exact_layout import (
    Answer,
    Conversation,
    Position,
    Window,
    image_kinds,
    script_of,
    unit_input,
)

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).parents[1] / "contract" / "layout_sessions.jsonl.gz"
NAMES = [
    "<unit>",
    "</unit>",
    "<|listen|>",
    "<|speak|>",
    "<|tts_bos|>",
    "<|tts_eos|>",
    "<|tts_pad|>",
    "<|chunk_eos|>",
    "<|chunk_tts_eos|>",
    "<|turn_eos|>",
    "<|audio|>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
]
NAMED = {name: number for number, name in enumerate(NAMES, start=1)}
AUDIO = (NAMED["<|audio|>"],) * 10
IMAGE = (0,) * 64


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        name = next((name for name in NAMES if text.startswith(name)), text[0])
        ids.append(NAMED.get(name, 1000 + ord(name[0])))
        text = text[len(name) :]
    return ids


def runs(positions: Sequence[Position]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for place in positions:
        if found and found[-1][0] == place:
            found[-1][1] += 1
        else:
            found.append([place, 1])
    return found


def recorded() -> Iterator[dict[str, Any]]:
    with gzip.open(RECORDED, "rt") as file:
        yield from map(json.loads, file)


def plain_sessions() -> list[dict[str, Any]]:
    """Those without a reference voice and seeded text: what the proofs speak with."""
    return [
        session
        for session in recorded()
        if session["ref_samples"] is None and session["initial_user_text"] is None
    ]


def test_recorded_layouts_are_ours() -> None:
    compared = slides = 0
    for session in plain_sessions():
        policy = session["policy"]
        window = Window(
            policy["mode"],
            policy["basic_high"],
            policy["basic_low"],
            policy["context_previous_max"],
            policy["context_max_units"],
        )
        script = script_of(NAMED, set(NAMED.values()), encode, session["instructions"])
        conversation = Conversation(script, window)
        held: tuple[Position, ...] = ()
        carry = 0
        for append in session["appends"]:
            expected = append["expected"]
            if not expected.get("lengths_agree") or "upstream_quirk" in expected:
                break  # it overflows, or a terminator that the recorded planner counts is missing
            chunks, carry = split(append["seq"], carry, append["samples"])
            kinds = image_kinds([tuple(size) for size in append["frames"]])
            pending = unit_input(script, kinds, [IMAGE] * len(kinds), [AUDIO] * chunks)
            before = None
            if append["seq"] > 1:
                before = Answer(tuple(append["completed_ids"]), append["completed_terminator"])
            placed = conversation.append(pending, before)
            new = placed.context
            if placed.extends:
                assert before is not None
                assert new[: len(held)] == held
                assert new[len(held) :][: len(before.ids)] == before.ids
                new = new[len(held) + len(before.ids) :]
            assert runs(new) == expected["layout"]
            assert (placed.dropped, len(placed.context)) == (
                expected["drop_units"],
                expected["prompt_len_after"],
            )
            held = placed.context
            compared += 1
            slides += placed.dropped > 0
    assert compared > 500
    assert slides > 100


def split(seq: int, carry: int, samples: int) -> tuple[int, int]:
    """(chunks, samples left over)"""
    waiting, chunks = carry + samples, 0
    if seq == 1:
        waiting, chunks = max(waiting, 16_560) - 16_560, 1
    return chunks + waiting // 16_000, waiting % 16_000
