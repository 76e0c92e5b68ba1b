"""Which of its writes an owner sends again to a ledger that lost its tail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.ledger.call import Head, PendingCall, ScriptName
from duplex_sidecar.ledger.repair import KEPT_BYTES, KEPT_MS, RecentWrites, Standing
from duplex_sidecar.ledger.session_view import SessionMeta, parse_meta

pytestmark = pytest.mark.unit

META = {
    "phase": "open", "reason": "", "fence": "1", "nonce": "n", "replica": "a", "until": "0",
    "opening_hash": "", "floor_hash": "", "records_first": "1", "window_floor": "1",
    "pcm_floor": "1", "bytes": "0", "events_first": "1", "token": "", "token_offered": "",
    "voiced": "0", "voice_turn": "", "voice_samples": "0",
}  # fmt: skip


class Owner:
    """Writes units, each accepted, committed and journaled, and remembers how the ledger stood
    after each write."""

    def __init__(self) -> None:
        self.recent = RecentWrites()
        self.calls: list[PendingCall] = []
        self.stood = [meta(0, 0, 0)]
        self.head, self.last = Head(0, "h0", 0, None), 0

    def unit(self, seq: int, events: int, *, now_ms: int = 0, blob: bytes = b"") -> None:
        self.write(self.chain(ScriptName.ACCEPT, seq, blob), now_ms)
        self.write(self.chain(ScriptName.COMMIT, seq), now_ms)
        self.write(self.journal(seq, events), now_ms)

    def cut(self, seq: int, events: int) -> None:
        """A client's command behind that unit: an entry and its events in one write."""
        first = self.last + 1
        entry = self.chain(ScriptName.CUT, seq)
        told = (first, first + events - 1)
        self.write(PendingCall("s", entry.script, (), entry.arguments, entry.then, told), 0)

    def chain(self, script: ScriptName, seq: int, blob: bytes = b"") -> PendingCall:
        opened = seq if script is ScriptName.ACCEPT else None
        committed = seq - 1 if script is ScriptName.ACCEPT else seq
        index = self.head.index + 1
        then = Head(index, f"h{index}", committed, opened)
        return PendingCall("s", script, (), (1, "n", "op", self.head.hash, seq, blob), then)

    def journal(self, unit: int, events: int) -> PendingCall:
        first = self.last + 1
        return PendingCall(
            "s",
            ScriptName.JOURNAL,
            (),
            (1, "n", "op", unit, first),
            None,
            (first, first + events - 1),
        )

    def write(self, call: PendingCall, now_ms: int) -> None:
        self.recent.note(call, now_ms)
        self.calls.append(call)
        self.head = call.then or self.head
        self.last = call.events[1] if call.events else self.last
        self.stood.append(meta(self.head.index, self.head.committed_seq, self.last))


def meta(index: int, committed: int, last: int, name: str | None = None) -> SessionMeta:
    fields = {
        **META,
        "index": str(index),
        "head": name or f"h{index}",
        "committed": str(committed),
        "open": "",
        "events_last": str(last),
    }
    return parse_meta("s", {k.encode(): v.encode() for k, v in fields.items()})


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8), st.data())
def test_what_is_missing_is_sent_again_in_its_order(
    events: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Events of each unit, and of a command behind it, if there is one."""
    owner = Owner()
    for seq, (count, told) in enumerate(events, 1):
        owner.unit(seq, count)
        if told:
            owner.cut(seq, told)
    cut = data.draw(st.integers(0, len(owner.calls) - 1))
    suffix = owner.recent.after(owner.stood[cut])
    assert suffix.standing is Standing.SHORT
    assert list(suffix.calls) == owner.calls[cut:]
    assert owner.recent.after(owner.stood[-1]).standing is Standing.AHEAD


def test_a_ledger_that_holds_more_is_not_mended() -> None:
    owner = Owner()
    owner.unit(1, 2)
    for stood in (meta(2, 1, 2), meta(3, 1, 2, "unknown"), meta(4, 2, 2)):
        assert owner.recent.after(stood).standing is Standing.AHEAD


def test_another_history_is_not_continued() -> None:
    owner = Owner()
    owner.unit(1, 2)
    owner.unit(2, 2)
    assert owner.recent.after(meta(2, 1, 2, "foreign")).standing is Standing.REGRESSED


def test_what_is_no_longer_remembered_cannot_be_sent_again() -> None:
    owner = Owner()
    for seq in range(1, 6):
        owner.unit(seq, 1, now_ms=seq * KEPT_MS // 2)
    stood = owner.stood
    assert owner.recent.after(stood[6]).standing is Standing.SHORT
    assert owner.recent.after(stood[5]).standing is Standing.REGRESSED
    # Whoever has written nothing yet does not know what was there.
    assert RecentWrites().after(stood[5]).standing is Standing.AHEAD


def test_a_large_unit_does_not_fill_the_memory() -> None:
    owner = Owner()
    for seq in range(1, 6):
        owner.unit(seq, 1, blob=bytes(KEPT_BYTES // 2))
    assert owner.recent.after(owner.stood[12]).standing is Standing.SHORT
    assert owner.recent.after(owner.stood[3]).standing is Standing.REGRESSED


def test_leases_and_tokens_are_not_remembered() -> None:
    recent = RecentWrites()
    recent.note(PendingCall("s", ScriptName.RENEW, (), (1, "n", 3000)), 0)
    assert recent.after(meta(0, 0, 0)).calls == ()
