"""The arena: two sidecars that only these tests have, since they kill them and their parts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import last_run
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What the run came to is kept with its proofs."""
    last_run.finish(session.testscollected, session.testsfailed)
