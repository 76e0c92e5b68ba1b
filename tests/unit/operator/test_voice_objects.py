"""What of a Secret or ConfigMap becomes a session's voice, and what is said of the others."""

import base64
from typing import Any

import pytest

from duplex_api.given_voices import MAX_GIVEN_VOICE_BYTES
from duplex_operator.names import LABEL_VOICE
from duplex_operator.voices import VoiceUnusableError, voice_file

pytestmark = pytest.mark.unit

LABELLED = {LABEL_VOICE: "true"}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def found(kind: str, files: dict[str, str], labels: dict[str, str] = LABELLED) -> dict[str, Any]:
    field = "data" if kind == "Secret" else "binaryData"
    return {"kind": kind, "metadata": {"name": "mine", "labels": labels}, field: files}


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap"])
@pytest.mark.parametrize("key", [None, "a.safetensors"])
def test_the_file_of_a_labelled_object(kind: str, key: str | None) -> None:
    raw = found(kind, {"a.safetensors": encoded(b"voice")})
    assert voice_file(raw, f"{kind} mine", key) == b"voice"


def test_the_largest_one_that_may_be() -> None:
    largest = b"\0" * MAX_GIVEN_VOICE_BYTES
    assert voice_file(found("Secret", {"a": encoded(largest)}), "Secret mine", None) == largest
    with pytest.raises(VoiceUnusableError, match="900 KiB"):
        voice_file(found("Secret", {"a": encoded(largest + b"\0")}), "Secret mine", None)


@pytest.mark.parametrize(
    ("raw", "key", "says"),
    [
        (found("Secret", {"a": encoded(b"hidden")}, {}), "a", "does not carry the label"),
        (found("Secret", {"a": encoded(b"x")}, {LABEL_VOICE: "false"}), "a", "label"),
        ({"kind": "Secret", "metadata": {}}, "a", "label"),
        (found("Secret", {}), None, "has 0 files"),
        (found("Secret", {"a": encoded(b"x"), "b": encoded(b"y")}), None, "has 2 files"),
        (found("Secret", {"a": encoded(b"x")}), "b", "has no file b"),
        (found("Secret", {"a": "*"}), "a", "cannot be read"),
        (found("Secret", {"a": ""}), "a", "1 byte"),
        # Text of a ConfigMap is no voice file.
        (found("ConfigMap", {}) | {"data": {"a": "text"}}, "a", "has no file a"),
    ],
)
def test_what_is_wrong_is_said_without_its_content(
    raw: dict[str, Any], key: str | None, says: str
) -> None:
    with pytest.raises(VoiceUnusableError, match=says) as caught:
        voice_file(raw, "Secret mine", key)
    assert "hidden" not in str(caught.value)
    assert encoded(b"hidden") not in str(caught.value)
