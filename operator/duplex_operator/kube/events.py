"""Events: what happened to an object, for people who look at it with kubectl."""

import logging
import random
import time
from typing import Any

from duplex_api.constants import API_GROUP, API_VERSION
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ApiError
from duplex_operator.kube.resources import EVENTS
from duplex_operator.names import FIELD_MANAGER
from duplex_operator.objects import Meta
from duplex_operator.texts import MOST_NOTE_BYTES, MOST_WORD_BYTES, cut_bytes

log = logging.getLogger(__name__)


async def tell_event(
    api: KubernetesApi,
    kind: str,
    meta: Meta,
    *,
    reason: str,
    note: str,
    action: str,
    warning: bool = False,
) -> None:
    """One Event about an object of ours. kind: of that object. Its loss is logged and stops
    nothing: Events inform, they decide nothing. Raises NotLeadingError."""
    body = _event(kind, meta, time.time_ns()) | {
        "reason": cut_bytes(reason, MOST_WORD_BYTES),
        "note": cut_bytes(note, MOST_NOTE_BYTES),
        "action": cut_bytes(action, MOST_WORD_BYTES),
        "type": "Warning" if warning else "Normal",
    }
    try:
        await api.create(EVENTS, meta.key.namespace, body)
    except ApiError as error:
        log.warning("event %s of %s is lost: %s", reason, meta.key, error)


def _event(kind: str, meta: Meta, now_ns: int) -> dict[str, Any]:
    """All of it but what is said. now_ns: since 1970."""
    key = meta.key
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{key.name[:230]}.{now_ns:x}{random.randrange(256):02x}",
            "namespace": key.namespace,
        },
        "eventTime": _micro_time(now_ns),
        "reportingController": f"{API_GROUP}/{FIELD_MANAGER}",
        "reportingInstance": FIELD_MANAGER,
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": kind,
            "name": key.name,
            "namespace": key.namespace,
            "uid": meta.uid,
        },
    }


def _micro_time(now_ns: int) -> str:
    """As Kubernetes writes it: UTC, to the microsecond."""
    seconds, rest = divmod(now_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:06d}Z"
