"""One real sidecar for all tests that leave it as they found it: a start takes half a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sidecars import Bed, make_bed

from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.client.local_sidecar import LocalSidecar

MAX_MODEL_TOKENS = 2048
SLOTS = 6


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The tiny checkpoint, made once and kept in the cache."""
    folder = default_checkpoint()
    make_tiny(folder, cache_dir=default_cache_dir())
    return folder


@pytest.fixture(scope="session")
def bed(tiny_checkpoint: Path) -> Iterator[Bed]:
    """A running Valkey and an OTLP sink, without a sidecar."""
    bed = make_bed(tiny_checkpoint)
    try:
        bed.valkey.start()
        yield bed
    finally:
        bed.close()


@pytest.fixture(scope="session")
def sidecar(bed: Bed) -> LocalSidecar:
    """Ready. Its sessions are the tests' own; nobody kills it or its parts."""
    sidecar = bed.prepare("shared", slots=SLOTS, max_model_tokens=MAX_MODEL_TOKENS)
    sidecar.start()
    sidecar.wait_ready()
    return sidecar
