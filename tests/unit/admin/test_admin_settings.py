"""Settings from the environment of a pod."""

import msgspec
import pytest

from duplex_sidecar.settings import SidecarSettings, settings_from_environment
from duplex_sidecar.stages.engine.settings import Device

pytestmark = pytest.mark.unit

NEEDED = {
    "DUPLEX_CHECKPOINT": "/models/m",
    "DUPLEX_REDIS_URL": "redis://ledger:6379",
    "DUPLEX_RUNTIME_DIR": "/run/duplex",
    "DUPLEX_CACHE_DIR": "/cache",
}


def from_environment(**variables: str) -> SidecarSettings:
    return settings_from_environment({**NEEDED, **variables}, {})


def test_every_kind_of_value() -> None:
    settings = from_environment(
        DUPLEX_HOST="0.0.0.0",
        DUPLEX_ADMIN_PORT="8766",
        DUPLEX_SLOTS="8",
        DUPLEX_DEVICE="cuda",
        DUPLEX_CUDA_GRAPHS="true",
        DUPLEX_DRAIN_GRACE_S="22.5",
        DUPLEX_OTLP_ENDPOINT="http://collector:4318",
        DUPLEX_POD_UID="5e0f7b62-0000-4000-8000-000000000001",
        DUPLEX_POD_NAME="pool-abc",
        DUPLEX_ADVERTISE="10.0.0.7:8765",
        DUPLEX_SOMETHING_ELSE="is not looked at",
        OTHER="x",
    )
    assert settings.host == "0.0.0.0"
    assert (settings.admin_port, settings.slots, settings.device) == (8766, 8, Device.CUDA)
    assert (settings.cuda_graphs, settings.drain_grace_s) == (True, 22.5)
    assert settings.otlp_endpoint == "http://collector:4318"
    assert settings.advertise == "10.0.0.7:8765"
    assert not settings.is_loopback
    uid, _, nonce = settings.replica.rpartition("-")
    assert uid == "5e0f7b62-0000-4000-8000-000000000001"
    assert len(nonce) == 8
    assert settings.replica != from_environment(DUPLEX_POD_UID=uid).replica


@pytest.mark.parametrize(
    ("advertised", "address", "listens"),
    [
        ("10.0.0.7:8765", "10.0.0.7:8765", "0.0.0.0"),
        ("fd00:10:244::7:8765", "[fd00:10:244::7]:8765", "::"),
        ("[fd00::7]:8765", "[fd00::7]:8765", "::"),
        ("pod.example:8765", "pod.example:8765", "0.0.0.0"),
        ("", "", "0.0.0.0"),
    ],
)
def test_an_ipv6_door_is_advertised_in_brackets(
    advertised: str, address: str, listens: str
) -> None:
    """As the pod's environment has it, `$(POD_IP):8765`, an address could not be dialled."""
    settings = from_environment(DUPLEX_HOST="0.0.0.0", DUPLEX_ADVERTISE=advertised)
    assert (settings.address, settings.listen_host) == (address, listens)
    assert from_environment(DUPLEX_ADVERTISE=advertised).listen_host == "127.0.0.1"


def test_what_is_not_set_has_its_default() -> None:
    bare = from_environment(DUPLEX_SLOTS="")
    assert bare == msgspec.structs.replace(
        SidecarSettings(
            checkpoint="/models/m",
            redis_url="redis://ledger:6379",
            runtime_dir="/run/duplex",
            cache_dir="/cache",
        ),
        replica=bare.replica,
    )
    assert bare.is_loopback


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"DUPLEX_SLOTS": "many"}, "slots"),
        ({"DUPLEX_SLOTS": "0"}, "slots"),
        ({"DUPLEX_CHECKPOINT": "relative"}, "checkpoint"),
        ({"DUPLEX_DEVICE": "abacus"}, "device"),
        ({"DUPLEX_ADMIN_PORT": "8765"}, "admin_port"),
        ({"DUPLEX_TLS_CERT_FILE": "/c"}, "tls_cert_file"),
        ({"DUPLEX_TLS_CERT_FILE": "/c", "DUPLEX_TLS_KEY_FILE": "/k"}, "admin_port"),
        ({"DUPLEX_ADMIN_TOKEN": "t", "DUPLEX_ADMIN_TOKEN_FILE": "/t"}, "admin_token_file"),
        ({"DUPLEX_DRAIN_GRACE_S": "-1"}, "drain_grace_s"),
    ],
)
def test_what_is_wrong_is_named(variables: dict[str, str], word: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=word):
        from_environment(**variables)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="DUPLEX_CHECKPOINT is not set"):
        settings_from_environment({"DUPLEX_REDIS_URL": "unix:///s"}, {"runtime_dir": "/r"})


def test_nobody_scripts_a_bench_by_environment() -> None:
    assert from_environment(DUPLEX_BENCH_SCRIPT="[[1]]").bench_script == ()
