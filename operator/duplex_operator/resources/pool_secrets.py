"""A pool's admin Secret: the token of its admin ports, their certificate, the ledger's address.

Every certificate comes with an authority of its own whose key is thrown away at once: there is
nothing to steal, and a new certificate is trusted beside the one before (`ca.crt` holds both).

A new token reaches the pods when their kubelet next looks, up to two minutes later, and each
sidecar takes the token before it for five minutes from then. So the operator goes on with the old
one for a while, and both overlap on every pod. Pure but for the randomness of keys.
"""

import base64
import binascii
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from duplex_api.constants import API_GROUP
from duplex_operator.names import (
    ANNOTATION_SERVED_BY,
    CA_KEY,
    COMPONENT_SIDECAR,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_POOL,
    PRODUCT,
    REDIS_URL_KEY,
    TLS_CERT_KEY,
    TLS_KEY_KEY,
    TOKEN_KEY,
    admin_secret_name,
    admin_server_name,
)
from duplex_operator.objects import timestamp, timestamp_ms
from duplex_operator.resources.pod_template import Manifest
from duplex_operator.resources.pods import PoolIdentity, owner_reference

PREVIOUS_TOKEN_KEY = "previous-token"
ANNOTATION_TOKEN_MADE = f"{API_GROUP}/token-made"
ANNOTATION_CERTIFICATE_MADE = f"{API_GROUP}/certificate-made"

_DAY_MS = 86_400_000
TOKEN_LIFE_MS = 30 * _DAY_MS
CERTIFICATE_LIFE_MS = 365 * _DAY_MS
CERTIFICATE_RENEWED_AFTER_MS = 180 * _DAY_MS
"""A pod shows the new certificate once its kubelet has brought it; the old authority stays trusted
until the new one is replaced in turn."""
PREVIOUS_TOKEN_USED_MS = 150_000
"""How long the operator goes on with the token before: longer than a kubelet takes."""
PREVIOUS_TOKEN_KEPT_MS = 300_000

_TOKEN_BYTES = 32
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class PoolSecret:
    """What the Secret holds. previous_token empty: none. ca_pem: one or two certificates.
    served_by: the release that serves the pool; empty: nobody has said so."""

    token: str
    previous_token: str
    token_made_ms: int
    ca_pem: str
    certificate_pem: str
    key_pem: str
    certificate_made_ms: int
    redis_url: str
    served_by: str = ""

    def __repr__(self) -> str:
        return "PoolSecret(...)"


class SecretChange(StrEnum):
    """Why a Secret is written. The words of Events."""

    MADE = "AdminSecretMade"
    TOKEN_ROTATED = "AdminTokenRotated"
    PREVIOUS_TOKEN_DROPPED = "PreviousAdminTokenDropped"
    CERTIFICATE_RENEWED = "AdminCertificateRenewed"
    LEDGER_MOVED = "LedgerAddressChanged"
    ADOPTED = "PoolAdopted"


def next_secret(
    found: PoolSecret | None, pool: PoolIdentity, redis_url: str, now_ms: int, release: str
) -> tuple[PoolSecret, tuple[SecretChange, ...]]:
    """The Secret as it has to be now, and what changed. found None: there is none, or somebody has
    spoiled it. release: which serves the pool from now on."""
    if found is None:
        made = replace(_new_secret(pool, redis_url, now_ms), served_by=release)
        return made, (SecretChange.MADE,)
    secret, changes = found, list[SecretChange]()
    age_ms = now_ms - secret.token_made_ms
    if age_ms >= TOKEN_LIFE_MS:
        secret = replace(secret, token=_token(), previous_token=secret.token, token_made_ms=now_ms)
        changes.append(SecretChange.TOKEN_ROTATED)
    elif secret.previous_token and age_ms >= PREVIOUS_TOKEN_KEPT_MS:
        secret = replace(secret, previous_token="")
        changes.append(SecretChange.PREVIOUS_TOKEN_DROPPED)
    if now_ms - secret.certificate_made_ms >= CERTIFICATE_RENEWED_AFTER_MS:
        made = make_certificate(admin_server_name(pool.namespace, pool.name), now_ms)
        secret = replace(
            secret,
            ca_pem=made.ca_pem + _newest(secret.ca_pem),
            certificate_pem=made.certificate_pem,
            key_pem=made.key_pem,
            certificate_made_ms=now_ms,
        )
        changes.append(SecretChange.CERTIFICATE_RENEWED)
    if secret.redis_url != redis_url:
        secret = replace(secret, redis_url=redis_url)
        changes.append(SecretChange.LEDGER_MOVED)
    if secret.served_by != release:
        secret = replace(secret, served_by=release)
        changes.append(SecretChange.ADOPTED)
    return secret, tuple(changes)


def next_change_ms(secret: PoolSecret) -> int:
    """When time alone will change the Secret, or which token is used; since 1970."""
    dates = [
        secret.token_made_ms + TOKEN_LIFE_MS,
        secret.certificate_made_ms + CERTIFICATE_RENEWED_AFTER_MS,
    ]
    if secret.previous_token:
        dates.append(secret.token_made_ms + PREVIOUS_TOKEN_KEPT_MS)
    return min(dates)


