"""Whatever is cut, and whenever: the client sees each number once and in order, and the session's
ledger gets each sample once and in order."""

import base64
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex_gateway.budget import Account, Budget
from duplex_gateway.held import HeldLimits, Room
from duplex_gateway.resume import KEPT_COMMANDS, Pass, ResumeState, _heartbeat_bytes
from duplex_gateway.wire import GATEWAY_ID_PREFIX, Facts, read_client_message

pytestmark = pytest.mark.unit

Json = dict[str, Any]
LIMITS = HeldLimits()
UNIT = 8
"""Samples of a unit of the model session below."""
PCM16, ULAW, FLOAT = "audio/pcm", "audio/pcmu", "audio/x-f32le"
SAMPLE_BYTES = {PCM16: 2, ULAW: 1, FLOAT: 4}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def append(audio: bytes, **more: Any) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": b64(audio)} | more)


def update(kind: str, rate: int = 16_000, **more: Any) -> str:
    wanted = {"type": kind, "rate": rate}
    session = {"type": "realtime", "audio": {"input": {"format": wanted}}}
    return json.dumps({"type": "session.update", "session": session} | more)


def event(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, "event_id": "event_now"} | fields).encode()


def numbered(sequence: int) -> bytes:
    return event("duplex.unit", server_event_seq=sequence)


def refusal(code: str, event_id: str | None) -> bytes:
    return event("error", error={"code": code, "message": "no", "event_id": event_id})


def committed(to_sample: int) -> bytes:
    return event("input_audio_buffer.committed", duplex={"to_sample": to_sample})


def roomy() -> Account:
    return Account(Budget(2**40, 1))


def connect(
    state: ResumeState, received: int, last: int = 0, fence: int = 1, durable: int | None = None
) -> list[bytes]:
    """durable: where it ends, if not where the owner's input ends."""
    facts = Facts(
        acknowledged_sample=received if durable is None else durable,
        received_sample=received,
        last_sequence=last,
        input_rate_hz=16_000,
    )
    return state.connect(fence, facts)


def greeted(last: int | None = None, acknowledged: int = 0) -> ResumeState:
    state = ResumeState(last, LIMITS, roomy())
    assert connect(state, acknowledged) == []
    return state


def say(state: ResumeState, *messages: str) -> None:
    for message in messages:
        assert state.take(read_client_message(message.encode())) == []


def kept_bytes(state: ResumeState) -> int:
    """What the account has to have, found by looking at everything that is kept."""
    items = [*state._input._items(), *state._commands.values()]
    if state._input._base is not None:
        items.append(state._input._base)
    ids = sum(_heartbeat_bytes(event_id) for event_id in state._heartbeats)
    return sum(item.memory_bytes for item in items) + ids


def sent(state: ResumeState) -> list[Json]:
    """Everything that is sent now."""
    found: list[Json] = []
    while (message := state.next_message()) is not None:
        found.append(json.loads(message))
    return found


# --- a session, as simple as it can be ------------------------------------------------------------


@dataclass
class Session:
    """What replicas share: the ledger. A sample is its bytes. units: ends of those accepted."""

    durable: list[bytes] = field(default_factory=list)
    journal: list[bytes] = field(default_factory=list)
    clears: int = 0


