"""What tests of many folders run on. One real sidecar serves all that leave it as they found it: a
start takes half a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.material import CLIP_S, CLIP_VOICE
from support.sidecars import Bed, make_bed

from duplex_sidecar.checkpoint.recording import recording_path
from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.cli.voice import make
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey

MAX_MODEL_TOKENS = 2048
SLOTS = 6


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The tiny checkpoint, made once and kept in the cache."""
    folder = default_checkpoint()
    make_tiny(folder, cache_dir=default_cache_dir())
    return folder


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """A ledger's server for the sessions of one module."""
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


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
    """Ready. Its sessions are the tests' own; nobody kills it or its parts. Besides the
    checkpoint's voice it has one made of a clip."""
    voices_dir = bed.work / "voices"
    voices_dir.mkdir()
    output = voices_dir / f"{CLIP_VOICE}.safetensors"
    made = make(recording_path(), checkpoint=bed.checkpoint, output=output, length_s=CLIP_S)
    assert made == 0
    sidecar = bed.prepare(
        "shared", slots=SLOTS, max_model_tokens=MAX_MODEL_TOKENS, voices_dir=str(voices_dir)
    )
    sidecar.start()
    sidecar.wait_ready()
    return sidecar
