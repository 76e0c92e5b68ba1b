"""Producer and consumer of stage-2 chunks, alone and against each other."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from duplex_sidecar.model.minicpmo45.consumer import (
    INITIAL_STREAM_STATE,
    ChunkHeader,
    Refusal,
    StreamState,
    admit,
    open_epoch,
    reference_refusal,
)
from duplex_sidecar.model.minicpmo45.producer import (
    INITIAL_PRODUCER_STATE,
    Chunk,
    CodeRecord,
    ControlOnly,
    ProducerState,
    new_epoch,
    produce,
    produce_unit,
)

pytestmark = pytest.mark.unit

SILENCE = (4218, 4218, 4218)
VOICE = "default"


def unit(
    codes: int, *, turn_end: bool = False, turn: int = 0, source: int = 0, first: int = 0
) -> CodeRecord:
    numbered = tuple(range(first, first + codes))
    return CodeRecord(source, (0, turn), numbered, True, turn_end, f"{codes} codes")


def chunks(state: ProducerState, record: CodeRecord) -> tuple[list[Chunk], ProducerState]:
    outputs, after = produce_unit(state, record)
    assert not any(isinstance(output, ControlOnly) for output in outputs)
    return [output for output in outputs if isinstance(output, Chunk)], after


def test_a_drained_turn_end_comes_in_seconds() -> None:
    sent, state = chunks(INITIAL_PRODUCER_STATE, unit(103, turn_end=True))
    assert [chunk.new_codes for chunk in sent] == [25, 25, 25, 25, 3]
    assert [chunk.sequence for chunk in sent] == [0, 1, 2, 3, 4]
    assert [chunk.last_chunk for chunk in sent] == [False] * 4 + [True]
    assert sent[0].codes[:3] == SILENCE
    assert sent[1].codes[:3] == (22, 23, 24)
    assert [chunk.text for chunk in sent] == ["103 codes", "", "", "", ""]
    assert (state.epoch, state.sequence, state.closed_turn) == (1, 0, (0, 0))


def test_a_unit_of_25_codes_is_one_chunk() -> None:
    sent, _ = chunks(INITIAL_PRODUCER_STATE, unit(25))
    assert [(chunk.new_codes, chunk.unit_flush) for chunk in sent] == [(25, True)]


def test_few_codes_are_held_with_their_text() -> None:
    held, state = chunks(INITIAL_PRODUCER_STATE, unit(4))
    assert [(chunk.codes, chunk.code_count, chunk.text) for chunk in held] == [((0,), 0, None)]
    sent, state = chunks(state, unit(25, first=4))
    assert [(chunk.sequence, chunk.new_codes) for chunk in sent] == [(1, 25), (2, 0)]
    assert sent[0].codes == (*SILENCE, *range(25))
    assert [chunk.text for chunk in sent] == ["4 codes25 codes", None]
    rest, state = chunks(state, unit(0, turn_end=True))
    assert [chunk.codes for chunk in rest] == [(22, 23, 24, 25, 26, 27, 28)]


def test_a_turn_end_without_codes_sends_the_left_context_again() -> None:
    _, state = chunks(INITIAL_PRODUCER_STATE, unit(25))
    sent, state = chunks(state, unit(0, turn_end=True))
    assert [(c.codes, c.new_codes, c.last_chunk) for c in sent] == [((22, 23, 24), 0, True)]
    outputs, again = produce_unit(state, unit(0, turn_end=True))
    assert outputs == (ControlOnly(),)
    assert again == state


def test_a_turn_end_before_any_code_is_an_empty_last_chunk() -> None:
    sent, _ = chunks(INITIAL_PRODUCER_STATE, unit(0, turn_end=True))
    assert [(c.codes, c.code_count, c.last_chunk, c.text) for c in sent] == [((), 0, True, None)]


def test_a_new_source_starts_an_epoch_and_the_old_one_is_silent() -> None:
    _, state = chunks(INITIAL_PRODUCER_STATE, unit(30))
    sent, state = chunks(state, unit(25, source=1))
    assert (sent[0].epoch, sent[0].sequence, sent[0].codes[:3]) == (1, 0, SILENCE)
    assert produce(state, unit(25, source=0)) == (None, state)
    aborted = CodeRecord(1, (0, 0), (), True, False, "", aborted=True)
    output, state = produce(state, aborted)
    assert output is None
    assert produce(state, unit(25, source=1)) == (None, state)


def test_a_unit_must_be_whole() -> None:
    with pytest.raises(ValueError, match="finished"):
        produce_unit(INITIAL_PRODUCER_STATE, CodeRecord(0, (0, 0), (), False, False, ""))


def header(
    epoch: int, sequence: int, count: int = 28, *, last: bool = False, flush: bool = True
) -> ChunkHeader:
    return ChunkHeader(epoch, sequence, max(count, 0), count, last, flush)


def opened(epoch: int, taken: int = 0) -> StreamState:
    state = open_epoch(INITIAL_STREAM_STATE, epoch, VOICE).state
    for sequence in range(taken):
        refusal, state = admit(state, header(epoch, sequence))
        assert refusal is None
    return state


CLOSED = admit(opened(3, 1), header(3, 1, last=True)).state


@pytest.mark.parametrize(
    ("state", "chunk", "refusal"),
    [
        (INITIAL_STREAM_STATE, header(0, 0), Refusal.EPOCH_NOT_OPENED),
        (INITIAL_STREAM_STATE, header(0, 1), Refusal.MISSING_STATE_FOR_CHUNK),
        (opened(3), header(3, 1), Refusal.MISSING_STATE_FOR_CHUNK),
        (opened(3, 2), header(3, 1), Refusal.STALE_OR_REORDERED_CHUNK),
        (opened(3, 2), header(3, 3), Refusal.STALE_OR_REORDERED_CHUNK),
        (opened(3, 2), header(2, 0), Refusal.STALE_CACHE_EPOCH),
        (opened(3, 2), header(4, 1), Refusal.NEW_EPOCH_REQUIRES_FIRST_CHUNK),
        (opened(3, 2), header(4, 0), Refusal.EPOCH_NOT_OPENED),
        (opened(3, 2), header(-1, 2), Refusal.NEGATIVE_STREAM_POSITION),
        (opened(3, 2), header(3, 2, 0, flush=False), Refusal.EMPTY_NONFINAL_CHUNK),
        (opened(3, 2), header(3, 2, -1), Refusal.NEGATIVE_SEQ_TOKEN_COUNT),
        (
            opened(3, 2),
            ChunkHeader(3, 2, 4, 28, False, True),
            Refusal.SEQ_TOKEN_COUNT_MISMATCH,
        ),
        (CLOSED, header(3, 0), Refusal.EPOCH_CLOSED),
        (CLOSED, header(2, 0), Refusal.EPOCH_CLOSED),
        (CLOSED, header(3, 2), Refusal.MISSING_STATE_FOR_CHUNK),
    ],
)
def test_refusals_by_name(state: StreamState, chunk: ChunkHeader, refusal: Refusal) -> None:
    assert admit(state, chunk) == (refusal, state)


def test_open_can_be_repeated_until_the_first_chunk() -> None:
    state = opened(3)
    assert open_epoch(state, 3, VOICE) == (None, state)
    assert open_epoch(state, 3, "other") == (Refusal.PROMPT_CHANGED_MIDSTREAM, state)
    assert open_epoch(state, 2, VOICE) == (Refusal.STALE_CACHE_EPOCH, state)
    assert open_epoch(state, -1, VOICE).refusal is Refusal.NEGATIVE_STREAM_POSITION
    started = opened(3, 1)
    assert open_epoch(started, 3, VOICE) == (Refusal.EPOCH_ALREADY_STARTED, started)
    assert open_epoch(CLOSED, 3, VOICE).refusal is Refusal.EPOCH_ALREADY_STARTED
    assert open_epoch(CLOSED, 4, VOICE).state == opened(4)


def test_reference_audio_is_checked() -> None:
    assert reference_refusal(24_000, [0.0, 0.5]) is None
    assert reference_refusal(0, [0.5]) is Refusal.INVALID_REF_AUDIO_SAMPLE_RATE
    assert reference_refusal(24_000, []) is Refusal.EMPTY_REF_AUDIO
    assert reference_refusal(24_000, [0.5, float("inf")]) is Refusal.NON_FINITE_REF_AUDIO


class Streams(RuleBasedStateMachine):
    """A session's producer, a channel that loses, repeats and delays, and the consumer.

    Whatever happens, the consumer takes exactly the chunks 0..n of each epoch, once and in order;
    and while nothing was lost of the newest epoch, every one of its chunks is taken.
    """

    @initialize()
    def start(self) -> None:
        self.producer = INITIAL_PRODUCER_STATE
        self.consumer = INITIAL_STREAM_STATE
        self.source = self.turn = self.codes = 0
        self.open_: set[int] = set()
        self.channel: list[int | Chunk] = []
        self.past: list[int | Chunk] = []
        self.produced: dict[int, list[Chunk]] = {}
        self.admitted: dict[int, list[Chunk]] = {}
        self.torn: set[int] = set()

    @rule(codes=st.sampled_from((0, 1, 4, 5, 24, 25, 60, 103)), turn_end=st.booleans())
    def speak(self, codes: int, turn_end: bool) -> None:
        record = unit(
            codes, turn_end=turn_end, turn=self.turn, source=self.source, first=self.codes
        )
        self.codes += codes
        outputs, self.producer = produce_unit(self.producer, record)
        for output in outputs:
            if isinstance(output, Chunk):
                self._send(output)
        self.turn += turn_end

    def _send(self, chunk: Chunk) -> None:
        if chunk.sequence == 0:
            self.channel.append(chunk.epoch)
        self.produced.setdefault(chunk.epoch, []).append(chunk)
        self.channel.append(chunk)

    @rule()
    def end_the_same_turn_twice(self) -> None:
        record = unit(0, turn_end=True, turn=self.turn - 1, source=self.source)
        output, after = produce(self.producer, record)
        if self.producer.closed_turn == record.turn and not self.producer.pending_codes:
            assert output == ControlOnly()
            assert after == self.producer

    @rule()
    def barge_in(self) -> None:
        self.source += 1
        self.turn += 1

    @rule()
    def recover(self) -> None:
        self.producer = new_epoch(self.producer)

    @precondition(lambda self: self.channel)
    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for message in self.channel[:count]:
            self.past.append(message)
            epoch = message if isinstance(message, int) else message.epoch
            healthy = epoch not in self.torn and epoch >= (self.consumer.epoch or 0)
            assert self._take(message) or not healthy
        del self.channel[:count]

    @precondition(lambda self: self.channel)
    @rule()
    def lose(self) -> None:
        lost = self.channel.pop(0)
        self.torn.add(lost if isinstance(lost, int) else lost.epoch)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.past))
        if isinstance(message, Chunk):
            assert not self._take(message)
        else:
            before = self.consumer
            self._take(message)
            assert self.consumer == before

    def _take(self, message: int | Chunk) -> bool:
        before = self.consumer
        if isinstance(message, int):
            refusal, self.consumer = open_epoch(before, message, VOICE)
        else:
            count = len(message.codes)
            refusal, self.consumer = admit(
                before,
                ChunkHeader(
                    message.epoch,
                    message.sequence,
                    count,
                    message.code_count,
                    message.last_chunk,
                    message.unit_flush,
                ),
            )
            if refusal is None:
                self.admitted.setdefault(message.epoch, []).append(message)
        if refusal is not None:
            assert self.consumer is before
        return refusal is None

    @invariant()
    def each_epoch_is_taken_in_order_from_0(self) -> None:
        for epoch, taken in self.admitted.items():
            assert taken == self.produced[epoch][: len(taken)]
            assert [chunk.sequence for chunk in taken] == list(range(len(taken)))
            assert not any(chunk.last_chunk for chunk in taken[:-1])

    @invariant()
    def codes_are_sent_once_and_in_order(self) -> None:
        sent = [
            code
            for _, chunks_ in sorted(self.produced.items())
            for chunk in chunks_
            if chunk.new_codes
            for code in chunk.codes[chunk.left_context :]
        ]
        assert sent == sorted(set(sent))


def test_no_interleaving_breaks_an_epoch() -> None:
    run_state_machine_as_test(
        Streams, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
