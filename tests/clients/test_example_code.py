"""examples/talk.py, as somebody would run it against a sidecar of their own."""

import subprocess
import sys
import wave
from pathlib import Path

import pytest
from support.material import EXAMPLES, speech

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.client.media import SAMPLE_RATE_HZ

pytestmark = pytest.mark.client

UNITS = 8
"""Enough of the recording for the model to answer."""


def test_the_example_holds_a_conversation(sidecar: LocalSidecar, tmp_path: Path) -> None:
    token_file, recording, reply = (tmp_path / name for name in ("token", "in.wav", "out.wav"))
    token_file.write_text(sidecar.settings.admin_token)
    with wave.open(str(recording), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE_HZ, 0, "NONE", ""))
        file.writeframes(speech(UNITS))
    command = (sys.executable, EXAMPLES / "talk.py", sidecar.base_url, token_file, recording, reply)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    units = [line for line in done.stdout.splitlines() if line.startswith("unit ")]
    assert [int(line.split()[1].rstrip(":")) for line in units] == list(range(1, UNITS + 1))
    with wave.open(str(reply)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() > 0