@dataclass
class Owner:
    """One replica's life with the session, on one connection after another."""

    session: Session
    held: list[bytes] = field(default_factory=list)
    kind: str = PCM16
    out: deque[bytes] = field(default_factory=deque)
    inbox: deque[bytes] = field(default_factory=deque)

    @property
    def received(self) -> int:
        return len(self.session.durable) + len(self.held)

    def greet(self, resume_from: int | None) -> None:
        self.inbox.clear()
        self.out.clear()
        facts = {
            "acknowledged_sample": len(self.session.durable),
            "received_sample": self.received,
            "last_sequence": len(self.session.journal),
            "input_rate_hz": 16_000,
        }
        self.out.append(event("session.resumed", duplex=facts))
        if resume_from is not None:
            self.out.extend(self.session.journal[resume_from:])

    def read(self) -> None:
        """The next message of the inbox."""
        command: Json = json.loads(self.inbox.popleft())
        match command["type"]:
            case "input_audio_buffer.append":
                self._append(command)
            case "input_audio_buffer.commit":
                self._accept(len(self.held))
            case "session.update":
                self.kind = command["session"]["audio"]["input"]["format"]["type"]
                self.out.append(event("session.updated"))
            case "session.heartbeat":
                self.out.append(
                    event("session.heartbeat_ack", client_event_id=command.get("event_id"))
                )
            case _:
                self.out.append(refusal("unknown_event", command.get("event_id")))

    def _append(self, command: Json) -> None:
        audio = base64.b64decode(command["audio"])
        each = SAMPLE_BYTES[self.kind]
        if len(audio) % each or audio.startswith(b"\xff\xff\xff\xff"):
            self.out.append(refusal("invalid_audio", command["event_id"]))
            return
        samples = [audio[i : i + each] for i in range(0, len(audio), each)]
        start = command.get("from_sample")
        if start is not None:
            if start > self.received:
                self.out.append(refusal("out_of_order_event", command["event_id"]))
                return
            samples = samples[self.received - start :]
        self.held += samples
        while len(self.held) >= UNIT:
            self._accept(UNIT)

    def _accept(self, count: int) -> None:
        if not count:
            return
        self.session.durable += self.held[:count]
        del self.held[:count]
        self.out.append(committed(len(self.session.durable)))
        for _ in range(2):
            made = numbered(len(self.session.journal) + 1)
            self.session.journal.append(made)
            self.out.append(made)


class World:
    """Client, gateway, owners. Steps are taken in any order; messages may be lost with a cut."""

    def __init__(self, explicit: bool, resume: bool) -> None:
        self.explicit = explicit
        self.session = Session()
        self.state = ResumeState(0 if resume else None, LIMITS, roomy())
        self.owner: Owner | None = None
        self.said: list[bytes] = []
        """Samples that must arrive."""
        self.heard: list[int] = []
        self.events: list[Json] = []
        self.answers_due = 0
        self.kind = PCM16
        self.numbers = 0
        self.fence = 0

    # --- the client -------------------------------------------------------------------------------

    def speak(self, count: int) -> None:
        each = SAMPLE_BYTES[self.kind]
        samples: list[bytes] = []
        for _ in range(count):
            self.numbers += 1
            samples.append((self.numbers % 251).to_bytes(each, "little"))
        more = {"from_sample": len(self.said)} if self.explicit else {}
        say(self.state, append(b"".join(samples), **more))
        self.said += samples

    def set_format(self, kind: str) -> None:
        self.kind = kind
        self.answers_due += 1
        say(self.state, update(kind))

    def rubbish(self) -> None:
        """Bytes that are refused: half a sample, or what is no number."""
        say(
            self.state,
            append(b"\0" * (2 * SAMPLE_BYTES[self.kind] + 1 if self.kind != ULAW else 0)),
        )

    # --- the wires --------------------------------------------------------------------------------

    def dial(self, crash: bool) -> None:
        if self.state.connected:
            return
        if crash or self.owner is None:
            self.owner = Owner(self.session)
            self.fence += 1
        self.owner.greet(self.state.resume_from)

    def hear(self) -> None:
        """The gateway takes the owner's next message."""
        if self.owner is None or not self.owner.out:
            return
        message = self.owner.out.popleft()
        if not self.state.connected:
            facts = json.loads(message)["duplex"]
            self._take(
                connect(
                    self.state,
                    facts["received_sample"],
                    facts["last_sequence"],
                    self.fence,
                    facts["acknowledged_sample"],
                )
            )
            return
        verdict = self.state.hear(message)
        assert verdict.passing in (Pass.FORWARD, Pass.DROP)
        if verdict.passing is Pass.FORWARD:
            self._take([verdict.message])

    def send(self) -> None:
        if self.owner is not None and (message := self.state.next_message()) is not None:
            self.owner.inbox.append(message)

    def work(self) -> None:
        if self.owner is not None and self.owner.inbox:
            self.owner.read()

    def cut(self, crash: bool) -> None:
        """The connection is lost with all that is on its way, or its owner with all it held."""
        if self.owner is None:
            return
        if self.state.connected:
            self._take(self.state.lose())
        self.owner.out.clear()
        self.owner.inbox.clear()
        if crash:
            self.owner = None

    def _take(self, messages: list[bytes]) -> None:
        for message in messages:
            seen: Json = json.loads(message)
            self.events.append(seen)
            if "server_event_seq" in seen:
                self.heard.append(seen["server_event_seq"])

    def settle(self) -> None:
        """Everything arrives."""
        if not self.state.connected:
            self.dial(crash=False)
            self.hear()
        say(self.state, '{"type":"input_audio_buffer.commit"}')
        for _ in range(10_000):
            self.send()
            self.work()
            self.hear()
            owner = self.owner
            assert owner is not None
            if not (
                owner.inbox
                or owner.out
                or self.state._input._waiting
                or self.state._input._formats_first
            ):
                return
        raise AssertionError("it never settles")


