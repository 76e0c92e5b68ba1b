"""What falls behind: ledgers of sessions that are gone, and tokens that were changed."""

import asyncio
import logging

from duplex_operator.context import Context
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


async def sweep_ledgers(context: Context) -> None:
    """Every minute, until cancelled: erases what has a route record and no object any more.

    The record is kept until its ledger is erased, so an erasure that was not possible when the
    object went is made good here, also by another operator."""
    while True:
        await asyncio.sleep(SWEEP_PERIOD_S)
        try:
            await sweep_once(context)
        except (LedgerAwayError, ApiError) as error:
            log.info("the sweep goes on later: %s", error)
        except Exception:
            # One record or object that nobody foresaw must not end the whole reign.
            log.exception("the sweep goes on later")


async def sweep_once(context: Context) -> int:
    """Returns how many ledgers were erased."""
    orphans: list[str] = []

    def present_here(uid: str) -> bool:
        return context.store.session_by_uid(uid) is not None

    async for uid, record in context.routes.records(present_here):
        if context.settings.watches(record.session.partition("/")[0]):
            orphans.append(uid)
    if not orphans:
        return 0
    # The store may have missed them; the API server has not.
    present = await _session_uids(context)
    client = context.fleet.any_client()
    gone = [uid for uid in orphans if uid not in present]
    if client is None:
        return 0
    erased = 0
    for uid in gone:
        # Each by itself: one that is refused must not stop those behind it.
        try:
            await client.erase(uid)
            await context.routes.drop(uid)
        except (SidecarRefusalError, SidecarUnreachableError, LedgerAwayError) as error:
            log.info("the ledger of %s is erased later: %s", uid, error)
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
    hashes: dict[ObjectKey, str | None] = {}
    for namespace in context.settings.watch_namespaces or ("",):
        listing = await context.api.list(
            SECRETS, namespace, selector=TOKEN_SELECTOR, read=_key_and_hash
        )
        hashes |= dict(listing.items)
    for session in context.store.sessions.all():
        place, known = session.status.token_secret, sessions.token_hash(session.meta.uid)
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
