"""What falls behind: ledgers of sessions that are gone, and tokens that were changed."""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from duplex_operator.context import Context
from duplex_operator.decide import erasing
from duplex_operator.kube.errors import ApiError
from duplex_operator.kube.resources import SECRETS, SESSIONS
from duplex_operator.names import TOKEN_KEY, TOKEN_SELECTOR
from duplex_operator.objects import ObjectKey, RawObject, SessionObject, read_meta
from duplex_operator.reconcile_session import SessionReconciler
from duplex_operator.routes import LedgerAwayError
from duplex_operator.sidecar_client import SidecarRefusalError, SidecarUnreachableError
from duplex_operator.tokens import TokenUnusableError, obtain_token, token_hash

log = logging.getLogger(__name__)

SWEEP_PERIOD_S = 60.0


@dataclass(slots=True)
class Refusals:
    """Erasures that a sidecar refuses, and will the next time: they are asked for ever more rarely,
    and told of once. By session uid, as long as there is a route record of it."""

    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _due_s: dict[str, float] = field(default_factory=dict[str, float])

    def keep(self, uids: Collection[str]) -> None:
        for uid in self._counts.keys() - set(uids):
            del self._counts[uid], self._due_s[uid]

    def due(self, uid: str, now_s: float) -> bool:
        return now_s >= self._due_s.get(uid, now_s)

    def note(self, uid: str, now_s: float) -> bool:
        """True: it is the first one."""
        count = self._counts[uid] = self._counts.get(uid, 0) + 1
        pause_ms = erasing.pause_ms(count, round(SWEEP_PERIOD_S * 1000))
        self._due_s[uid] = now_s + pause_ms / 1000
        return count == 1


async def sweep_ledgers(context: Context) -> None:
    """Every minute, until cancelled: erases what has a route record and no object any more.

    The record is kept until its ledger is erased, so an erasure that was not possible when the
    object went is made good here, also by another operator."""
    refusals = Refusals()
    while True:
        await asyncio.sleep(SWEEP_PERIOD_S)
        try:
            await sweep_once(context, refusals)
        except (LedgerAwayError, ApiError) as error:
            log.info("the sweep goes on later: %s", error)
        except Exception:
            # One record or object that nobody foresaw must not end the whole reign.
            log.exception("the sweep goes on later")


async def sweep_once(context: Context, refusals: Refusals | None = None) -> int:
    """Returns how many ledgers were erased. refusals: of the sweeps before."""
    refusals = refusals or Refusals()
    orphans: list[str] = []

    def present_here(uid: str) -> bool:
        return context.store.session_by_uid(uid) is not None

    async for uid, record in context.routes.records(present_here):
        if context.settings.watches(record.session.partition("/")[0]):
            orphans.append(uid)
    refusals.keep(orphans)
    if not orphans:
        return 0
    # The store may have missed them; the API server has not.
    present = await _session_uids(context)
    client = context.fleet.any_client()
    now_s = context.monotonic_s()
    gone = [uid for uid in orphans if uid not in present and refusals.due(uid, now_s)]
    if client is None:
        return 0
    erased = 0
    for uid in gone:
        # Each by itself: one that is refused must not stop those behind it.
        try:
            await client.erase(uid)
            await context.routes.drop(uid)
        except (SidecarRefusalError, SidecarUnreachableError, LedgerAwayError) as error:
            lasts = isinstance(error, SidecarRefusalError) and not erasing.passes(error.code)
            level = logging.INFO
            if lasts:
                level = logging.WARNING if refusals.note(uid, now_s) else logging.DEBUG
            log.log(level, "the ledger of %s is erased later: %s", uid, error)
            continue
        erased += 1
        log.info("erased the ledger of %s, whose session is gone", uid)
    return erased


async def _session_uids(context: Context) -> set[str]:
    uids: set[str] = set()
    for namespace in context.settings.watch_namespaces or ("",):
        listing = await context.api.list(SESSIONS, namespace, read=_uid_of)
        uids |= set(listing.items)
    return uids


async def watch_tokens(context: Context, sessions: SessionReconciler) -> None:
    """Until cancelled: looks whether Secrets with tokens were changed or removed."""
    while True:
        await asyncio.sleep(context.settings.secrets_period_s)
        try:
            await check_tokens(context, sessions)
        except ApiError as error:
            log.info("tokens are looked at later: %s", error)
        except Exception:
            log.exception("tokens are looked at later")


async def check_tokens(context: Context, sessions: SessionReconciler) -> None:
    """One list for all tokens that the operator made, one read for each that a user named."""
    # Before the list: a token that is made while its pages come is in none of them.
    looked_at = [(one, sessions.token_hash(one.meta.uid)) for one in context.store.sessions.all()]
    hashes: dict[ObjectKey, str | None] = {}
    for namespace in context.settings.watch_namespaces or ("",):
        listing = await context.api.list(
            SECRETS, namespace, selector=TOKEN_SELECTOR, read=_key_and_hash
        )
        hashes |= dict(listing.items)
    for session, known in looked_at:
        place = session.status.token_secret
        if place is None or known is None or session.meta.deleting:
            continue
        if session.spec.token_secret_ref is None:
            now = hashes.get(ObjectKey(session.meta.key.namespace, place.name))
        else:
            try:
                now = await _hash_named_by_user(context, session)
            except ApiError as error:
                # Its own trouble: the tokens behind it are looked at all the same.
                log.info("the token of %s is looked at later: %s", session.meta.key, error)
                continue
        if now != known:
            log.info("the token of %s has changed", session.meta.key)
            sessions.forget_token(session.meta.uid)


def _uid_of(raw: RawObject) -> str:
    return read_meta(raw).uid


def _key_and_hash(raw: RawObject) -> tuple[ObjectKey, str | None]:
    return read_meta(raw).key, _hash_in(raw)


def _hash_in(raw: RawObject) -> str | None:
    try:
        return token_hash(raw, TOKEN_KEY)
    except TokenUnusableError:
        return None


async def _hash_named_by_user(context: Context, session: SessionObject) -> str | None:
    try:
        return (await obtain_token(context.api, session)).sha256
    except TokenUnusableError:
        return None