STEPS = st.one_of(
    st.tuples(st.just("speak"), st.integers(1, 13)),
    st.tuples(st.just("speak"), st.integers(1, 13)),
    st.tuples(st.just("flow"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["send", "work", "hear"]), st.integers(1, 4)),
    st.tuples(st.just("move"), st.booleans()),
    st.tuples(st.sampled_from(["cut", "dial"]), st.booleans()),
    st.tuples(st.just("format"), st.sampled_from([PCM16, ULAW, FLOAT])),
    st.tuples(st.sampled_from(["commit", "rubbish", "heartbeat"]), st.none()),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(STEPS, min_size=15, max_size=60), st.booleans(), st.booleans())
def test_each_number_once_and_each_sample_once(
    steps: list[tuple[str, Any]], explicit: bool, resume: bool
) -> None:
    world = World(explicit, resume)
    world.dial(crash=False)
    world.hear()
    beats = 0
    for name, value in steps:
        match name:
            case "speak":
                world.speak(value)
            case "dial":
                world.dial(value)
                world.hear()
            case "cut":
                world.cut(value)
            case "move":
                world.cut(value)
                world.dial(crash=False)
                world.hear()
            case "flow":
                for _ in range(value):
                    world.send()
                    world.work()
                    world.hear()
            case "commit":
                say(world.state, '{"type":"input_audio_buffer.commit"}')
            case "format":
                world.set_format(value)
            case "rubbish":
                world.rubbish()
            case "heartbeat":
                beats += 1
                message = '{"type":"session.heartbeat","event_id":"b"}'
                world._take(world.state.take(read_client_message(message.encode())))
            case _:
                for _ in range(value):
                    getattr(world, name)()
        assert world.state.account.held_bytes == kept_bytes(world.state)
    world.settle()

    assert world.heard == list(range(1, len(world.session.journal) + 1))
    assert world.session.durable == world.said
    kinds = [seen["type"] for seen in world.events]
    assert kinds.count("session.updated") == world.answers_due
    assert kinds.count("session.heartbeat_ack") == beats
    named = [seen["error"]["event_id"] for seen in world.events if seen["type"] == "error"]
    assert set(named) <= {None}
    assert world.state.room() is Room.FREE


# --- one by one -----------------------------------------------------------------------------------


def test_a_message_cut_in_two_by_the_acknowledged_sample_says_where_it_began() -> None:
    state = greeted()
    say(state, append(bytes(20)), append(bytes(20)), append(bytes(20)))
    assert [m.get("from_sample") for m in sent(state)] == [None] * 3
    state.lose()
    connect(state, 15)
    assert [m.get("from_sample") for m in sent(state)] == [10, None]


def test_what_the_owner_had_but_nobody_made_durable_is_sent_to_the_next_one() -> None:
    state = greeted()
    say(state, append(bytes(20)), append(bytes(20)))
    sent(state)
    state.lose()
    connect(state, 20)  # the same owner has it all
    assert sent(state) == []
    state.lose()
    connect(state, 0, fence=2)  # another one has nothing
    assert len(sent(state)) == 2


def test_durable_input_is_let_go() -> None:
    state = greeted()
    say(state, append(bytes(20)), append(bytes(20)))
    sent(state)
    before = state.held_bytes
    state.hear(committed(9))
    assert state.held_bytes == before
    state.hear(committed(10))
    assert state.held_bytes == before / 2
    state.hear(committed(20))
    assert state.held_bytes == 0


def test_a_refused_message_does_not_count_and_keeps_the_clients_name() -> None:
    state = greeted()
    say(state, append(bytes(20), event_id="mine"), append(bytes(20), event_id="mine"))
    first, second = sent(state)
    assert first["event_id"] != second["event_id"]
    assert first["event_id"].startswith(GATEWAY_ID_PREFIX)
    verdict = state.hear(refusal("invalid_audio", first["event_id"]))
    assert verdict.passing is Pass.FORWARD
    assert json.loads(verdict.message)["error"]["event_id"] == "mine"
    state.lose()
    connect(state, 4)
    assert [m["from_sample"] for m in sent(state)] == [0]


