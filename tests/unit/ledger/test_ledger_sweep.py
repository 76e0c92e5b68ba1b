"""Which ledgers nobody owns, and the durability that a process is told."""

from pathlib import Path

import pytest

from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.session_view import Phase, SessionMeta, parse_meta
from duplex_sidecar.ledger.sweep import Ownerless, ownerless
from duplex_sidecar.settings import SidecarSettings, settings_from_environment

pytestmark = pytest.mark.unit

NOW = 1_000_000


def meta(phase: str = "open", until: int = 0, touched: int = 0) -> SessionMeta:
    fields = {
        "phase": phase, "reason": "", "fence": "1", "nonce": "", "replica": "", "index": "0",
        "head": "", "committed": "0", "open": "", "opening_hash": "", "floor_hash": "",
        "records_first": "1", "window_floor": "1", "pcm_floor": "1", "bytes": "7",
        "events_first": "1", "events_last": "0", "voiced": "0", "voice_turn": "",
        "voice_samples": "0", "token": "", "token_offered": "", "until": str(until),
        "touched": str(touched),
    }  # fmt: skip
    return parse_meta("s", {k.encode(): v.encode() for k, v in fields.items()})


@pytest.mark.parametrize("phase", ["open", "parked", "ended"])
def test_a_ledger_without_a_sign_of_an_owner_is_found(phase: str) -> None:
    found = ownerless("s", meta(phase, touched=NOW - 5_000), NOW, 5_000)
    assert found == Ownerless("s", Phase(phase), 5_000, 7)


@pytest.mark.parametrize(
    "known",
    [
        meta(until=NOW + 1, touched=NOW - 90_000),
        meta(until=NOW - 4_999, touched=NOW - 90_000),
        meta(touched=NOW - 4_999),
        meta("erased"),
    ],
    ids=["owned", "owned a moment ago", "touched a moment ago", "tombstone"],
)
def test_others_are_left_alone(known: SessionMeta) -> None:
    assert ownerless("s", known, NOW, 5_000) is None


def test_the_durability_is_a_setting(tmp_path: Path) -> None:
    given = {
        "checkpoint": str(tmp_path),
        "redis_url": "redis://h",
        "runtime_dir": str(tmp_path),
        "cache_dir": str(tmp_path),
    }
    assert SidecarSettings(**given).ledger_durability is Durability.MEMORY
    told = settings_from_environment({"DUPLEX_LEDGER_DURABILITY": "replicated"}, given)
    assert told.ledger_durability is Durability.REPLICATED
    with pytest.raises(ValueError, match="everysec"):
        settings_from_environment({"DUPLEX_LEDGER_DURABILITY": "everysec"}, given)
