"""Voices of sessions that name a Secret or a ConfigMap: the file goes to the sidecar with the
session.

Only an object of the session's own namespace that carries the voice label is read: who may make
sessions must not get at whatever else the operator can see. No log and no Event has content.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, cast

from duplex_api.given_voices import MAX_GIVEN_VOICE_BYTES
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import MissingError
from duplex_operator.kube.resources import CONFIG_MAPS, SECRETS
from duplex_operator.names import LABEL_VOICE
from duplex_operator.objects import ObjectKey, RawObject, SessionObject


class VoiceUnusableError(Exception):
    """What is wrong with the Secret or ConfigMap, in a sentence without its content."""


async def obtain_voice(api: KubernetesApi, session: SessionObject) -> bytes | None:
    """The voice file; None where the session names no object. One request.

    Raises VoiceUnusableError, ApiError.
    """
    voice, namespace = session.spec.voice, session.meta.key.namespace
    wanted = None if voice is None else voice.secret_ref or voice.config_map_ref
    if voice is None or wanted is None:
        return None
    key = ObjectKey(namespace, wanted.name)
    named = f"{'ConfigMap' if voice.secret_ref is None else 'Secret'} {wanted.name}"
    try:
        if voice.secret_ref is None:
            found = await api.get(CONFIG_MAPS, key)
        else:
            found = await api.get(SECRETS, key)
    except MissingError as error:
        raise VoiceUnusableError(f"there is no {named}") from error
    return voice_file(found, named, wanted.key)


def voice_file(found: RawObject, named: str, key: str | None) -> bytes:
    """Raises VoiceUnusableError. named: the object, for people. key None: its only one."""
    metadata = cast("Mapping[str, Any]", found.get("metadata") or {})
    labels = cast("Mapping[str, str]", metadata.get("labels") or {})
    if labels.get(LABEL_VOICE) != "true":
        raise VoiceUnusableError(f"{named} does not carry the label {LABEL_VOICE}=true")
    # A ConfigMap's `data` is text, which no voice file is.
    secret = found.get("kind") == "Secret"
    files = cast("Mapping[str, str]", found.get("data" if secret else "binaryData") or {})
    if key is None:
        if len(files) != 1:
            raise VoiceUnusableError(f"{named} has {len(files)} files: name the key of one")
        (key,) = files
    if key not in files:
        raise VoiceUnusableError(f"{named} has no file {key}")
    if len(files[key]) > _encoded(MAX_GIVEN_VOICE_BYTES):
        raise VoiceUnusableError(f"{key} of {named} is larger than 900 KiB")
    try:
        content = base64.b64decode(files[key], validate=True)
    except (binascii.Error, ValueError) as error:
        raise VoiceUnusableError(f"{key} of {named} cannot be read") from error
    if not 0 < len(content) <= MAX_GIVEN_VOICE_BYTES:
        raise VoiceUnusableError(f"{key} of {named} is not of 1 byte to 900 KiB")
    return content


def _encoded(size_bytes: int) -> int:
    """Characters of base64."""
    return -(-size_bytes // 3) * 4
