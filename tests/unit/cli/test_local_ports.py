"""Ports for sidecars that have still to start: none that the system may give away meanwhile."""

import socket
from pathlib import Path

import pytest

from duplex_sidecar.client import local_sidecar
from duplex_sidecar.client.local_sidecar import free_port

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("32768\t60999\n", range(20_000, 30_000)),
        ("28000 60999\n", range(20_000, 28_000)),
        ("1024 65535\n", range(20_000, 60_000)),
        ("", range(20_000, 60_000)),
    ],
)
def test_a_port_is_none_of_those_that_the_system_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, own: range
) -> None:
    file = tmp_path / "range"
    if given:
        file.write_text(given)
    monkeypatch.setattr(local_sidecar, "_GIVEN_PORTS", file)
    assert all(free_port() in own for _ in range(20))


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = int(taken.getsockname()[1])
        monkeypatch.setattr(local_sidecar, "_PORT_TRIES", 1)
        monkeypatch.setattr(local_sidecar, "_ports_of_our_own", lambda: range(port, port + 1))
        with pytest.raises(OSError, match="no free port"):
            free_port()
    assert free_port() == port
