"""The proofs' own greedy decoding against recorded behaviour."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact_policy import GreedyPolicy, Language

pytestmark = pytest.mark.unit

CONTRACT = Path(__file__).parents[1] / "contract"


def language() -> Language:
    vocabulary = json.loads((CONTRACT / "decode_vocab.json").read_text())
    texts: dict[str, str] = vocabulary["text"]
    named: dict[str, int] = vocabulary["named"]
    special = {*named.values(), *vocabulary["other_special_ids"]}
    return Language(
        named=named,
        special_ids=special,
        bad_ids=vocabulary["bad_token_ids"],
        text=lambda ids: "".join(texts[str(id_)] for id_ in ids if id_ not in special),
    )


def greedy_cases() -> Iterator[dict[str, Any]]:
    with gzip.open(CONTRACT / "decode_cases.jsonl.gz", "rt") as file:
        for case in map(json.loads, file):
            if case["sampling"]["greedy"]:
                yield case


def logits_of(row: dict[str, Any]) -> torch.Tensor:
    logits = row["fill"] - torch.arange(64) / 128
    for id_, value in row["set"].items():
        logits[int(id_)] = value
    return logits


def test_recorded_greedy_decoding_is_ours() -> None:
    tokens = 0
    for case in greedy_cases():
        seeded = case["seeded_text"]
        policy = GreedyPolicy(
            language(),
            request_limit=case["max_tokens"],
            turn_ended=not seeded,
            response_open=seeded,
            speech_pending=seeded,
        )
        for unit in case["units"]:
            policy.begin(is_speech=unit["is_speech"], force_listen=unit["force_listen"])
            for row, emitted in zip(unit["rows"], unit["emitted"], strict=True):
                choice = policy.decide(logits_of(row))
                assert choice.emitted == emitted
                policy.accept(choice.sampled, choice.emitted)
                tokens += 1
            state = unit["state_after"]
            assert (policy.turn_ended, policy.speech_pending, policy.response_open) == (
                state["turn_ended"],
                state["speech_pending"],
                state["response_open"],
            )
        assert policy.generated[-512:] == case["penalty_history_after"]
    assert tokens > 1000


def test_a_gap_says_how_far_another_token_is() -> None:
    policy = GreedyPolicy(language())
    policy.begin(is_speech=True)
    row = {"fill": -5.0, "set": {"20": 3.0, "21": 2.5, "7": 1.0}}
    choice = policy.decide(logits_of(row))
    assert choice.sampled == 20
    assert choice.gap(20, policy.chunk_eos) == 0
    assert choice.gap(21, policy.chunk_eos) == pytest.approx(0.5)
    assert choice.gap(policy.chunk_eos, policy.chunk_eos) == pytest.approx(2.0)
    ends = policy.decide(logits_of({"fill": -5.0, "set": {"20": 3.0, "7": 4.0}}))
    assert ends.sampled == policy.chunk_eos
    assert ends.gap(20, policy.chunk_eos) == pytest.approx(1.0)