def test_the_format_in_force_comes_first_and_is_answered_once() -> None:
    state = greeted()
    say(state, update(ULAW), append(bytes(10)))
    sent(state)
    assert state.hear(event("session.updated")).passing is Pass.FORWARD
    state.hear(committed(10))
    state.lose()
    connect(state, 10)
    assert [m["type"] for m in sent(state)] == ["session.update"]
    assert state.hear(event("session.updated")).passing is Pass.DROP
    say(state, update(PCM16))
    sent(state)
    assert state.hear(event("session.updated")).passing is Pass.FORWARD


def test_a_format_that_was_refused_changes_no_count() -> None:
    state = greeted()
    say(state, update(FLOAT), append(bytes(40)))
    name = sent(state)[0]["event_id"]
    state.hear(refusal("immutable_setting", name))  # the 40 bytes are 20 samples of PCM16
    state.hear(committed(20))
    assert state.held_bytes == 0


def test_a_clear_whose_answer_is_lost_is_answered_here() -> None:
    state = greeted()
    say(state, append(bytes(20)), '{"type":"input_audio_buffer.clear"}', append(bytes(20)))
    sent(state)
    state.lose()
    owed = connect(state, 20)
    assert [json.loads(message)["type"] for message in owed] == ["input_audio_buffer.cleared"]
    assert sent(state) == []


def test_a_clear_that_was_answered_is_said_again_in_silence() -> None:
    state = greeted()
    say(state, append(bytes(20)), '{"type":"input_audio_buffer.clear"}', append(bytes(20)))
    sent(state)
    assert state.hear(event("input_audio_buffer.cleared")).passing is Pass.FORWARD
    state.lose()
    connect(state, 0)
    assert [m["type"][19:] for m in sent(state)] == ["append", "clear", "append"]
    assert state.hear(event("input_audio_buffer.cleared")).passing is Pass.DROP


def test_frames_behind_the_last_sample_are_sent_again() -> None:
    state = greeted()
    say(state, append(bytes(20)), append(b"", video_frames=[b64(b"x")]))
    sent(state)
    state.hear(committed(10))
    state.lose()
    connect(state, 10)
    assert [m["video_frames"] for m in sent(state)] == [[b64(b"x")]]
    state.hear(committed(20))
    assert state.held_bytes == 0


def test_input_that_only_this_owner_refuses_is_kept_and_wakes() -> None:
    state = greeted()
    say(state, append(bytes(20)))
    name = sent(state)[0]["event_id"]
    assert state.wants_owner
    state.lose()
    assert not state.wants_owner
    connect(state, 0)
    sent(state)
    assert state.hear(refusal("lease_lost", name)).passing is Pass.HOLD
    assert state.wants_owner
    state.lose()
    connect(state, 0)
    assert len(sent(state)) == 1


def test_the_wish_to_close_outlives_an_owner() -> None:
    state = greeted()
    say(state, '{"type":"session.close"}')
    assert len(sent(state)) == 1
    state.lose()
    connect(state, 0)
    assert [m["type"] for m in sent(state)] == ["session.close"]
    closed = event("session.closed", reason="session_ended", message="bye")
    assert state.hear(closed).passing is Pass.HOLD


def test_a_missing_number_breaks_the_connection_a_resync_does_not() -> None:
    state = greeted(last=3)
    assert state.resume_from == 3
    assert state.hear(numbered(3)).passing is Pass.DROP
    assert state.hear(numbered(4)).passing is Pass.FORWARD
    assert state.hear(numbered(6)).passing is Pass.BROKEN
    resync = event("session.resync_required", duplex={"requested": 4, "oldest": 9})
    assert state.hear(resync).passing is Pass.FORWARD
    assert state.hear(numbered(9)).passing is Pass.FORWARD
    assert state.hear(b"rubbish").passing is Pass.BROKEN
    assert state.resume_from == 9


def test_a_first_connection_resumes_nothing_and_the_next_one_all_that_is_new() -> None:
    state = ResumeState(None, LIMITS, roomy())
    assert state.resume_from is None
    connect(state, 0, 41)
    assert state.resume_from == 41
    assert state.hear(numbered(40)).passing is Pass.FORWARD  # was on its way as it greeted
    assert state.resume_from == 40


