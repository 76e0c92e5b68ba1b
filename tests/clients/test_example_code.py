"""examples/talk.py, as somebody would run it against a sidecar of their own."""

import json
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.material import EXAMPLES, speech
from websockets.sync.server import ServerConnection, serve

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
        samples = np.frombuffer(speech(UNITS), "<i2")
        file.writeframes(np.repeat(samples, channels).tobytes())
    return path


def test_the_example_holds_a_conversation(sidecar: LocalSidecar, tmp_path: Path) -> None:
    token_file, reply = tmp_path / "token", tmp_path / "out.wav"
    token_file.write_text(sidecar.settings.admin_token)
    given = recording(tmp_path / "in.wav", channels=2)
    done = talk(sidecar.base_url, token_file, given, reply)
    assert (done.returncode, done.stderr) == (0, "")
    units = [line for line in done.stdout.splitlines() if line.startswith("unit ")]
    assert [int(line.split()[1].rstrip(":")) for line in units] == list(range(1, UNITS + 1))
    with wave.open(str(reply)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() > 0


class Refuses(BaseHTTPRequestHandler):
    """Somebody else's server, or one with another token. answer: its JSON, if it is one of ours."""

    answer: Any = None

    def do_PUT(self) -> None:
        if self.answer is None:
            self.send_error(401)
            return
        self.send_response(422)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

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
    "no token file": ({"token_file": "nothing"}, "nothing: No such file or directory"),
    "token file of bytes": ({"token_file": "bytes"}, "bytes holds no token"),
    "no recording": ({"recording": "nothing"}, "nothing: No such file or directory"),
    "empty recording": ({"recording": "empty"}, "empty is no recording: Invalid data"),
    "other recording": ({"recording": "bytes"}, "bytes is no recording: Invalid data"),
    "no sound": ({"recording": EXAMPLES / "video" / "camera.mp4"}, "no recording: no sound in it"),
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
    changed, told = WRONG[what]
    usual = {"url": refusing, "token_file": "token", "recording": "in.wav", "reply": "out.wav"}
    done = talk(*(usual | changed).values())
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


PROBLEMS = [{"path": "spec.voice", "message": "is 3"}, {"path": "spec.prompt", "message": "is 4"}]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "401 Unauthorized"),
        ({"error": {"code": "no_slot", "message": "No slot is free."}}, "No slot is free."),
        (
            {"error": {"code": "invalid_manifest", "problems": PROBLEMS}},
            "invalid_manifest; spec.voice: is 3; spec.prompt: is 4",
        ),
        ([], "422 Unprocessable"),
    ],
)
def test_a_session_that_is_refused_is_told_with_the_servers_reason(
    answer: object, reason: str, refusing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refuses, "answer", answer)
    (tmp_path / "token").write_text("secret")
    done = talk(refusing, tmp_path / "token", recording(tmp_path / "in.wav"), tmp_path / "out.wav")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{refusing}: {reason}")
    assert len(done.stderr.splitlines()) == 1


def test_the_example_stops_where_its_format_is_refused(tmp_path: Path) -> None:
    """A server that knows no rates: nothing is said to it any more."""
    said: list[str] = []

    def door(connection: ServerConnection) -> None:
        connection.send(json.dumps({"type": "session.created", "session": {"id": "s"}}))
        for message in connection:
            said.append(json.loads(message)["type"])
            if len(said) == 1:
                error = {"code": "invalid_sample_rate", "message": "The rate is wrong."}
                connection.send(json.dumps({"type": "error", "error": error}))

    with serve(door, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        (tmp_path / "token").write_text("secret")
        given = recording(tmp_path / "in.wav")
        done = talk(url, tmp_path / "token", given, tmp_path / "out.wav", "--session", "s")
        server.shutdown()
        thread.join()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{url}: invalid_sample_rate: The rate is wrong.\n"
    assert said == ["session.update"]


def test_the_shipped_recording_is_what_is_said_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    done = talk(NOWHERE, "token")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{NOWHERE}: ")
    assert Path("reply.wav").is_file()


def test_the_example_says_how_it_is_called() -> None:
    done = talk("http://127.0.0.1:1")
    assert done.returncode == 2
    assert "python examples/talk.py URL TOKEN_FILE [RECORDING [REPLY]]" in done.stderr
    assert "Traceback" not in done.stderr
