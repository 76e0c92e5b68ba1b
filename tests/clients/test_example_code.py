"""examples/talk.py, as somebody would run it against a sidecar of their own."""

import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.material import EXAMPLES, speech

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.client.media import SAMPLE_RATE_HZ

pytestmark = pytest.mark.client

UNITS = 8
"""Enough of the recording for the model to answer."""


def talk(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, EXAMPLES / "talk.py", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def recording(path: Path, channels: int = 1) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, SAMPLE_RATE_HZ, 0, "NONE", ""))
        file.writeframes(speech(UNITS))
    return path


def test_the_example_holds_a_conversation(sidecar: LocalSidecar, tmp_path: Path) -> None:
    token_file, reply = tmp_path / "token", tmp_path / "out.wav"
    token_file.write_text(sidecar.settings.admin_token)
    done = talk(sidecar.base_url, token_file, recording(tmp_path / "in.wav"), reply)
    assert (done.returncode, done.stderr) == (0, "")
    units = [line for line in done.stdout.splitlines() if line.startswith("unit ")]
    assert [int(line.split()[1].rstrip(":")) for line in units] == list(range(1, UNITS + 1))
    with wave.open(str(reply)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() > 0


class Refuses(BaseHTTPRequestHandler):
    """Somebody else's server, or one with another token."""

    def do_PUT(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


NOWHERE = "http://127.0.0.1:1"
WRONG = {
    "address that nobody has": ({"url": NOWHERE}, f"{NOWHERE}: "),
    "no address": ({"url": "localhost"}, "localhost: "),
    "bad address": ({"url": "http://[::1"}, "http://[::1: "),
    "token refused": ({}, "401"),
    "no token file": ({"token_file": "nothing"}, "nothing: No such file or directory"),
    "token file of bytes": ({"token_file": "bytes"}, "bytes holds no admin token"),
    "no recording": ({"recording": "nothing"}, "nothing: No such file or directory"),
    "empty recording": ({"recording": "empty"}, "empty is no WAV file: it ends too early"),
    "other recording": ({"recording": "bytes"}, "bytes is no WAV file: "),
    "stereo": ({"recording": "stereo.wav"}, "stereo.wav is not mono with 16 bits a sample"),
    "reply nowhere": ({"reply": "no/reply.wav"}, "no/reply.wav: No such file or directory"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_example_says_what_is_wrong(
    what: str, refusing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    Path("bytes").write_bytes(b"\xff" * 100)
    Path("empty").touch()
    recording(Path("in.wav"))
    recording(Path("stereo.wav"), 2)
    changed, told = WRONG[what]
    usual = {"url": refusing, "token_file": "token", "recording": "in.wav", "reply": "out.wav"}
    done = talk(*(usual | changed).values())
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


def test_the_example_says_how_it_is_called() -> None:
    done = talk("http://127.0.0.1:1")
    assert done.returncode == 2
    assert "python examples/talk.py URL ADMIN_TOKEN_FILE RECORDING [REPLY]" in done.stderr
    assert "Traceback" not in done.stderr
