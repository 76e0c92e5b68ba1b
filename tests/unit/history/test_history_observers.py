"""What the proxies read is what was there, however the bytes arrive; and the fake Thinker answers
otherwise to anything else, so that a wrong rebuild is seen."""

import asyncio
import base64
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.resp_proxy import Value, read_command, read_reply, words_of
from support.socket_proxy import FrameReader
from websockets.frames import Frame, Opcode

from duplex_sidecar.history.commands import facts_of
from duplex_sidecar.history.frames import UNREADABLE, facts_of_message
from duplex_sidecar.history.observations import JournalWrite
from duplex_sidecar.ledger.connection import pack
from duplex_sidecar.model.minicpmo45.decode import Sampling, UnitRules, encode_rules, initial_state
from duplex_sidecar.protocol.events import (
    Audio,
    Sequenced,
    TurnMark,
    TurnStep,
    encode_sequenced,
)
from duplex_sidecar.stages.envelope import Ids, Rows, ThinkerFeed

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
import itertools

from fake_stage import rows
from fake_thinker import FakeThinker
from session_kit import VOCABULARY, WORD_IDS

pytestmark = pytest.mark.unit


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


# Lengths beside each change of the length field's own size, made long without drawing the bytes.
LENGTHS = (0, 1, 125, 126, 300, 65_535, 65_536, 66_000)
content = st.builds(
    lambda length, byte: bytes([byte]) * length, st.sampled_from(LENGTHS), st.integers(0, 255)
)


@settings(max_examples=40)
@given(
    st.lists(content | st.binary(max_size=300), max_size=5),
    st.lists(st.integers(0, 400_000), max_size=8),
    st.booleans(),
)
def test_messages_are_read_from_any_pieces(
    messages: list[bytes], cuts: list[int], masked: bool
) -> None:
    sent = b""
    for message in messages:
        half = len(message) // 2
        frames = (
            Frame(Opcode.TEXT, message[:half], fin=False),
            Frame(Opcode.PING, b"?"),
            Frame(Opcode.CONT, message[half:]),
        )
        sent += b"".join(frame.serialize(mask=masked) for frame in frames)
    reader = FrameReader()
    assert [one for piece in pieces(sent, cuts) for one in reader.feed(piece)] == messages


async def stream_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=2**20)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=8))
def test_a_command_is_read_as_it_was_packed(words: list[bytes]) -> None:
    async def read() -> tuple[bytes, list[bytes]]:
        return await read_command(await stream_of(pack(tuple(words)) + b"*1\r\n"))

    assert asyncio.run(read()) == (pack(tuple(words)), words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"+OK\r\n", ("OK",)),
        (b"-NOSCRIPT no such\r\n", ("-NOSCRIPT",)),
        (b":7\r\n", ("7",)),
        (b"$-1\r\n", ("None",)),
        (b"$4\r\na\r\nb\r\n", ("a\r\nb",)),
        (b"*3\r\n$2\r\nok\r\n:1\r\n*1\r\n+x\r\n", ("ok", "1", "...")),
    ],
)
async def test_replies_are_read(raw: bytes, words: tuple[str, ...]) -> None:
    reader = await stream_of(raw + b"+next\r\n")
    read, value = await read_reply(reader)
    assert (read, words_of(value)) == (raw, words)
    following: Value = (await read_reply(reader))[1]
    assert following == b"next"


