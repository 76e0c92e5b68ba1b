"""A pool's admin Secret: tokens that overlap, certificates that are checked by name."""

import ssl
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
from support.golden_pools import IDENTITY

from duplex_operator.names import admin_server_name
from duplex_operator.resources.pool_secrets import (
    CERTIFICATE_RENEWED_AFTER_MS,
    PREVIOUS_TOKEN_KEPT_MS,
    PREVIOUS_TOKEN_USED_MS,
    TOKEN_LIFE_MS,
    PoolSecret,
    SecretChange,
    next_change_ms,
    next_secret,
    read_pool_secret,
    secret_manifest,
    served_by,
    token_to_use,
)

pytestmark = pytest.mark.unit

NOW_MS = 1_795_995_000_000
URL = "redis://ledger:6379/0"
RELEASE = "duplex-system/duplex-operator"
NAME = admin_server_name(IDENTITY.namespace, IDENTITY.name)


@pytest.fixture(scope="module")
def made() -> PoolSecret:
    secret, changes = next_secret(None, IDENTITY, URL, NOW_MS, RELEASE)
    assert changes == (SecretChange.MADE,)
    return secret


def test_what_is_written_is_what_is_read(made: PoolSecret) -> None:
    manifest = secret_manifest(IDENTITY, made)
    assert read_pool_secret(manifest) == made
    assert "previous-token" not in manifest["data"]
    rotated = replace(made, previous_token="before")
    assert read_pool_secret(secret_manifest(IDENTITY, rotated)) == rotated


@pytest.mark.parametrize("key", ["token", "ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("value", [None, "", "not base64!", "/w=="])
def test_a_spoiled_secret_is_none(made: PoolSecret, key: str, value: str | None) -> None:
    manifest = secret_manifest(IDENTITY, made)
    if value is None:
        del manifest["data"][key]
    else:
        manifest["data"][key] = value
    assert read_pool_secret(manifest) is None


def test_a_secret_without_its_dates_is_none(made: PoolSecret) -> None:
    manifest = secret_manifest(IDENTITY, made)
    manifest["metadata"]["annotations"] = {}
    assert read_pool_secret(manifest) is None


def test_nothing_changes_before_its_time(made: PoolSecret) -> None:
    early = NOW_MS + TOKEN_LIFE_MS - 1
    assert next_secret(made, IDENTITY, URL, early, RELEASE) == (made, ())
    assert next_change_ms(made) == NOW_MS + TOKEN_LIFE_MS


def test_a_token_and_the_one_before_overlap(made: PoolSecret) -> None:
    now_ms = NOW_MS + TOKEN_LIFE_MS
    rotated, changes = next_secret(made, IDENTITY, URL, now_ms, RELEASE)
    assert changes == (SecretChange.TOKEN_ROTATED,)
    assert rotated.previous_token == made.token != rotated.token
    assert token_to_use(rotated, now_ms) == made.token
    assert token_to_use(rotated, now_ms + PREVIOUS_TOKEN_USED_MS) == rotated.token
    kept_until = now_ms + PREVIOUS_TOKEN_KEPT_MS
    assert next_change_ms(rotated) == kept_until
    assert next_secret(rotated, IDENTITY, URL, kept_until - 1, RELEASE) == (rotated, ())
    dropped, changes = next_secret(rotated, IDENTITY, URL, kept_until, RELEASE)
    assert changes == (SecretChange.PREVIOUS_TOKEN_DROPPED,)
    assert dropped == replace(rotated, previous_token="")
    assert token_to_use(dropped, now_ms) == rotated.token


def test_who_serves_the_pool_is_written_on_its_secret(made: PoolSecret) -> None:
    assert served_by(secret_manifest(IDENTITY, made)) == RELEASE
    # As an earlier release left it, or as whoever hands the pool over.
    unmarked = replace(made, served_by="")
    adopted, changes = next_secret(unmarked, IDENTITY, URL, NOW_MS, RELEASE)
    assert (adopted, changes) == (made, (SecretChange.ADOPTED,))
    spoiled = secret_manifest(IDENTITY, made) | {"data": {}}
    assert read_pool_secret(spoiled) is None
    assert served_by(spoiled) == RELEASE
    assert served_by({"metadata": {}}) == ""


def test_a_new_ledger_address_is_written(made: PoolSecret) -> None:
    moved, changes = next_secret(made, IDENTITY, "redis://other", NOW_MS, RELEASE)
    assert changes == (SecretChange.LEDGER_MOVED,)
    assert moved == replace(made, redis_url="redis://other")


def test_a_certificate_of_before_is_trusted_until_the_one_after_next(made: PoolSecret) -> None:
    second, changes = next_secret(
        made, IDENTITY, URL, NOW_MS + CERTIFICATE_RENEWED_AFTER_MS, RELEASE
    )
    assert SecretChange.CERTIFICATE_RENEWED in changes
    assert second.ca_pem.count("BEGIN CERTIFICATE") == 2
    assert second.ca_pem.endswith(made.ca_pem)
    third, _ = next_secret(
        second, IDENTITY, URL, NOW_MS + 2 * CERTIFICATE_RENEWED_AFTER_MS, RELEASE
    )
    assert third.ca_pem.count("BEGIN CERTIFICATE") == 2
    assert made.ca_pem not in third.ca_pem


def shake_hands(server: PoolSecret, ca_pem: str, name: str, folder: Path) -> None:
    """A TLS handshake in memory. Raises ssl.SSLError."""
    (folder / "tls.crt").write_text(server.certificate_pem)
    (folder / "tls.key").write_text(server.key_pem)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    # As the operator's client makes it.
    asking = ssl.create_default_context(cadata=ca_pem)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server, server_hostname=name)
    other = served.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, other, client, other):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.getpeercert()


@pytest.fixture(scope="module")
def today() -> PoolSecret:
    """Certificates are checked against the real clock."""
    return next_secret(None, IDENTITY, URL, time.time_ns() // 1_000_000, RELEASE)[0]


def test_the_operator_trusts_its_own_pools_by_name(today: PoolSecret, tmp_path: Path) -> None:
    shake_hands(today, today.ca_pem, NAME, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(today, today.ca_pem, "other.talk.pools.duplex.dev", tmp_path)


def test_nobody_elses_certificate_is_trusted(
    today: PoolSecret, made: PoolSecret, tmp_path: Path
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(today, made.ca_pem, NAME, tmp_path)
    shake_hands(today, made.ca_pem + today.ca_pem, NAME, tmp_path)


def test_it_never_shows_itself(made: PoolSecret) -> None:
    assert made.token not in repr(made)
    assert "KEY" not in repr(made)


@pytest.mark.parametrize("key", ["token", "previous-token"])
@pytest.mark.parametrize("value", [b"two\nlines", b"zero\0", "größe".encode()])
def test_a_token_that_stands_in_no_header_is_none(made: PoolSecret, key: str, value: bytes) -> None:
    manifest = secret_manifest(IDENTITY, made)
    manifest["data"][key] = b64encode(value).decode()
    assert read_pool_secret(manifest) is None


@pytest.mark.parametrize("value", [b"no certificate", b"-----BEGIN CERTIFICATE-----\nxxxx\n"])
def test_an_authority_that_is_none_spoils_the_secret(made: PoolSecret, value: bytes) -> None:
    """Else no pod could be dialled, and nobody would be told."""
    manifest = secret_manifest(IDENTITY, made)
    manifest["data"]["ca.crt"] = b64encode(value).decode()
    assert read_pool_secret(manifest) is None
