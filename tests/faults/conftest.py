"""The arena: two sidecars that only these tests have, since they kill them and their parts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import last_run
from support.aof_witness import AofWitness
from support.arena import Arena
from support.sidecars import make_bed


@pytest.fixture(scope="session")
def arena(tiny_checkpoint: Path) -> Iterator[Arena]:
    arena = Arena(make_bed(tiny_checkpoint))
    try:
        arena.start_without_ledger()
        yield arena
    finally:
        arena.bed.close()


@pytest.fixture(scope="module")
def witness() -> AofWitness:
    """Hears what the product's reader says of the sessions of a module, for a last test that asks
    the server's append-only file."""
    return AofWitness()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What the run came to is kept with its proofs."""
    last_run.finish(session.testscollected, session.testsfailed)
