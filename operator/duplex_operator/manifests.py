"""What a sidecar is told to run: the session as it would be applied, with its window pinned."""

import re

import msgspec

from duplex_api.constants import API_VERSION, SESSION_KIND
from duplex_api.session import SessionSpec, Voice
from duplex_api.window import WindowPolicy
from duplex_operator.objects import SessionObject

_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""A manifest is read as YAML, which folds or refuses these where JSON takes them as they are."""

_NOT_FOR_SIDECARS = ("desired_state", "priority", "token_secret_ref", "window_preset")


def manifest_text(session: SessionObject, window: WindowPolicy, given_voice: str = "") -> str:
    """JSON, the same text for the same spec. The pinned window needs no pool to be resolved.

    given_voice: name of the voice file that goes along, instead of where it came from.
    """
    spec: SessionSpec = session.spec.model_copy(
        update={"window": window} | dict.fromkeys(_NOT_FOR_SIDECARS)
    )
    if given_voice:
        spec = spec.model_copy(update={"voice": Voice(name=given_voice)})
    body = {
        "apiVersion": API_VERSION,
        "kind": SESSION_KIND,
        "metadata": {"name": session.meta.key.name, "namespace": session.meta.key.namespace},
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    text = msgspec.json.encode(body, order="sorted").decode()
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
