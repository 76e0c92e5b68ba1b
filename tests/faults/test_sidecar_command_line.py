"""`duplex serve`, `demo` and `run` where something is missing, wrong, taken or full: an exit status
and sentences that a person can act on; nothing is left running."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import redis
import torch
from safetensors.torch import load_file, save_file
from support.material import EXAMPLES, manifest
from support.sidecars import Bed, make_bed

from duplex_sidecar.cli.demo import demo
from duplex_sidecar.cli.leaving import INTERRUPTED
from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.cli.serve import (
    EXIT_CHECKPOINT,
    EXIT_LEDGER,
    EXIT_PORT_TAKEN,
    EXIT_START,
    EXIT_USAGE,
)
from duplex_sidecar.client.local_sidecar import LocalSidecar

pytestmark = pytest.mark.fault


def duplex(*arguments: str, timeout_s: float = 180, **environment: str) -> tuple[int, str]:
    """(exit status, what it printed)."""
    done = subprocess.run(
        [sys.executable, "-m", "duplex_sidecar.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200", **environment},
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout.decode()


def serve(folder: Path, checkpoint: Path, **settings: Any) -> tuple[int, str]:
    """`duplex serve` with settings of its own; it is expected to end by itself."""
    values = {
        "checkpoint": str(checkpoint),
        "redis_url": f"unix://{folder}/no.sock",
        "cache_dir": str(default_cache_dir()),
    }
    sidecar = LocalSidecar.prepare(folder / "run", **(values | settings))
    config = folder / "sidecar.json"
    config.write_bytes(msgspec.json.encode(sidecar.settings))
    result = duplex("serve", "--config", str(config))
    assert left_of_this_test(str(folder)) == []
    return result


def left_of_this_test(folder: str) -> list[str]:
    """The same once the system has taken away what was killed."""
    deadline = time.monotonic() + 60
    while (found := children_of_this_test(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def children_of_this_test(folder: str) -> list[str]:
    """Command lines of processes that were started for that folder."""
    found: list[str] = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if folder in line:
            found.append(line)
    return found


# --- the checkpoint -------------------------------------------------------------------------------


@pytest.fixture
def copied(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be spoilt."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    return folder


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    status, text = serve(tmp_path, missing)
    assert status == EXIT_CHECKPOINT
    assert str(missing) in text
    assert f"duplex checkpoint make {missing}" in text
    assert "Traceback" not in text


def test_a_checkpoint_of_another_shape_is_one_list(copied: Path, tmp_path: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    names = [name for name in sorted(weights) if "layers.0" in name]
    gone, reshaped = names[0], names[1]
    del weights[gone]
    weights[reshaped] = torch.zeros(3, 5)
    weights["llm.something.else"] = torch.zeros(1)
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    (copied / "voices" / "default.safetensors").unlink()
    status, text = serve(tmp_path, copied)
    assert status == EXIT_CHECKPOINT
    for name in (gone, reshaped, "llm.something.else", "voices"):
        assert name in text
    assert "[3, 5]" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "assets/token2wav/flow.pt"]
)
def test_a_checkpoint_that_was_copied_in_part(copied: Path, tmp_path: Path, name: str) -> None:
    file = copied / name
    os.truncate(file, file.stat().st_size // 2)
    status, text = serve(tmp_path, copied)
    assert status == EXIT_CHECKPOINT
    assert Path(name).name in text
    assert "Traceback" not in text


# --- settings, port, ledger -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"port": 70_000}, "port"),
        ({"slots": 0}, "slots"),
        ({"slots": True}, "slots"),
        ({"checkpoint": "relative/path"}, "checkpoint"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"redis_url": "foo"}, "ledger address"),
        ({"redis_url": "redis://u:secret/x@h"}, "percent-encoded"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    values = {
        "checkpoint": "/c",
        "redis_url": "unix:///s",
        "runtime_dir": str(tmp_path),
        "cache_dir": "/c",
    }
    config = tmp_path / "sidecar.json"
    config.write_text(json.dumps(values | change))
    status, text = duplex("serve", "--config", str(config))
    assert status == EXIT_USAGE
    assert word in text
    assert "Traceback" not in text


def test_settings_that_are_not_there(tmp_path: Path) -> None:
    status, text = duplex("serve", "--config", str(tmp_path / "none.json"))
    assert status == EXIT_USAGE
    assert f"duplex serve: --config: {tmp_path / 'none.json'}: No such file" in text


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--port", "{taken}"), EXIT_PORT_TAKEN, "Address already in use"),
        (("{folder}/none",), EXIT_CHECKPOINT, "duplex checkpoint make"),
        (("--host", "no.such.host.invalid"), EXIT_PORT_TAKEN, "cannot listen on"),
        (("--redis-url", "foo"), EXIT_USAGE, "not a ledger address"),
    ],
)
def test_a_start_that_fails_leaves_nothing_and_says_no_address(
    tmp_path: Path, arguments: tuple[str, ...], status: int, told: str
) -> None:
    """With an embedded Valkey of its own. Nothing but its cache's folders is left."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        places = {"folder": str(tmp_path), "taken": port}
        spare = () if "--port" in arguments else ("--port", "0")
        (tmp_path / "tmp").mkdir()
        result = duplex(
            "serve",
            *(each.format(**places) for each in arguments),
            *spare,
            TMPDIR=str(tmp_path / "tmp"),
            DUPLEX_CACHE_DIR=str(tmp_path / "cache"),
        )
    assert result[0] == status
    assert told in result[1]
    assert "http://" not in result[1]
    assert "Traceback" not in result[1]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert left_of_this_test(str(tmp_path)) == []


