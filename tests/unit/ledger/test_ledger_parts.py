"""Journal batches, blobs, tokens, key names, the server check and the scripts as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.ledger import scripts, token
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    LedgerUnsuitable,
)
from duplex_sidecar.ledger.journal import (
    MAX_BATCH_BYTES,
    MAX_EVENTS_PER_CALL,
    JournalBatch,
    VoiceMark,
    decode_marks,
    encode_mark,
)
from duplex_sidecar.ledger.keys import session_keys, session_of
from duplex_sidecar.ledger.media import Trim, UnitMedia, check_blob, pack_blobs, unpack_blobs
from duplex_sidecar.ledger.records import media_ref
from duplex_sidecar.ledger.server import check_server

pytestmark = pytest.mark.unit


def mark(number: int, turn: int = 1, gap: int = 0) -> VoiceMark:
    start = 24_000 * number + gap
    return VoiceMark(0, number, turn, number + 1, 25 * number, (1,) * 25, start, start + 24_000)


# --- journal ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        JournalBatch(unit=1, first_seq=1, events=()),
        JournalBatch(unit=1, first_seq=0, events=(b"x",)),
        JournalBatch(unit=-1, first_seq=1, events=(b"x",)),
        JournalBatch(unit=1, first_seq=1, events=(b"x",) * (MAX_EVENTS_PER_CALL + 1)),
        JournalBatch(unit=1, first_seq=1, events=(b"x" * (MAX_BATCH_BYTES + 1),)),
        JournalBatch(unit=2, first_seq=1, events=(b"x",), mark=mark(0)),
        JournalBatch(unit=1, first_seq=1, events=(), mark=mark(0)),
        JournalBatch(unit=1, first_seq=1, events=(b"x",), voiced_through=2),
    ],
)
def test_batches_over_the_limits_or_without_sense_are_refused(batch: JournalBatch) -> None:
    with pytest.raises(ValueError, match=r"."):
        batch.check()


def test_a_unit_can_be_voiced_without_an_event() -> None:
    JournalBatch(unit=1, first_seq=4, events=(), voiced_through=1).check()


def test_marks_of_a_turn_read_back_gapless() -> None:
    marks = tuple(mark(number) for number in range(3, 7))
    assert decode_marks("s", [encode_mark(one) for one in marks]) == marks


@pytest.mark.parametrize("second", [mark(2), mark(1, turn=2), mark(1, gap=1)])
def test_a_gap_between_marks_is_named(second: VoiceMark) -> None:
    with pytest.raises(LedgerCorrupt, match="voice mark 1"):
        decode_marks("s", [encode_mark(mark(0)), encode_mark(second)])


# --- blobs --------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=4).map(tuple))
def test_blobs_pack_and_unpack(blobs: tuple[bytes, ...]) -> None:
    refs = UnitMedia(frames=blobs).refs().frames
    assert unpack_blobs("s", "frames", pack_blobs(blobs), refs) == blobs


def test_a_changed_short_or_missing_blob_is_named() -> None:
    ref = media_ref(b"abc")
    for data in (b"abd", b"ab", None):
        with pytest.raises(LedgerCorrupt, match="pcm of unit 3"):
            check_blob("s", "pcm of unit 3", data, ref)
    with pytest.raises(LedgerCorrupt, match="frames"):
        unpack_blobs("s", "frames", b"\x91\xc4\x01a", (ref, ref))
    with pytest.raises(LedgerCorrupt, match="frames"):
        unpack_blobs("s", "frames", b"\xc1", (ref,))


@pytest.mark.parametrize(
    "trim", [Trim(7, 1, 1), Trim(1, 7, 1), Trim(6, 6, 6), Trim(3, 5, 4), Trim(5, 3, 4)]
)
def test_a_trim_that_drops_what_is_needed_is_refused(trim: Trim) -> None:
    with pytest.raises(ValueError, match=r"."):
        trim.check(5)
    Trim(6, 6, 5).check(5)


# --- tokens and names ---------------------------------------------------------------------------


def test_tokens_match_by_hash_current_first() -> None:
    first, first_hash = token.mint()
    second, second_hash = token.mint()
    assert token.match(first, first_hash, second_hash) is token.TokenMatch.CURRENT
    assert token.match(second, first_hash, second_hash) is token.TokenMatch.OFFERED
    assert token.match("guess", first_hash, "") is token.TokenMatch.NONE
    assert token.match("", "", "") is token.TokenMatch.NONE
    assert first not in first_hash


def test_all_keys_of_a_session_share_one_hash_tag() -> None:
    keys = session_keys("a.b-c_1").all()
    assert len(set(keys)) == 10
    assert all(key.startswith("duplex:{a.b-c_1}:") for key in keys)
    assert session_of(keys[0]) == "a.b-c_1"
    assert session_of("duplex:{a}:entries") is None


@pytest.mark.parametrize("name", ["", "a" * 65, "a}b", "a{b", "a b", "ä", "a:b", "a\n"])
def test_names_that_could_leave_the_hash_tag_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="session id"):
        session_keys(name)


# --- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "server",
    [
        {"redis_version": "7.2.4"},
        {"redis_version": "8.2.3"},
        {"redis_version": "7.2.4", "valkey_version": "8.0.0"},
        {"redis_version": "7.2.4", "valkey_version": "9.1.2"},
    ],
)
def test_suitable_servers(server: dict[str, str]) -> None:
    check_server(server, {"maxmemory_policy": "noeviction"})


@pytest.mark.parametrize(
    ("server", "policy"),
    [
        ({"redis_version": "7.0.15"}, "noeviction"),
        ({"redis_version": "6.2.0"}, "noeviction"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.9"}, "noeviction"),
        ({}, "noeviction"),
        ({"redis_version": "8.0.0"}, "volatile-lru"),
    ],
)
def test_unsuitable_servers_are_refused(server: dict[str, str], policy: str) -> None:
    with pytest.raises(LedgerUnsuitable):
        check_server(server, {"maxmemory_policy": policy})


LEASE_SCRIPTS = {
    *(
        "acquire",
        "renew",
        "release",
        "park",
        "offer",
        "hand_over",
        "break",
        "erase",
        "note",
        "reach",
    ),
}


def test_scripts_keep_their_flags_first_and_share_the_prelude() -> None:
    for name in ScriptName:
        text = scripts.source(name)
        assert "local function read_meta" in text
        flagged = text.startswith("#!lua flags=allow-oom\n")
        # Whoever must not lose its lease to a full server may write there; who adds bytes may not.
        assert flagged == (name in LEASE_SCRIPTS)
