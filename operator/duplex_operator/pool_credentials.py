"""Keeps each pool's admin Secret: makes it, rotates it, and tells the fleet what to use.

Read again every `secrets_period_s`, not watched: the operator may read Secrets, but should not hold
those of a whole cluster in memory.
"""

from dataclasses import dataclass

from duplex_operator.context import Context
from duplex_operator.kube.errors import MissingError
from duplex_operator.kube.resources import SECRETS
from duplex_operator.names import (
    ANNOTATION_SERVED_BY,
    FIELD_MANAGER,
    LABEL_MANAGED_BY,
    LABEL_POOL,
    admin_secret_name,
)
from duplex_operator.objects import ObjectKey, PoolObject, RawObject, read_meta
from duplex_operator.resources.pod_template import Manifest
from duplex_operator.resources.pods import PoolIdentity
from duplex_operator.resources.pool_secrets import (
    PREVIOUS_TOKEN_KEY,
    PREVIOUS_TOKEN_USED_MS,
    PoolSecret,
    SecretChange,
    next_change_ms,
    next_secret,
    read_pool_secret,
    secret_manifest,
    served_by,
    token_to_use,
)
from duplex_operator.sidecar_client import AdminCredentials


class SecretTakenError(Exception):
    """A Secret of the name is there and is not this pool's. It is not touched."""


class ServedByOtherError(Exception):
    """Another release serves the pool. Nothing of it is touched."""

    def __init__(self, release: str, secret: str) -> None:
        super().__init__(
            f"release {release} serves this pool; if it does not any more, remove the annotation "
            f"{ANNOTATION_SERVED_BY} from Secret {secret}"
        )


@dataclass(frozen=True, slots=True)
class _Other:
    """Whose the Secret is."""

    release: str
    secret: str


@dataclass(frozen=True, slots=True)
class _Known:
    pool_uid: str
    secret: PoolSecret | _Other
    read_ms: int


class PoolCredentials:
    """One for all pools; calls for one pool never overlap (the dirty set sees to it)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[ObjectKey, _Known] = {}

    def forget(self, pool: ObjectKey) -> None:
        self._known.pop(pool, None)

    async def keep(self, pool: PoolObject) -> tuple[SecretChange, ...]:
        """Makes the Secret what it has to be now; says what was changed. Raises SecretTakenError,
        ServedByOtherError, ApiError."""
        key, now_ms = pool.meta.key, self._context.now_ms()
        known = self._known.get(key)
        changes: tuple[SecretChange, ...] = ()
        if known is None or known.pool_uid != pool.meta.uid or self._stale(known, now_ms):
            secret, changes = await self._keep(pool, now_ms)
            known = self._known[key] = _Known(pool.meta.uid, secret, now_ms)
        if isinstance(known.secret, _Other):
            raise ServedByOtherError(known.secret.release, known.secret.secret)
        token = token_to_use(known.secret, now_ms)
        self._context.fleet.set_credentials(key, AdminCredentials(token, known.secret.ca_pem))
        return changes

    def look_again_s(self, pool: ObjectKey) -> float:
        """After how many seconds `keep` has something to do without any news."""
        known = self._known[pool]
        period_s = self._context.settings.secrets_period_s
        if isinstance(known.secret, _Other):
            return period_s
        used_until_ms = known.secret.token_made_ms + PREVIOUS_TOKEN_USED_MS
        now_ms = self._context.now_ms()
        if known.secret.previous_token and used_until_ms > now_ms:
            return min(period_s, (used_until_ms - now_ms) / 1000)
        return period_s

    def _stale(self, known: _Known, now_ms: int) -> bool:
        period_ms = self._context.settings.secrets_period_s * 1000
        due_ms = known.read_ms + period_ms
        if isinstance(known.secret, PoolSecret):
            due_ms = min(due_ms, next_change_ms(known.secret))
        return now_ms >= due_ms

    async def _keep(
        self, pool: PoolObject, now_ms: int
    ) -> tuple[PoolSecret | _Other, tuple[SecretChange, ...]]:
        release, redis_url = self._context.settings.release, self._context.settings.redis_url
        identity = PoolIdentity(pool.meta.key.namespace, pool.meta.key.name, pool.meta.uid)
        key = ObjectKey(identity.namespace, admin_secret_name(identity.name))
        raw = await self._found(key)
        if raw is not None and not _is_ours(raw, identity):
            raise SecretTakenError(f"Secret {key.name} is there and does not belong to this pool")
        if raw is not None and served_by(raw) not in ("", release):
            return _Other(served_by(raw), key.name), ()
        found = None if raw is None else read_pool_secret(raw)
        secret, changes = next_secret(found, identity, redis_url, now_ms, release)
        if changes:
            manifest = secret_manifest(identity, secret)
            if raw is None:
                await self._context.api.create(SECRETS, key.namespace, manifest)
            else:
                version = read_meta(raw).version
                await self._context.api.patch(SECRETS, key, _patch(manifest), version=version)
        return secret, changes

    async def _found(self, key: ObjectKey) -> RawObject | None:
        try:
            return await self._context.api.get(SECRETS, key)
        except MissingError:
            return None


def _is_ours(raw: RawObject, pool: PoolIdentity) -> bool:
    meta = read_meta(raw)
    owners = (raw.get("metadata") or {}).get("ownerReferences") or ()
    return (
        meta.labels.get(LABEL_MANAGED_BY) == FIELD_MANAGER
        and meta.labels.get(LABEL_POOL) == pool.name
        and any(owner.get("uid") == pool.uid for owner in owners)
    )


def _patch(manifest: Manifest) -> Manifest:
    """What a merge patch changes. The key of a token that is dropped is removed."""
    metadata = manifest["metadata"]
    return {
        "metadata": {"annotations": metadata["annotations"]},
        "data": {PREVIOUS_TOKEN_KEY: None} | manifest["data"],
    }