def token_to_use(secret: PoolSecret, now_ms: int) -> str:
    """The one that every pod knows now."""
    fresh = now_ms - secret.token_made_ms < PREVIOUS_TOKEN_USED_MS
    return secret.previous_token if fresh and secret.previous_token else secret.token


def secret_manifest(pool: PoolIdentity, secret: PoolSecret) -> Manifest:
    """The Secret as it is sent. An empty value is left out."""
    data = {
        TOKEN_KEY: secret.token,
        PREVIOUS_TOKEN_KEY: secret.previous_token,
        CA_KEY: secret.ca_pem,
        TLS_CERT_KEY: secret.certificate_pem,
        TLS_KEY_KEY: secret.key_pem,
        REDIS_URL_KEY: secret.redis_url,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": admin_secret_name(pool.name),
            "namespace": pool.namespace,
            "labels": {
                LABEL_NAME: PRODUCT,
                LABEL_COMPONENT: COMPONENT_SIDECAR,
                LABEL_MANAGED_BY: FIELD_MANAGER,
                LABEL_POOL: pool.name,
            },
            "annotations": {
                ANNOTATION_TOKEN_MADE: timestamp(secret.token_made_ms),
                ANNOTATION_CERTIFICATE_MADE: timestamp(secret.certificate_made_ms),
                ANNOTATION_SERVED_BY: secret.served_by,
            },
            "ownerReferences": [owner_reference(pool)],
        },
        "data": {
            key: base64.b64encode(value.encode()).decode() for key, value in data.items() if value
        },
    }


def read_pool_secret(raw: Mapping[str, Any]) -> PoolSecret | None:
    """None: something that pods or operator need is missing, or cannot be what it should."""
    data: Mapping[str, Any] = raw.get("data") or {}
    annotations: Mapping[str, str] = (raw.get("metadata") or {}).get("annotations") or {}
    try:
        texts = {
            key: base64.b64decode(value, validate=True).decode() for key, value in data.items()
        }
    except (binascii.Error, UnicodeDecodeError, TypeError):
        return None
    made_ms = timestamp_ms(annotations.get(ANNOTATION_TOKEN_MADE, ""))
    certificate_made_ms = timestamp_ms(annotations.get(ANNOTATION_CERTIFICATE_MADE, ""))
    needed = (TOKEN_KEY, CA_KEY, TLS_CERT_KEY, TLS_KEY_KEY)
    if not all(texts.get(key) for key in needed) or not made_ms or not certificate_made_ms:
        return None
    tokens = (texts[TOKEN_KEY], texts.get(PREVIOUS_TOKEN_KEY, ""))
    if not all(token.isascii() and token.isprintable() for token in tokens):
        return None  # it could stand in no header
    try:
        x509.load_pem_x509_certificates(texts[CA_KEY].encode())
    except ValueError:
        return None
    return PoolSecret(
        token=texts[TOKEN_KEY],
        previous_token=texts.get(PREVIOUS_TOKEN_KEY, ""),
        token_made_ms=made_ms,
        ca_pem=texts[CA_KEY],
        certificate_pem=texts[TLS_CERT_KEY],
        key_pem=texts[TLS_KEY_KEY],
        certificate_made_ms=certificate_made_ms,
        redis_url=texts.get(REDIS_URL_KEY, ""),
        served_by=served_by(raw),
    )


def served_by(raw: Mapping[str, Any]) -> str:
    """The release that a pool's Secret names, also one that is spoiled; empty for none."""
    annotations: Mapping[str, str] = (raw.get("metadata") or {}).get("annotations") or {}
    return annotations.get(ANNOTATION_SERVED_BY, "")


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM texts. The authority's key is not among them: it is gone."""

    ca_pem: str
    certificate_pem: str
    key_pem: str


def make_certificate(server_name: str, now_ms: int) -> Certificate:
    """A server certificate for `server_name`, by an authority made for it alone."""
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # At most 64 characters may stand in a name; the full one is in the alternative names.
    ca_name = _x509_name(f"duplex pool {secrets.token_hex(8)}")
    ca = (
        _unsigned(ca_name, ca_name, ca_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        _unsigned(_x509_name("duplex sidecar"), ca_name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    return Certificate(
        ca_pem=ca.public_bytes(serialization.Encoding.PEM).decode(),
        certificate_pem=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(milliseconds=CERTIFICATE_LIFE_MS))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _x509_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _new_secret(pool: PoolIdentity, redis_url: str, now_ms: int) -> PoolSecret:
    made = make_certificate(admin_server_name(pool.namespace, pool.name), now_ms)
    return PoolSecret(
        token=_token(),
        previous_token="",
        token_made_ms=now_ms,
        ca_pem=made.ca_pem,
        certificate_pem=made.certificate_pem,
        key_pem=made.key_pem,
        certificate_made_ms=now_ms,
        redis_url=redis_url,
    )


def _token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


def _newest(ca_pem: str) -> str:
    """The first certificate of a bundle."""
    end = "-----END CERTIFICATE-----\n"
    return ca_pem.partition(end)[0] + end
