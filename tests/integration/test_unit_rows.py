"""The engine core's logits processors on batches as vLLM changes them, without an engine."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from engine_kit import make_engine_checkpoint
from torch.overrides import TorchFunctionMode
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.engine_plugin import talker_processor, thinker_processor
from duplex_sidecar.engine_plugin.ring import RecordFlag, RingReader, StepRecord
from duplex_sidecar.engine_plugin.tap import TAP
from duplex_sidecar.engine_plugin.thinker_processor import ThinkerProcessor
from duplex_sidecar.engine_plugin.unit_args import UnitArgs
from duplex_sidecar.model.minicpmo45 import talker
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    PolicyState,
    Sampling,
    UnitRules,
    encode_rules,
)
from duplex_sidecar.model.minicpmo45.sampling import Choice, UnitRow, choose
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

pytestmark = pytest.mark.integration

VOCABULARY_SIZE, HIDDEN = 1024, 256
POLICY = PolicyState(
    penalty_ids=(),
    turn_ended=False,
    response_open=False,
    speech_pending=False,
    pending_terminator=None,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_engine_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> Vocabulary:
    return load_vocabulary(checkpoint)


def vllm_config(checkpoint: Path, ring: Path) -> Any:
    plugin = {"ring": str(ring), "checkpoint": str(checkpoint)}
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        additional_config={"duplex": plugin},
    )


class Batch:
    """Plays the model runner: rows come and go, `step` gives every row one token."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.reader = RingReader(folder / "ring", 256, 4 * HIDDEN)
        config = vllm_config(checkpoint, folder / "ring")
        self.processor = ThinkerProcessor(config, torch.device("cpu"), False)
        self.outputs: dict[int, list[int]] = {}
        self.size = 0

    def update(
        self,
        removed: Sequence[int] = (),
        added: Sequence[tuple[int, SamplingParams, list[int], list[int]]] = (),
        moved: Sequence[tuple[int, int, MoveDirectionality]] = (),
    ) -> None:
        self.processor.update_state(BatchUpdate(self.size, removed, added, moved))

    def add(self, row: int, params: SamplingParams, base: int = 7) -> list[int]:
        output: list[int] = []
        self.outputs[row] = output
        self.size = max(self.size, row + 1)
        self.update(added=[(row, params, [0] * base, output)])
        return output

    def logits(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        TAP.offer(torch.randn(self.size, HIDDEN, generator=generator))
        return 3 * torch.randn(self.size, VOCABULARY_SIZE, generator=generator)

    def step(self, seed: int, logits: torch.Tensor | None = None) -> list[int]:
        """Logits by seed, greedy sampling, tokens appended to the outputs."""
        given = self.logits(seed) if logits is None else logits
        tokens: list[int] = self.processor.apply(given.clone()).argmax(-1).tolist()
        for row, output in self.outputs.items():
            output.append(tokens[row])
        return tokens

    def records(self) -> list[StepRecord]:
        return self.reader.drain()


@pytest.fixture
def batch(checkpoint: Path, tmp_path: Path) -> Batch:
    return Batch(checkpoint, tmp_path)


def params(
    vocabulary: Vocabulary, stream: int = 1, unit: int = 0, rules: bytes | None = None
) -> SamplingParams:
    if rules is None:
        rules = encode_rules(
            UnitRules(
                policy=POLICY,
                is_speech=True,
                force_listen=False,
                max_tokens=None,
                sampling=GREEDY_SAMPLING,
                seed=f"{stream}:{unit}",
            )
        )
    return SamplingParams(
        temperature=0,
        max_tokens=20,
        stop_token_ids=sorted(vocabulary.terminators),
        extra_args=UnitArgs(stream, unit, rules).as_extra_args(),
    )


def expected(vocabulary: Vocabulary, rows: Sequence[torch.Tensor]) -> Choice:
    """Tokens of one unit from its logits row by row, without any batch."""
    rules = thinker_processor.decode_rules(
        cast("dict[str, bytes]", params(vocabulary).extra_args["duplex"])["rules"], vocabulary
    )
    emitted: list[int] = []
    sampled: list[int] = []
    for row in rows:
        choice = choose(row[None], [UnitRow(rules, emitted, sampled)], vocabulary)
        emitted += choice.emitted_ids
        sampled += choice.sampled_ids
    return Choice(tuple(sampled), tuple(emitted))


def test_a_row_that_is_not_ours_stays_as_it_is(batch: Batch, vocabulary: Vocabulary) -> None:
    batch.add(0, SamplingParams(temperature=0))
    batch.add(1, params(vocabulary))
    logits = batch.logits(1)
    shaped = batch.processor.apply(logits.clone())
    assert torch.equal(shaped[0], logits[0])
    wanted = expected(vocabulary, [logits[1]])
    assert shaped[1].argmax() == wanted.emitted_ids[0]
    assert (shaped[1] == float("-inf")).sum() == VOCABULARY_SIZE - 1


class _Calls(TorchFunctionMode):
    """Counts what is asked of torch, by name; not looks at a tensor's shape or device."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = getattr(func, "__name__", str(func))
        self.names[name] += name != "__get__"
        return func(*args, **(kwargs or {}))


READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")
"""What waits for the device, or comes right behind such a wait."""


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_a_step_waits_for_the_device_as_often_for_one_row_as_for_many(
    checkpoint: Path, tmp_path: Path, vocabulary: Vocabulary, greedy: bool
) -> None:
    """Nothing is asked of torch row by row, whatever else is in the batch: of three reads a step
    one is for broken numbers, one for the tokens and one for the hidden rows."""
    sampling = GREEDY_SAMPLING if greedy else Sampling(False, 0.7, 20, 0.8)
    calls: list[Counter[str]] = []
    for count in (1, 3, 12):
        folder = tmp_path / str(count)
        folder.mkdir()
        batch = Batch(checkpoint, folder)
        for stream in range(count):
            state = msgspec.structs.replace(POLICY, penalty_ids=(5, 30 + stream))
            rules = UnitRules(state, True, False, None, sampling, f"{stream}:0")
            batch.add(stream, params(vocabulary, stream=stream, rules=encode_rules(rules)))
        batch.add(count, SamplingParams(temperature=0))
        logits = batch.logits(count)
        with _Calls() as counted:
            batch.processor.apply(logits)
        calls.append(counted.names)
        assert len(batch.records()) == count
    assert calls[0] == calls[1] == calls[2]
    assert sum(calls[0][name] for name in READS) <= 3


def test_steps_are_published_by_absolute_index(batch: Batch, vocabulary: Vocabulary) -> None:
    output = batch.add(0, params(vocabulary, stream=9, unit=3), base=7)
    hidden: list[torch.Tensor] = []
    for step in range(3):
        logits = batch.logits(step)
        rows = TAP.take()
        assert rows is not None
        hidden.append(rows[0])
        TAP.offer(rows)
        batch.step(step, logits)
    records = batch.records()
    assert [(r.stream, r.unit, r.position) for r in records] == [(9, 3, 7), (9, 3, 8), (9, 3, 9)]
    assert [r.emitted_id for r in records] == output
    assert records[0].payload == b""
    for record, row in zip(records[1:], hidden[1:], strict=True):
        assert record.payload == row.numpy().tobytes()


def test_discarded_and_repeated_steps_count_once(batch: Batch, vocabulary: Vocabulary) -> None:
    """Chunked prefill: the engine throws the token of the first parts away."""
    output = batch.add(0, params(vocabulary))
    good = [batch.logits(seed)[0] for seed in (11, 12, 13)]
    for noise in (21, 22):
        batch.processor.apply(batch.logits(noise))
    for step, row in enumerate(good):
        batch.logits(0)
        batch.step(0, row[None])
        if step == 1:
            # Preempted with two tokens, added again, its prompt computed anew in two parts.
            batch.update(removed=[0])
            batch.update(added=[(0, params(vocabulary), [0] * 7, output)])
            batch.processor.apply(batch.logits(23))
    wanted = expected(vocabulary, good)
    assert tuple(output) == wanted.emitted_ids
    last = {record.position: record for record in batch.records()}
    assert tuple(last[7 + k].sampled_id for k in range(3)) == wanted.sampled_ids


def test_what_was_sampled_survives_a_preemption(batch: Batch, vocabulary: Vocabulary) -> None:
    """Listen while the turn is open is sampled but emitted as tts_bos: nobody can derive it."""
    listens = torch.zeros(1, VOCABULARY_SIZE)
    listens[0, vocabulary.listen] = 9
    output = batch.add(0, params(vocabulary))
    batch.logits(0)
    batch.step(0, listens)
    assert output == [vocabulary.tts_bos]
    batch.update(removed=[0])
    batch.update(added=[(0, params(vocabulary), [0] * 7, output)])
    (unit,) = batch.processor._rows.values()
    assert unit.sampled_ids == [vocabulary.listen]


def test_a_new_unit_starts_empty(batch: Batch, vocabulary: Vocabulary) -> None:
    batch.add(0, params(vocabulary, unit=0))
    batch.step(1)
    batch.step(2)
    batch.update(removed=[0])
    batch.add(0, params(vocabulary, unit=1))
    (unit,) = batch.processor._rows.values()
    assert unit.sampled_ids == []
    row = batch.logits(3)
    assert batch.step(0, row) == list(expected(vocabulary, [row[0]]).emitted_ids)


def test_rows_are_followed_when_they_move(batch: Batch, vocabulary: Vocabulary) -> None:
    first = batch.add(0, params(vocabulary, stream=1))
    second = batch.add(1, params(vocabulary, stream=2))
    rows = [batch.logits(seed) for seed in (1, 2, 3)]
    batch.step(0, rows[0])
    batch.outputs = {0: second, 1: first}
    batch.update(moved=[(0, 1, MoveDirectionality.SWAP)])
    batch.logits(0)
    batch.step(0, rows[1])
    # The request in row 0 ends, the other one takes its place.
    batch.outputs, batch.size = {0: first}, 1
    batch.update(removed=[0], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)])
    batch.logits(0)
    batch.step(0, rows[2])
    wanted = expected(vocabulary, [rows[0][0], rows[1][1], rows[2][0]])
    assert tuple(first) == wanted.emitted_ids
    assert tuple(second) == expected(vocabulary, [rows[0][1], rows[1][0]]).emitted_ids


@pytest.fixture
def policy_with_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises for unit 0 of stream 2, whoever else is in the batch."""
    original = thinker_processor.choose

    def raising(logits: torch.Tensor, rows: Sequence[UnitRow], vocabulary: Vocabulary) -> Choice:
        if any(row.rules.seed == "2:0" for row in rows):
            raise ValueError("a defect of the policy")
        return original(logits, rows, vocabulary)

    monkeypatch.setattr(thinker_processor, "choose", raising)


@pytest.mark.usefixtures("policy_with_a_defect")
def test_an_exception_poisons_one_unit(batch: Batch, vocabulary: Vocabulary) -> None:
    outputs = [batch.add(row, params(vocabulary, stream=row + 1)) for row in range(3)]
    logits = [batch.logits(seed) for seed in (1, 2)]
    for each in logits:
        batch.logits(0)
        batch.step(0, each)
    for row in (0, 2):
        assert tuple(outputs[row]) == expected(vocabulary, [each[row] for each in logits])[1]
    assert outputs[1][0] in vocabulary.terminators
    faults = [record for record in batch.records() if record.flags & RecordFlag.FAULT]
    assert {(fault.stream, fault.unit) for fault in faults} == {(2, 0)}
    assert faults[0].payload == b"ValueError: a defect of the policy"


def test_broken_numbers_poison_one_unit(batch: Batch, vocabulary: Vocabulary) -> None:
    good, bad = (batch.add(row, params(vocabulary, stream=row)) for row in range(2))
    logits = batch.logits(1)
    logits[1, 5] = float("nan")
    batch.step(0, logits)
    assert tuple(good) == expected(vocabulary, [logits[0]]).emitted_ids
    assert bad[0] in vocabulary.terminators
    (fault,) = [record for record in batch.records() if record.flags & RecordFlag.FAULT]
    assert (fault.stream, fault.payload) == (1, b"ArithmeticError: a logit is not a number")


def test_rules_that_cannot_be_read_poison_their_unit(batch: Batch, vocabulary: Vocabulary) -> None:
    good = batch.add(0, params(vocabulary, stream=0))
    bad = batch.add(1, params(vocabulary, stream=1, rules=b"\xc1"))
    logits = batch.logits(1)
    batch.step(0, logits)
    assert tuple(good) == expected(vocabulary, [logits[0]]).emitted_ids
    assert bad[0] in vocabulary.terminators
    assert [r.stream for r in batch.records() if r.flags & RecordFlag.FAULT] == [1]


def test_a_lost_history_poisons_its_unit(batch: Batch, vocabulary: Vocabulary) -> None:
    output = [5, 6]
    batch.size, batch.outputs = 1, {0: output}
    batch.update(added=[(0, params(vocabulary), [0] * 7, output)])
    batch.step(1)
    assert output[-1] in vocabulary.terminators
    (fault,) = batch.records()
    assert b"incomplete" in fault.payload


def test_hidden_rows_that_do_not_come_poison_all_units(
    batch: Batch, vocabulary: Vocabulary
) -> None:
    output = batch.add(0, params(vocabulary))
    logits = batch.logits(1)
    TAP.take()
    batch.step(0, logits)
    assert output[0] in vocabulary.terminators
    assert batch.records()[0].flags & RecordFlag.FAULT


def test_the_history_of_closed_streams_is_forgotten(batch: Batch, vocabulary: Vocabulary) -> None:
    for stream in range(100):
        batch.add(0, params(vocabulary, stream=stream))
        batch.step(stream)
    assert len(batch.processor._histories) == 16


def test_admission_refuses_parameters_that_could_not_end(vocabulary: Vocabulary) -> None:
    good = params(vocabulary)
    ThinkerProcessor.validate_params(good)
    ThinkerProcessor.validate_params(SamplingParams())
    for wrong in (
        SamplingParams(temperature=0, extra_args=good.extra_args),
        SamplingParams(temperature=1, stop_token_ids=[1], extra_args=good.extra_args),
        SamplingParams(temperature=0, stop_token_ids=[1], extra_args={"duplex": 5}),
        SamplingParams(temperature=0, stop_token_ids=[1], extra_args={"duplex": {"unit": 1}}),
    ):
        with pytest.raises(ValueError, match="duplex"):
            ThinkerProcessor.validate_params(wrong)


def test_the_talker_publishes_faults_only(checkpoint: Path, tmp_path: Path) -> None:
    reader = RingReader(tmp_path / "ring", 64, 0)
    processor = talker_processor.TalkerProcessor(
        vllm_config(checkpoint, tmp_path / "ring"), torch.device("cpu"), False
    )
    rules = talker.UnitRules(talker.UnitKind.MID, (), GREEDY_SAMPLING, "s")
    outputs: list[list[int]] = [[], []]
    added = [
        (
            row,
            SamplingParams(
                temperature=0,
                stop_token_ids=[talker.CODEC_EOS],
                extra_args=UnitArgs(row, 0, talker.encode_rules(rules)).as_extra_args(),
            ),
            [0] * 4,
            outputs[row],
        )
        for row in range(2)
    ]
    processor.update_state(BatchUpdate(2, [], added, []))
    logits = torch.randn(2, talker.CODEC_SIZE, generator=torch.Generator().manual_seed(0))
    logits[1, 9] = float("nan")
    best = int(logits[0, :-1].argmax())
    assert processor.apply(logits).argmax(-1).tolist() == [best, talker.CODEC_EOS]
    (fault,) = reader.drain()
    assert (fault.stream, fault.flags) == (1, RecordFlag.FAULT)
