"""Sessions carried from one ledger to another, erased, swept: over a real Valkey and the verbs."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from support.ledger_kit import Writer, spoken_batch
from support.patience import PATIENT

from duplex_sidecar.cli.ledger import erase, verify
from duplex_sidecar.cli.ledger_carrying import archive, import_archive
from duplex_sidecar.cli.ledger_sweeping import sweep
from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.ledger.archive import MAGIC, read_archive, write_archive
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    NotOffered,
    SessionErased,
    SessionExists,
)
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.media import Trim
from duplex_sidecar.ledger.moving import Offer
from duplex_sidecar.ledger.pending import PendingErasures
from duplex_sidecar.ledger.session_view import LoadedSession, Phase
from duplex_sidecar.ledger.store import Ledger

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import Caller, Terms, check_events, replica, tokens, undisturbed

pytestmark = pytest.mark.integration
UNITS = 12


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For erasures that have to wait."""
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
async def ledger(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(valkey.url, PATIENT)
    yield ledger
    await ledger.close()


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


def content(loaded: LoadedSession) -> object:
    """What a session is, without its id and its hashes."""
    return (
        [
            (type(entry.record), entry.record.seq, entry.record.at_ms)  # type: ignore[union-attr]
            for entry in loaded.entries
        ],
        loaded.committed and [unit.token_ids for unit in loaded.committed],
        loaded.media,
        loaded.marks,
        loaded.state,
        loaded.accepted_state,
        loaded.voice_state,
        loaded.reference_rows,
        (loaded.head.committed_seq, loaded.head.open_seq, loaded.meta.events_last),
    )


@pytest.mark.parametrize("trimmed", [False, True])
async def test_what_is_imported_is_the_session_under_its_new_id(
    ledger: Ledger, session: str, trimmed: bool
) -> None:
    writer = await Writer.create(ledger, session)
    for seq in range(1, UNITS + 1):
        keep = max(1, seq - 4)
        trim = Trim(window_below=keep, pcm_below=keep, records_below=keep) if trimmed else None
        await writer.unit(seq, trim=trim)
        await ledger.journal(writer.lease, spoken_batch(seq, seq, chunk=seq - 1))
    await writer.accept(UNITS + 1, state=b"carry")
    before = await ledger.load(session)
    data = write_archive(await ledger.archive(session))
    twin = f"{session}-twin"
    await ledger.import_as(read_archive(data), twin)
    after = await ledger.load(twin)
    assert content(after) == content(before)
    assert after.opening.session == twin
    # Where the chain begins in the middle, the opening's hash is not among those before it.
    assert (after.head.hash == before.head.hash) == trimmed
    old, new = [(await ledger.events_after(name, UNITS - 3)).events for name in (session, twin)]
    assert new == old
    # The twin goes on by itself; the original has not moved.
    heir = await Writer.take_over(ledger, twin, "replica-b")
    assert heir.lease.fence == 1
    await heir.commit(UNITS + 1)
    await heir.unit(UNITS + 2)
    assert (await ledger.load(session)).head == before.head
    await writer.commit(UNITS + 1)


async def test_what_somebody_was_about_to_do_with_the_original_is_not_imported(
    ledger: Ledger, session: str
) -> None:
    """Neither the offer of a replica that was to take it nor how often its owner failed."""
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    assert await ledger.count_failure(writer.lease, 2, "a") == 1
    offer = Offer(session, "replica-b", 70, "n" * 32, "b:1")
    await ledger.moves.offer(offer)
    twin = f"{session}-twin"
    await ledger.import_as(await ledger.archive(session), twin)
    heir = await Writer.take_over(ledger, twin, "replica-c")
    assert await ledger.count_failure(heir.lease, 2, "b") == 1
    with pytest.raises(NotOffered):
        await ledger.moves.hand_over(heir.lease, heir.head, replica="replica-b", fence=70)
    await ledger.moves.offer(msgspec.structs.replace(offer, session=twin, fence=7))
    await ledger.moves.hand_over(heir.lease, heir.head, replica="replica-b", fence=7)
    assert await ledger.count_failure(writer.lease, 2, "c") == 2


async def test_an_import_never_replaces_anything(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    archived = await ledger.archive(session)
    with pytest.raises(ValueError, match="new id only"):
        await ledger.import_as(archived, session)
    await ledger.import_as(archived, f"{session}-a")
    with pytest.raises(SessionExists):
        await ledger.import_as(archived, f"{session}-a")
    await ledger.erase(f"{session}-a")
    with pytest.raises(SessionErased):
        await ledger.import_as(archived, f"{session}-a")


async def test_a_damaged_archive_is_refused(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    data = write_archive(await ledger.archive(session))
    for damaged in (
        b"",
        data[:-1],
        data.replace(MAGIC, b"something else\n"),
        data[:200] + data[201:],
    ):
        with pytest.raises(LedgerCorrupt, match="archive"):
            read_archive(damaged)


async def test_an_imported_conversation_goes_on_with_the_same_words(
    valkey: EmbeddedValkey, session: str
) -> None:
    """The answers are those of the session that was left in peace: state, rows, seed, all of it."""
    terms = Terms("context")
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS)
    async with replica(valkey.url, "source") as here:
        await here.open(session, terms)
        caller = Caller(session)
        await caller.dial(here)
        await caller.talk(UNITS // 2)
        archived = await here.ledger.archive(session)
    twin = f"{session}-twin"
    async with replica(valkey.url, "target") as there:
        await there.ledger.import_as(archived, twin)
        caller.session = twin
        await caller.dial(there)
        await caller.talk(UNITS)
        check_events(caller)
        assert await tokens(there.ledger, twin) == calm


# --- the verbs ------------------------------------------------------------------------------------


async def test_the_verbs_carry_sweep_and_erase(
    valkey: EmbeddedValkey,
    ledger: Ledger,
    session: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    file, url, twin = tmp_path / "archive", valkey.url, f"{session}-twin"
    keep = tmp_path / "keep"

    def verbs() -> None:
        assert archive(session, url=url, output=file) == 0
        assert import_archive(file, url=url, as_=session) == 2
        assert import_archive(file, url=url, as_=twin) == 0
        assert verify(twin, url=url) == 0
        keep.write_text(f"{session}\n")
        assert sweep(url=url, idle_hours=0.0, yes=True) == 2
        assert sweep(url=url, idle_hours=0.0, keep=keep) == 0

    await asyncio.to_thread(verbs)
    assert await ledger.phase(twin) is Phase.OPEN
    server = Redis.from_url(url)
    known = {one async for one in ledger.reader.sessions()} - {twin}
    keep.write_text("\n".join(known))
    # Its owner is alive.
    await ledger.acquire(twin, "replica-b")
    await asyncio.to_thread(lambda: sweep(url=url, idle_hours=0.0, keep=keep, yes=True))
    assert await ledger.phase(twin) is Phase.OPEN
    await ledger.break_lease(twin, replica="replica-b")
    await asyncio.to_thread(lambda: sweep(url=url, idle_hours=0.0, keep=keep, yes=True))
    assert await ledger.phase(twin) is Phase.ERASED
    assert await ledger.phase(session) is Phase.OPEN
    assert await server.exists(*session_keys(twin).all()) == 1
    assert 0 < await server.pttl(session_keys(twin).meta) <= 7 * 24 * 3600 * 1000
    await server.aclose()

    never = f"{session}-never"

    def erasing() -> None:
        assert erase(session, url=url, yes=True) == 0
        assert erase(session, url=url, yes=True) == 0
        assert erase("no/name", url=url, yes=True) == 2
        assert erase(never, url=url, yes=True) == 2
        assert erase(never, url=url, yes=True, even_unknown=True) == 0
        assert erase(session, url=f"unix://{tmp_path}/none", yes=True, patience_s=0.0) == 2

    await asyncio.to_thread(erasing)
    told = capsys.readouterr().err
    assert f"session {never}: not in the ledger, nothing erased" in told
    assert "may be there still" in told
    assert await ledger.phase(never) is Phase.ERASED


async def test_a_name_that_is_refused_stays_free(
    valkey: EmbeddedValkey, ledger: Ledger, session: str
) -> None:
    order = lambda: erase(session, url=valkey.url, yes=True)  # noqa: E731
    assert await asyncio.to_thread(order) == 2
    assert PendingErasures(default_cache_dir(), valkey.url).sessions() == []
    await Writer.create(ledger, session)
    assert await asyncio.to_thread(order) == 0
    assert await ledger.phase(session) is Phase.ERASED


async def test_an_erasure_waits_for_a_server_that_is_away(
    valkey: EmbeddedValkey, ledger: Ledger, session: str
) -> None:
    await Writer.create(ledger, session)
    valkey.stop()
    waiting = asyncio.create_task(
        asyncio.to_thread(lambda: erase(session, url=valkey.url, yes=True, patience_s=60.0))
    )
    await asyncio.sleep(0.6)
    assert not waiting.done()
    valkey.start()
    assert await waiting == 0
    assert await ledger.phase(session) is Phase.ERASED
