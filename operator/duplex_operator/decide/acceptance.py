"""Whether a session may run on its pool at all, and with which window. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from duplex_api.pool import AllowedNamespaces, NamespaceSource
from duplex_api.resolve import UnknownPresetError, resolve_session
from duplex_api.window import WINDOW_FIELDS, WindowConfigError, WindowLimits, WindowPolicy
from duplex_operator.objects import PoolObject, SessionObject


class RefusalReason(StrEnum):
    """Reasons of the condition Accepted while it is False."""

    POOL_NOT_FOUND = "PoolNotFound"
    POOL_DELETING = "PoolDeleting"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    INVALID_WINDOW = "InvalidWindow"
    UNKNOWN_PRESET = "UnknownWindowPreset"
    TOKEN_UNUSABLE = "TokenUnusable"
    VOICE_UNUSABLE = "VoiceUnusable"
    REFUSED_BY_POD = "RefusedByPod"


@dataclass(frozen=True, slots=True)
class Accepted:
    """window: every field named."""

    window: WindowPolicy


@dataclass(frozen=True, slots=True)
class Refused:
    reason: RefusalReason
    sentence: str


def judge(session: SessionObject, pool: PoolObject | None) -> Accepted | Refused:
    """The pool's word on the session. A window once pinned stays as it is."""
    key = session.pool_key
    if pool is None:
        return Refused(RefusalReason.POOL_NOT_FOUND, f"there is no pool {key}")
    if pool.meta.deleting:
        return Refused(RefusalReason.POOL_DELETING, f"pool {key} is being deleted")
    namespace = session.meta.key.namespace
    if not allows(pool.spec.allowed_namespaces, key.namespace, namespace):
        return Refused(
            RefusalReason.NAMESPACE_NOT_ALLOWED,
            f"pool {key} takes no sessions of namespace {namespace}",
        )
    pinned = session.status.window
    if pinned is not None and all(getattr(pinned, name) is not None for name in WINDOW_FIELDS):
        return Accepted(pinned)
    try:
        window = resolve_session(session.spec, pool.spec, WindowLimits()).window
    except WindowConfigError as error:
        return Refused(RefusalReason.INVALID_WINDOW, str(error))
    except UnknownPresetError as error:
        return Refused(RefusalReason.UNKNOWN_PRESET, str(error))
    return Accepted(window.as_policy())


def allows(allowed: AllowedNamespaces | None, own: str, namespace: str) -> bool:
    """Whether a pool of namespace `own` takes sessions of `namespace`."""
    source = NamespaceSource.SAME if allowed is None else allowed.source
    if namespace == own or source is NamespaceSource.ALL:
        return True
    return allowed is not None and namespace in (allowed.names or ())
