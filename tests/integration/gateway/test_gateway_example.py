"""examples/talk.py with a session that is there already, as docs/install.md tells of a cluster."""

import asyncio
import secrets
import sys
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support.material import EXAMPLES

from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, Yard, gate, yard
from session_kit import RATE_HZ, TOKEN

pytestmark = pytest.mark.integration

UNITS = 3


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url) as front:
        yield front


def recording(path: Path) -> Path:
    tone = np.sin(np.arange(UNITS * RATE_HZ) / 20) * 8_000
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(tone.astype("<i2").tobytes())
    return path


async def talk(*arguments: object) -> tuple[int | None, str, str]:
    """(exit status, standard output, standard error)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLES / "talk.py",
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(240):
        out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_the_example_talks_to_a_session_through_the_gateway(
    ground: Yard, front: Gate, tmp_path: Path
) -> None:
    await ground.build()
    session = f"e-{secrets.token_hex(4)}"
    await ground.operator.declare(session)
    url, token, spoken = f"http://127.0.0.1:{front.port}", tmp_path / "token", tmp_path / "in.wav"
    token.write_text(f"{TOKEN}\n")
    reply = tmp_path / "reply.wav"
    status, out, errors = await talk(url, token, recording(spoken), reply, "--session", session)
    assert (status, errors) == (0, "")
    units = [line.split(":")[0] for line in out.splitlines() if line.startswith("unit ")]
    assert units == [f"unit {number}" for number in range(1, UNITS + 1)]
    assert len(await ground.heard_input(session)) == UNITS

    token.write_text("another")
    status, _, errors = await talk(url, token, spoken, reply, "--session", session)
    assert status == 1
    assert errors.startswith(f"{url}: session_not_found: ")
    assert len(errors.splitlines()) == 1