def test_a_journal_call_says_which_events_it_holds() -> None:
    pcm = b"\1\0" * 5
    events = (
        Sequenced(8, Audio(2, 3, 1, 4, 100, pcm)),
        Sequenced(9, TurnMark(TurnStep.ENDED, 2, 3, 105, "text")),
    )
    arguments = ("7", "nonce", "op", 3, 8, 10**6, 60_000, 3, "1", b"state", "2", "100", "105", b"m")
    words = ["EVALSHA", "sha", 5, *(f"duplex:{{x}}:{k}" for k in ("meta", 1, 2, 3, 4)), *arguments]
    raw = [str(one).encode() if not isinstance(one, bytes) else one for one in words]
    facts = facts_of([*raw, *map(encode_sequenced, events), b"not an event"], "journal")
    assert (facts.name, facts.session) == ("journal", "x")
    assert (facts.fence, facts.nonce, facts.operation) == (7, "nonce", "op")
    assert isinstance(facts.write, JournalWrite)
    assert (facts.write.unit, facts.write.first_sequence) == (3, 8)
    sound, end, unknown = facts.write.events
    assert (sound.sequence, sound.kind, sound.from_sample, sound.samples) == (8, "audio", 100, 5)
    assert (end.sequence, end.turn_samples, end.pcm_sha256) == (9, 105, None)
    assert (unknown.sequence, unknown.kind) == (10, "unreadable")


def test_messages_say_what_a_client_learns() -> None:
    def told(message: dict[str, object]) -> object:
        return facts_of_message(json.dumps(message).encode())

    pcm = base64.b64encode(b"\1\0" * 5).decode()
    place = {"unit": 3, "epoch": 1, "stage2_sequence": 4, "from_sample": 100}
    audio = facts_of_message(
        json.dumps(
            {
                "type": "response.output_audio.delta",
                "server_event_seq": 8,
                "delta": pcm,
                "response_id": "resp_a_b_2",
                "duplex": place,
            }
        ).encode()
    ).event
    assert audio is not None
    assert (audio.kind, audio.turn, audio.from_sample, audio.samples) == ("audio", 2, 100, 5)
    error = {"type": "error", "error": {"code": "not_ready"}}
    assert facts_of_message(json.dumps(error).encode()).problem == "not_ready"
    assert told({"type": "session.heartbeat_ack"}) != UNREADABLE
    for rubbish in (b"\xff", b"[]", b"{}", b'{"type":"error"}', b'{"type":7,"server_event_seq":1}'):
        assert facts_of_message(rubbish) == UNREADABLE


# --- the fake engine ------------------------------------------------------------------------------

SEEDED = UnitRules(
    policy=initial_state(seeded_text=False),
    is_speech=True,
    force_listen=False,
    max_tokens=None,
    sampling=Sampling(greedy=False, temperature=0.7, top_k=20, top_p=0.8),
    seed="42:thinker:1",
)
FEED = ThinkerFeed(
    session="s",
    stream="s-1",
    unit=1,
    opens=True,
    position=0,
    parts=(Ids((20, 21, 22)), Rows(rows(b"one", b"two"))),
    rules=encode_rules(SEEDED),
)


async def hidden_and_tokens(*feeds: ThinkerFeed) -> list[object]:
    thinker = FakeThinker(VOCABULARY, WORD_IDS)
    answers = [await thinker.feed(feed) for feed in feeds]
    return [(answer.emitted_ids, answer.hidden.data) for answer in answers]


async def test_the_fake_thinkers_tokens_are_a_hash_of_prompt_rows_and_seed() -> None:
    """Over many seeds: another prompt id, row or seed almost always gives other tokens."""

    def seeded(feed: ThinkerFeed, seed: int) -> ThinkerFeed:
        rules = structs.replace(SEEDED, seed=f"{seed}:thinker:1")
        return structs.replace(feed, rules=encode_rules(rules))

    other_id = structs.replace(FEED, parts=(Ids((20, 21, 23)), FEED.parts[1]))
    other_row = structs.replace(FEED, parts=(FEED.parts[0], Rows(rows(b"one", b"2"))))
    swapped = structs.replace(FEED, parts=(FEED.parts[0], Rows(rows(b"two", b"one"))))
    for other in (other_id, other_row, swapped):
        same = [
            await hidden_and_tokens(seeded(FEED, seed))
            == await hidden_and_tokens(seeded(other, seed))
            for seed in range(60)
        ]
        # What answers with one control token alone has few answers to choose from.
        assert sum(same) < 30
    drawn = {str(await hidden_and_tokens(seeded(FEED, seed))) for seed in range(60)}
    assert len(drawn) > 20
    assert await hidden_and_tokens(FEED) == await hidden_and_tokens(FEED)
