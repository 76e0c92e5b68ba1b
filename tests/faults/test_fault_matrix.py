"""Everything that breaks, at every moment of a conversation: nothing acknowledged is lost, nothing
is said twice, one writer at a time, and the silence has a bound. Judged by the history checker.

`make test` takes a part of the cells, in which every fault and every moment comes;
`make test-long` all of them.
"""

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis import Redis
from support import last_run
from support.aof_witness import AofWitness
from support.valkeys import crash, failing_pair

from duplex_sidecar.cli.history import check
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.server import Durability

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import undisturbed
from support.fake_grounds import LEASE_MS, MARGIN_MS, RENEW_MS, TERMS, UNITS, FakeGrounds
from support.fault_cells import Cell, Server
from support.fault_table import FAULTS, MOMENTS, Fault, Moment, hold_cell
from support.histories import Doors, World, short_leases

pytestmark = pytest.mark.fault
CELL_S = 120.0
SHARES = 4
"""Of so many cells the short form takes one."""

CELLS = [
    pytest.param(fault, moment, id=f"{fault.name}-{moment.name}")
    for row, fault in enumerate(FAULTS)
    for column, moment in enumerate(MOMENTS)
    if last_run.is_long() or (row + column) % SHARES == 0
]


@dataclass
class Ground:
    """What the cells share: a server, the tokens of an undisturbed conversation, their files."""

    valkey: EmbeddedValkey
    folder: Path
    tokens: tuple[tuple[int, ...], ...] = ()
    files: list[Path] = field(default_factory=list)

    @contextmanager
    def server(self, fault: Fault) -> Iterator[Server]:
        if not fault.needs_replica:
            yield Server(self.valkey.url, self._restart, self._configure)
            return
        with failing_pair(self.folder / f"pair-{len(self.files)}") as pair:
            yield Server(pair.primary.url, self._restart, self._configure, pair.fail_over)

    def _restart(self) -> None:
        crash(self.valkey)
        self.valkey.start()

    def _configure(self, name: str, value: str) -> None:
        with Redis.from_url(self.valkey.url) as client:
            client.config_set(name, value)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("matrix")
    with ExitStack() as stack:
        valkey = EmbeddedValkey(folder / "valkey")
        valkey.start()
        stack.callback(valkey.stop)
        yield Ground(valkey, folder)


@pytest.fixture
async def doors(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Doors]:
    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=RENEW_MS)
    async with Doors().open() as doors:
        yield doors


@pytest.mark.parametrize(("fault", "moment"), CELLS)
async def test_a_cell(
    ground: Ground, doors: Doors, witness: AofWitness, fault: Fault, moment: Moment
) -> None:
    name = f"{fault.name}-{moment.name}"
    if not ground.tokens:
        said, _ = await undisturbed(ground.valkey.url, "calm", TERMS, UNITS)
        ground.tokens = tuple(said)
    with ground.server(fault) as server:
        durability = Durability.REPLICATED if fault.needs_replica else Durability.MEMORY
        world = World(
            doors,
            server.url,
            ground.folder,
            name,
            durability=durability,
            witness=None if fault.needs_replica else witness,
        )
        async with world:
            grounds = FakeGrounds(world)
            seed = zlib.crc32(name.encode())
            cell = await Cell.prepare(grounds, server, name, moment.watched, seed)
            try:
                async with asyncio.timeout(CELL_S):
                    await hold_cell(cell, fault, moment)
            finally:
                for person in cell.people:
                    await world.finish(person.session, ground.tokens)
                file = world.observer.write(ground.folder / f"{name}.jsonl")
    report = world.report()
    last_run.add("fault_matrix", [report], cells={fault.name: {moment.name: 1}})
    assert report.violations == (), file
    ground.files.append(file)


def test_the_files_of_all_cells_hold(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    """And enough happened in them."""
    cells = len(ground.files)
    assert cells == len(CELLS)
    few = cells // 10
    status = check(*ground.files, zombies=few, redos=few, resends=few, takeovers=2 * few)
    assert status == 0, capsys.readouterr().out


def test_the_append_only_file_of_all_cells_says_the_same(
    ground: Ground, witness: AofWitness, tmp_path: Path
) -> None:
    """Of all whose server is still the same."""
    assert len(witness.ends) > len(CELLS)
    assert witness.differences(ground.valkey.url, tmp_path / "copy") == []
    last_run.add("append_only_file", [], sessions={"fault_matrix": len(witness.ends)})
