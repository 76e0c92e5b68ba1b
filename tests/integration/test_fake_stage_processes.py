"""The sidecar with fake stages (`tests/fakes/fake_sidecar.py`), as pods of tests run it: a whole
one but for what its stages answer."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.material import manifest, speech
from support.processes import words_of
from support.realtime import conversing

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.stages.launch import STAGES

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).parents[1] / "fakes" / "fake_sidecar.py"


@pytest.fixture
def sidecar(valkey: EmbeddedValkey, tiny_checkpoint: Path) -> Iterator[LocalSidecar]:
    """Ready."""
    # Sockets lie below it: short.
    with tempfile.TemporaryDirectory(prefix="duplex-fakes-") as folder:
        prepared = LocalSidecar.prepare(
            Path(folder),
            checkpoint=str(tiny_checkpoint),
            redis_url=valkey.url,
            cache_dir=str(default_cache_dir()),
            replica="fakes",
        )
        config = Path(folder) / "sidecar.json"
        config.write_bytes(msgspec.json.encode(prepared.settings))
        command = (sys.executable, str(PROGRAM), "serve", "--config", str(config))
        with prepared.log.open("ab") as log:
            prepared.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            prepared.wait_ready()
            yield prepared
        finally:
            prepared.stop()


def stage_processes(sidecar: LocalSidecar) -> dict[str, psutil.Process]:
    """By the stage's name."""
    found: dict[str, psutil.Process] = {}
    for process in sidecar.tree():
        words = words_of(process)
        named = set(words) & set(STAGES)
        if any(part.endswith("fake_stage_process.py") for part in words):
            found[named.pop()] = process
    return found


async def test_a_conversation_over_fake_stages(sidecar: LocalSidecar) -> None:
    """And on, when a stage's process has died: the supervisor knows no difference."""
    assert set(stage_processes(sidecar)) == set(STAGES)
    async with conversing(sidecar, manifest(), "fakes") as client:
        await client.speak(speech(4))
        await client.until_unit(4)
        stage_processes(sidecar)["thinker"].kill()
        await client.speak(speech(4, 4.0))
        await client.until_unit(8)
        client.heard.assert_whole()
        assert client.heard.errors == []
        assert client.heard.audio_bytes