def test_room() -> None:
    limits = HeldLimits(audio_s=1.0, due_s=0.5, bytes=100_000, hard_bytes=150_000, messages=20)
    state = ResumeState(None, limits, roomy())
    second = append(bytes(32_000))
    say(state, update(PCM16), second)
    assert state.room() is Room.SOON  # an owner will make room
    connect(state, 0)
    assert state.room() is Room.SOON
    sent(state)
    state.hear(event("session.updated"))
    state.hear(committed(16_000))
    assert state.room() is Room.FREE
    for _ in range(2):
        say(state, append(bytes(2), video_frames=["x" * 60_000]))
    assert state.room() is Room.FREE  # no unit is due: more audio has to come first
    say(state, append(bytes(2), video_frames=["x" * 60_000]))
    assert state.room() is Room.NONE


@pytest.mark.parametrize("kind", ["input_audio_buffer.commit", "input_audio_buffer.clear"])
def test_what_is_no_sound_takes_room_too(kind: str) -> None:
    limits = HeldLimits(messages=20)
    state = ResumeState(None, limits, roomy())
    connect(state, 0)
    state.lose()
    for _ in range(40):
        assert state.room(sound=False) is Room.FREE
        say(state, json.dumps({"type": kind}))
    assert state.room(sound=False) is Room.SOON
    for _ in range(20):
        say(state, json.dumps({"type": kind}))
    assert state.room(sound=False) is Room.NONE


@pytest.mark.parametrize(
    "message", [append(b""), json.dumps({"type": "input_audio_buffer.commit"})]
)
def test_messages_that_make_nothing_durable_are_not_kept(message: str) -> None:
    state = ResumeState(None, HeldLimits(messages=20), roomy())
    connect(state, 0)
    for _ in range(100):
        say(state, message)
        assert state.next_message() == message.encode()
        assert (state.room(), state.held_bytes) == (Room.FREE, 0)
    say(state, append(bytes(20)))
    for _ in range(100):
        say(state, message)
    assert len(sent(state)) == 101
    state.lose()
    connect(state, 0)
    again = [json.dumps({"type": "input_audio_buffer.commit"})] if "commit" in message else []
    assert len(sent(state)) == 1 + len(again)
    state.hear(committed(10))
    assert state.held_bytes == 0


def test_an_append_of_frames_alone_is_kept_until_a_sample_follows() -> None:
    state = greeted()
    say(state, append(b"", video_frames=["AAAA"]))
    sent(state)
    assert state.held_bytes > 0


def test_seconds_of_sound_do_not_keep_a_close_waiting() -> None:
    state = ResumeState(None, HeldLimits(audio_s=1.0, due_s=0.5), roomy())
    say(state, update(PCM16), append(bytes(64_000)))
    assert (state.room(), state.room(sound=False)) == (Room.SOON, Room.FREE)


def test_heartbeats_that_nobody_answers_are_bounded() -> None:
    state = ResumeState(None, HeldLimits(heartbeats=20), roomy())
    connect(state, 0)
    beat = json.dumps({"type": "session.heartbeat"})
    for _ in range(20):
        assert state.takes_heartbeat(600)
        say(state, beat)
    assert not state.takes_heartbeat(600)
    sent(state)
    assert not state.takes_heartbeat(600)
    assert state.room() is Room.FREE, "sound does not wait for their answers"
    state.hear(event("session.heartbeat_ack"))
    assert state.takes_heartbeat(600)
    say(state, beat)
    assert len(state.lose()) == 20
    assert state.takes_heartbeat(600)
    connect(state, 0)
    assert state.takes_heartbeat(600)


def test_what_a_new_owner_has_is_let_go_and_what_the_same_one_has_takes_no_room() -> None:
    limits = HeldLimits(audio_s=1.0, due_s=0.5)
    state = ResumeState(None, limits, roomy())
    connect(state, 0)
    say(state, update(PCM16), append(bytes(32_000)))
    sent(state)
    state.hear(event("session.updated"))
    assert state.room() is Room.SOON
    state.lose()
    connect(state, 16_000)
    assert state.room() is Room.FREE
    assert state.held_bytes > 0
    state.lose()
    connect(state, 16_000, fence=2)
    assert state.held_bytes == 0


def test_a_rewound_ledger_goes_on_from_where_it_is() -> None:
    state = greeted()
    say(state, append(bytes(40)))
    sent(state)
    state.hear(committed(20))
    say(state, append(bytes(40)))
    state.lose()
    connect(state, 5)
    assert [m.get("from_sample") for m in sent(state)] == [None]
    state.hear(committed(25))
    assert state.held_bytes == 0