def test_a_start_that_fails_late_takes_its_valkey_along(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A ledger folder that Valkey cannot use: everything else was right until then."""
    cache = tmp_path / "cache"
    (cache / "ledger" / "appendonlydir").mkdir(parents=True)
    (cache / "ledger" / "appendonlydir" / "appendonly.aof.manifest").write_text("broken")
    (tmp_path / "tmp").mkdir()
    status, text = duplex(
        "serve",
        str(tiny_checkpoint),
        "--port=0",
        TMPDIR=str(tmp_path / "tmp"),
        DUPLEX_CACHE_DIR=str(cache),
    )
    assert status == EXIT_LEDGER
    assert "name a server with --redis-url" in text
    assert "http://" not in text
    assert list((tmp_path / "tmp").iterdir()) == []
    assert left_of_this_test(str(tmp_path)) == []


def test_a_port_that_is_taken(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, text = serve(tmp_path, tiny_checkpoint, port=port)
    assert status == EXIT_PORT_TAKEN
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in text


def test_a_runtime_folder_that_cannot_be_made(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    status, text = serve(tmp_path, tiny_checkpoint, runtime_dir=str(tmp_path / "file" / "run"))
    assert status == EXIT_USAGE
    assert "runtime folder" in text
    assert "Traceback" not in text


def test_a_ledger_that_would_lose_sessions_is_refused(bed_alone: Bed, tmp_path: Path) -> None:
    """A server that evicts keys. The stages, which are under way by then, are gone with it."""
    bed_alone.valkey.start()
    with redis.Redis.from_url(bed_alone.valkey.url) as connection:
        connection.config_set("maxmemory-policy", "allkeys-lru")
    status, text = serve(tmp_path, bed_alone.checkpoint, redis_url=bed_alone.valkey.url)
    assert status == EXIT_START
    assert "maxmemory-policy allkeys-lru" in text
    assert "Traceback" not in text


@pytest.fixture
def bed_alone(tiny_checkpoint: Path) -> Iterator[Bed]:
    bed = make_bed(tiny_checkpoint)
    yield bed
    bed.close()


# --- output ---------------------------------------------------------------------------------------


def mounting() -> tuple[str, ...] | None:
    """How to run a command that may mount something of its own. None: not on this machine."""
    for way in (("unshare", "--mount"), ("unshare", "--mount", "--map-root-user")):
        try:
            tried = subprocess.run(
                [*way, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
            )
        except FileNotFoundError:
            return None
        if tried.returncode == 0:
            return way
    return None


def test_demo_output_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "demo-out"
    file.write_text("in the way")
    status, text = duplex("demo", "--out", str(file))
    assert status == 1
    assert f"duplex demo: {file}: File exists" in text
    assert "Traceback" not in text
    assert file.read_text() == "in the way"


def test_demo_output_on_a_full_disk_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk of 256 KiB, or, where nobody may mount one, a disk that says so."""
    way = mounting()
    if way is not None:
        script = 'mount -t tmpfs -o size=256k tmpfs "$1" && shift && exec "$@"'
        command = [sys.executable, "-m", "duplex_sidecar.cli.main", "demo", "--out", str(tmp_path)]
        done = subprocess.run(
            [*way, "sh", "-c", script, "sh", str(tmp_path), *command],
            capture_output=True,
            env={**os.environ, "COLUMNS": "200"},
            timeout=180,
            check=False,
        )
        status, text = done.returncode, done.stdout.decode() + done.stderr.decode()
    else:

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setenv("COLUMNS", "200")
        status = demo(out=tmp_path)
        text = capsys.readouterr().out
    assert status == 1
    assert f"duplex demo: {tmp_path}: No space left on device" in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_reply_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    audio = str(EXAMPLES / "audio" / "conversation.flac")
    session = str(EXAMPLES / "session.yaml")
    out = tmp_path / "no" / "reply.wav"
    status, text = duplex("run", "-f", session, "--audio", audio, "--out", str(out))
    assert status == 1
    assert f"{out.parent}: No such file or directory" in text
    assert "Traceback" not in text


def test_a_manifest_that_is_wrong_is_told_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "session.json"
    file.write_text(manifest(window={"mode": "basic", "basicWindowHighTokens": True}))
    audio = str(EXAMPLES / "audio" / "conversation.flac")
    status, text = duplex("run", "-f", str(file), "--audio", audio)
    assert status == 1
    assert "spec.window.basicWindowHighTokens" in text
    assert "valid integer" in text


def test_a_recording_that_is_none(tmp_path: Path) -> None:
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"RIFF nothing")
    session = str(EXAMPLES / "session.yaml")
    for file in (noise, tmp_path / "none.wav"):
        status, text = duplex("run", "-f", session, "--audio", str(file))
        assert status == (1 if file.exists() else EXIT_USAGE)
        assert str(file) in text
        assert "Traceback" not in text


