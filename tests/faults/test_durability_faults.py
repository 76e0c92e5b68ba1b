"""What each durability is worth when the ledger's server is treated badly under a conversation:
where it permits a loss the loss is there to be seen, where it does not nothing is lost. Judged by
the history checker from outside, and by reading the ledger."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import last_run
from support.patience import PATIENCE_S

from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.observations import Frame
from duplex_sidecar.history.verdict import LOSSES, Report
from duplex_sidecar.ledger.errors import LedgerError
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.server import Durability

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import Terms, eventually
from support.disk_shim import DiskShim, build_shim
from support.histories import END, Doors, Lost, Member, Person, World, ledger_end, short_leases
from support.ledger_sites import Fault, Site, site
from support.valkeys import ValkeyProcess, crash

pytestmark = pytest.mark.fault

TERMS = Terms("context")
UNITS = 16
MANY_UNITS = 10_000
BEFORE = 5
"""Units that are done when the fault begins."""
MORE = 3
"""Units that are acknowledged under the fault, where anything is."""
UNDER_FAULT_S = 2.0
"""How long the fault lasts where nothing is acknowledged: longer than a lease."""
ANSWERS_S = 3.0
"""For a server that may have answered all that it will."""
LEASE_MS, MARGIN_MS = 900, 150
CALL_TIMEOUT_MS = 800

M, R, F = Durability.MEMORY, Durability.REPLICATED, Durability.FSYNC
PERMITTED = {
    Fault.POWER_CUT: {M},
    Fault.SLOW_DISK: {M},
    Fault.FAILOVER: {M, F},
    Fault.EMPTIED: {M, R, F},
    Fault.KILLED: set[Durability](),
    Fault.STOPPED: set[Durability](),
    Fault.CLOCK_AHEAD: set[Durability](),
    Fault.CLOCK_BACK: set[Durability](),
}
"""Under which durability each fault may lose what was acknowledged: the promised table."""
DISK = {Fault.POWER_CUT, Fault.SLOW_DISK}
GOES_BACK = {*DISK, Fault.FAILOVER, Fault.EMPTIED}
CASES = [
    pytest.param(fault, durability, id=f"{fault}-{durability}")
    for fault in Fault
    for durability in Durability
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def place(tmp_path: Path, library: Path, fault: Fault, durability: Durability) -> Iterator[Site]:
    with site(tmp_path / "site", library, durability, fault) as made:
        yield made


@pytest.fixture
async def world(
    tmp_path: Path, place: Site, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=100)
    async with (
        Doors().open() as doors,
        World(
            doors,
            place.url,
            tmp_path,
            f"{fault}-{place.durability}",
            durability=place.durability,
        ) as world,
    ):
        yield world


async def talk_into_the_fault(world: World, place: Site, person: Person, here: Member) -> int:
    """Returns the last unit that the client was told to be safe, with the fault under way."""
    talking = asyncio.create_task(person.talk(here, MANY_UNITS, close=False))
    await eventually(lambda: BEFORE in person.units_done)
    await asyncio.to_thread(place.begin)
    begun = person.acknowledged_unit
    if place.durability in PERMITTED[place.fault]:
        await eventually(lambda: person.acknowledged_unit >= begun + MORE)
    else:
        with suppress(TimeoutError):
            await eventually(lambda: person.acknowledged_unit >= begun + MORE, UNDER_FAULT_S)
    if place.fault is Fault.STOPPED:
        await asyncio.to_thread(place.strike)  # its owner is still there when it goes on
    world.kill(here)
    with suppress(Lost):
        await talking
    # What the server does yet it does before the blow, so that its answers tell what it has done.
    with suppress(TimeoutError):
        await eventually(lambda: here.proxy.idle, ANSWERS_S)
    return person.acknowledged_unit


async def accepted_units(place: Site, session: str) -> int | None:
    """What the ledger holds; None without such a session."""
    reader = await LedgerReader.connect(place.url)
    try:
        loaded = await reader.load(session)
    except LedgerError:
        return None
    finally:
        await reader.close()
    return max((unit.seq for unit in loaded.accepted), default=0)


@pytest.mark.parametrize(("fault", "durability"), CASES)
async def test_what_is_lost_is_what_the_durability_permits(
    world: World, place: Site, fault: Fault, durability: Durability, tmp_path: Path
) -> None:
    session = world.name
    person = Person(world, session)
    here = await world.start(call_timeout_ms=CALL_TIMEOUT_MS)
    await world.open_session(here, session, TERMS)
    told = await talk_into_the_fault(world, place, person, here)
    cut_bytes = await asyncio.to_thread(place.strike)
    if fault in GOES_BACK:
        world.observer.happened("restored", fault)
    world.url = place.url
    left = await accepted_units(place, session)
    report = await judged(world, session)
    last_run.add(
        "durability",
        [],
        runs=1,
        permitted_losses_seen=int(durability in PERMITTED[fault]),
        lost_where_not_permitted=0 if durability in PERMITTED[fault] else report.lost,
    )
    if durability in PERMITTED[fault]:
        assert report.rules & LOSSES, "the loss was not provoked"
        assert (left is None) == (fault is Fault.EMPTIED)
        assert left is None or BEFORE <= left < told
        assert (cut_bytes > 0) == (fault in DISK)
    else:
        assert report.violations == ()
        assert left is not None
        assert left >= told
    await world.bury(here)
    await go_on(world, person, here, left)
    if durability not in PERMITTED[fault]:
        await world.finish(session)
        kept = world.observer.write(tmp_path / f"{session}.jsonl")
        assert world.report().violations == (), kept
        assert person.ended == END
        assert person.units_done >= set(range(1, UNITS + 1))


def done_units(member: Member, session: str) -> int:
    return member.replica.registry.live[session].conversation.seq


def deafened_in_a_unit(world: World, person: Person, here: Member) -> bool:
    """The client hears nothing from now on, while a unit of its is under way."""
    if person.sent_unit <= done_units(here, person.session):
        return False
    world.sockets.deafen(person.client)
    return True


async def judged(world: World, session: str) -> Report:
    """The history up to now, with the ledger as it stands."""
    end = await ledger_end(world.url, session)
    return check_history([*world.observer.observations, end])


async def go_on(world: World, person: Person, lost: Member, left: int | None) -> None:
    """A successor takes the session up, or says that there is none. A client that has seen what is
    gone is told so before anything else."""
    seen = person.last_sequence
    heir = await world.start(call_timeout_ms=CALL_TIMEOUT_MS)
    world.declare_dead(lost, heir)
    async with asyncio.timeout(PATIENCE_S):
        while person.ended is None:
            with suppress(Lost):
                await person.talk(heir, UNITS)
            await asyncio.sleep(0)
    frames = [one for one in world.observer.observations if isinstance(one, Frame)]
    told = [one.type for one in frames if one.down and one.replica == heir.name]
    if left is None:
        assert person.ended == "session_not_found"
        assert "session.created" not in told, "a lost session is never begun anew"
        return
    resumed = next(one.opened for one in frames if one.replica == heir.name and one.opened)
    rewound = resumed.last_sequence < seen
    assert ("session.resync_required" in told) == rewound


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize(("fault", "durability"), [(Fault.POWER_CUT, Durability.MEMORY)])
async def test_a_living_owner_mends_what_the_disk_has_lost(
    world: World, place: Site, tmp_path: Path, hears: bool
) -> None:
    """The loss that `memory` permits is one of the server and of the owner at the same time. The
    client has heard what is lost, or hears it when it dials again."""
    session = world.name
    person = Person(world, session)
    here = await world.start(call_timeout_ms=CALL_TIMEOUT_MS)
    await world.open_session(here, session, TERMS)
    talking = asyncio.create_task(person.talk(here, MANY_UNITS, close=False))
    await eventually(lambda: BEFORE in person.units_done)
    await asyncio.to_thread(place.begin)
    if hears:
        begun = person.sent_unit
        await eventually(lambda: done_units(here, session) >= begun + MORE)
    else:
        await eventually(lambda: deafened_in_a_unit(world, person, here))
        await eventually(lambda: done_units(here, session) >= person.sent_unit)
    world.sockets.hang_up(person.client)
    with suppress(Lost):
        await talking
    await eventually(lambda: here.proxy.idle)
    told, done = person.acknowledged_unit, done_units(here, session)
    assert await asyncio.to_thread(place.strike) > 0
    world.observer.happened("restored", place.fault)
    kept = await accepted_units(place, session)
    assert kept is not None
    assert kept < done
    assert not hears or (await judged(world, session)).rules & LOSSES
    async with asyncio.timeout(PATIENCE_S):
        while person.ended is None:
            with suppress(Lost):
                await person.talk(here, told + MORE)
            await asyncio.sleep(0)
    await world.finish(session)
    history = world.observer.write(tmp_path / f"{session}.jsonl")
    assert world.report().violations == (), history
    assert person.ended == END
    left = await accepted_units(place, session)
    assert left is not None
    assert left >= told + MORE


@pytest.mark.parametrize("keeps_up", [True, False])
def test_a_death_while_the_disk_is_busy_costs_what_was_not_written(
    tmp_path: Path, library: Path, keeps_up: bool
) -> None:
    """`everysec` answers before it writes while an earlier sync is under way."""
    shim = DiskShim(library, tmp_path / "shim")
    folder = tmp_path / "server"
    options = ("--appendonly", "yes", "--appendfsync", "everysec")
    server = ValkeyProcess(folder, *options, environment=shim.environment)
    server.start()
    try:
        with server.client as client:
            shim.set(hold=True)
            number = 0
            while client.info("persistence")["aof_buffer_length"] == 0:
                client.set(f"key-{number}", "before or behind")
                number += 1
            client.set("confirmed", "yes")
        if keeps_up:
            crash(server)
        else:
            server.kill()
        shim.set()
        server.start()
        with server.client as client:
            assert client.exists("confirmed") == keeps_up
    finally:
        server.kill()
        shim.close()
