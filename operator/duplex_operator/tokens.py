"""The client's token of each session: made here, or read from the Secret that the user named.

Only hashes stay in memory. A token is in its Secret and nowhere else; no log and no Event has it.
"""

import base64
import binascii
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, cast

from duplex_api.constants import API_VERSION, SESSION_KIND
from duplex_api.session import TokenSecret
from duplex_operator.decide.facts import Token
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ConflictError, MissingError
from duplex_operator.kube.resources import SECRETS
from duplex_operator.names import (
    COMPONENT_TOKEN,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    PRODUCT,
    TOKEN_KEY,
    token_secret_name,
)
from duplex_operator.objects import Meta, ObjectKey, RawObject, SessionObject

LEAST_BYTES = 16
MOST_BYTES = 512


class TokenUnusableError(Exception):
    """What is wrong with the Secret, in a sentence without its content."""


async def obtain_token(api: KubernetesApi, session: SessionObject) -> Token:
    """One request where all is as usual. Raises TokenUnusableError, ApiError."""
    meta = session.meta
    wanted = session.spec.token_secret_ref
    if wanted is not None:
        place = TokenSecret(name=wanted.name, key=wanted.key or TOKEN_KEY)
        return await _read(api, meta, place)
    place = TokenSecret(name=token_secret_name(meta.key.name), key=TOKEN_KEY)
    token = secrets.token_urlsafe(32)
    try:
        await api.create(SECRETS, meta.key.namespace, token_secret(meta, place, token))
    except ConflictError:
        return await _read(api, meta, place, owner_uid=meta.uid)
    return Token(place, _sha256(token.encode()))


def token_secret(meta: Meta, place: TokenSecret, token: str) -> dict[str, Any]:
    """The Secret. It goes with its session: Kubernetes collects what its owner leaves behind."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": place.name,
            "namespace": meta.key.namespace,
            "labels": {
                LABEL_NAME: PRODUCT,
                LABEL_COMPONENT: COMPONENT_TOKEN,
                LABEL_MANAGED_BY: FIELD_MANAGER,
            },
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": SESSION_KIND,
                    "name": meta.key.name,
                    "uid": meta.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "type": "Opaque",
        "stringData": {place.key: token},
    }


def token_hash(secret: RawObject, key: str) -> str:
    """sha256 of the token in a Secret. Raises TokenUnusableError."""
    data = cast("Mapping[str, str]", secret.get("data") or {})
    if key not in data:
        raise TokenUnusableError(f"its Secret has no key {key}")
    try:
        token = base64.b64decode(data[key], validate=True).strip()
    except (binascii.Error, ValueError) as error:
        raise TokenUnusableError(f"key {key} of its Secret cannot be read") from error
    if not LEAST_BYTES <= len(token) <= MOST_BYTES:
        raise TokenUnusableError(
            f"key {key} of its Secret does not have {LEAST_BYTES} to {MOST_BYTES} bytes"
        )
    return _sha256(token)


async def _read(
    api: KubernetesApi, meta: Meta, place: TokenSecret, *, owner_uid: str | None = None
) -> Token:
    """owner_uid: the Secret must belong to this session; one of the same name is nobody's gift."""
    try:
        secret = await api.get(SECRETS, ObjectKey(meta.key.namespace, place.name))
    except MissingError as error:
        raise TokenUnusableError(f"there is no Secret {place.name}") from error
    if owner_uid is not None and owner_uid not in _owners(secret):
        raise TokenUnusableError(f"Secret {place.name} belongs to somebody else")
    return Token(place, token_hash(secret, place.key))


def _owners(secret: RawObject) -> set[str]:
    found = cast("Mapping[str, Any]", secret.get("metadata") or {}).get("ownerReferences") or ()
    return {str(owner.get("uid")) for owner in found}


def _sha256(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