@pytest.mark.parametrize("what", ["address", "kind", "voice", "window"])
def test_what_a_sidecar_would_refuse_is_told_before_it_is_started(
    bed_alone: Bed, tiny_checkpoint: Path, tmp_path: Path, what: str
) -> None:
    file, url = tmp_path / "session.json", bed_alone.valkey.url
    spec: dict[str, Any] = {}
    match what:
        case "address":
            url, told = "redis://user:hidden@127.0.0.1:1/0", "the ledger at redis://127.0.0.1:1/0"
        case "kind":
            bed_alone.valkey.start()
            with redis.Redis.from_url(url, protocol=2) as server:
                server.config_set("maxmemory-policy", "allkeys-lru")
            told = f"the ledger at {url} cannot be used: "
        case "voice":
            bed_alone.valkey.start()
            spec, told = {"voice": {"name": "nobody"}}, "spec.voice.name"
        case _:
            bed_alone.valkey.start()
            spec, told = {"window": {"strategy": "shift"}}, "spec.window.strategy"
    file.write_text(manifest(**spec))
    status, text = duplex(
        *("run", "-f", str(file), "--audio", str(EXAMPLES / "audio" / "conversation.flac")),
        *("--redis-url", url, "--checkpoint", str(tiny_checkpoint), "--out", f"{tmp_path}/r.wav"),
    )
    assert status == 1
    assert told in text
    assert "hidden" not in text
    assert "Traceback" not in text
    assert "starting" not in text


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_a_demo_that_is_asked_to_leave_takes_along_what_it_started(
    tiny_checkpoint: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """While its sidecar's stages load: the longest time in which nobody would wait for it."""
    work = tempfile.mkdtemp(prefix="dx-")
    out = tmp_path / "out"
    out.mkdir()
    (out / "reply.wav").write_text("of the demo before")
    process = subprocess.Popen(
        [sys.executable, "-m", "duplex_sidecar.cli.main", "demo", "--out", str(out)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": work},
    )
    try:
        deadline = time.monotonic() + 180
        while len([line for line in children_of_this_test(work) if "stages" in line]) < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(sent)
        text = process.communicate(timeout=180)[0].decode()
        assert process.returncode == INTERRUPTED
        assert "interrupted" in text
        assert "Traceback" not in text
        assert left_of_this_test(work) == []
        assert list(Path(work).iterdir()) == []
        assert [each.read_text() for each in out.iterdir()] == ["of the demo before"]
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(work, ignore_errors=True)