def test_messages_that_nobody_can_read_pass_once() -> None:
    state = greeted()
    rubbish = (b"no json", b"[]", b'{"type":"response.create"}', b'{"type":"input_audio_buffer.ap')
    for message in rubbish:
        state.take(read_client_message(message))
    assert [state.next_message() for _ in rubbish] == list(rubbish)
    assert (state.next_message(), state.held_bytes) == (None, 0)


def command(number: int, **more: Any) -> str:
    return json.dumps({"type": "response.cancel", "client_sequence": number} | more)


def applied(number: int, event_id: str) -> bytes:
    return event(
        "session.command_applied", client_event_id=event_id, duplex={"client_sequence": number}
    )


def test_a_numbered_command_is_said_to_each_owner_until_one_answers_it() -> None:
    state = greeted()
    say(state, command(1, event_id="mine"), command(2), append(bytes(20)))
    first, second, _ = sent(state)
    assert [first["client_sequence"], second["client_sequence"]] == [1, 2]
    state.lose()
    connect(state, 10, fence=2)
    again = sent(state)
    assert again == [first, second], "before anything new, under the same names"
    verdict = state.hear(applied(1, first["event_id"]))
    assert verdict.passing is Pass.FORWARD
    assert json.loads(verdict.message)["client_event_id"] == "mine"
    verdict = state.hear(refusal("response_cancel_not_active", second["event_id"]))
    assert json.loads(verdict.message)["error"]["event_id"] is None
    state.lose()
    connect(state, 10, fence=3)
    assert sent(state) == []
    assert state.held_bytes == 0


def test_numbered_commands_and_formats_are_said_again_in_the_order_of_their_numbers() -> None:
    state = greeted()
    say(state, command(1), append(bytes(20)), update(PCM16, client_sequence=2), command(3))
    assert [each.get("client_sequence") for each in sent(state)] == [1, None, 2, 3]
    state.hear(event("session.updated"))
    state.lose()
    connect(state, 0, fence=2)
    assert [each.get("client_sequence") for each in sent(state)] == [1, None, 2, 3]
    state.lose()
    connect(state, 10, fence=3)
    assert [each.get("client_sequence") for each in sent(state)] == [1, 2, 3]


def test_a_numbered_format_is_told_of_once_under_the_clients_name() -> None:
    state = greeted()
    say(state, json.dumps(json.loads(update(PCM16)) | {"client_sequence": 1, "event_id": "mine"}))
    (first,) = sent(state)
    state.hear(event("session.updated"))
    verdict = state.hear(applied(1, first["event_id"]))
    assert verdict.passing is Pass.FORWARD
    assert json.loads(verdict.message)["client_event_id"] == "mine"
    state.lose()
    connect(state, 0, fence=2)
    assert sent(state) == [first], "a format holds for its connection alone"
    assert state.hear(event("session.updated")).passing is Pass.DROP
    assert state.hear(applied(1, first["event_id"])).passing is Pass.DROP


def test_numbers_of_formats_and_commands_reach_each_owner_in_their_order() -> None:
    state = greeted()
    formats = [
        json.dumps(json.loads(update(kind)) | {"client_sequence": number})
        for number, kind in ((2, PCM16), (4, ULAW))
    ]
    say(state, command(1), formats[0], append(bytes(20)), command(3), formats[1], command(5))
    sent(state)
    state.lose()
    connect(state, 0, fence=2)
    numbers = [m["client_sequence"] for m in sent(state) if "client_sequence" in m]
    assert numbers == [1, 2, 3, 4, 5]
    state.lose()
    connect(state, 10, fence=3)
    numbers = [m["client_sequence"] for m in sent(state) if "client_sequence" in m]
    assert numbers == [1, 2, 3, 4, 5]


def test_commands_without_a_number_and_too_many_are_not_kept() -> None:
    state = greeted()
    say(state, '{"type":"response.cancel"}', command(1, event_id="x" * 500, more="x" * 5_000))
    say(state, *(command(number) for number in range(10, 12 + KEPT_COMMANDS)))
    assert len(sent(state)) == 4 + KEPT_COMMANDS
    state.lose()
    connect(state, 0)
    kept = [message["client_sequence"] for message in sent(state)]
    assert kept == list(range(12, 12 + KEPT_COMMANDS))
