"""A session leaves its pod: it is parked, ended, or erased. Asked again until that is confirmed."""

import logging
from dataclasses import replace

from duplex_operator.context import Context
from duplex_operator.decide import erasing
from duplex_operator.decide.actions import RETRY_S, End, Erase, Nothing, Park
from duplex_operator.decide.facts import SessionFacts
from duplex_operator.decide.lifecycle import ERASURE_REFUSED
from duplex_operator.observe import Known
from duplex_operator.routes import LedgerAwayError
from duplex_operator.session_writes import tell
from duplex_operator.sidecar_client import (
    SidecarRefusalError,
    SidecarUnreachableError,
    retry_level,
)

log = logging.getLogger(__name__)


async def take_off(
    context: Context, facts: SessionFacts, known: Known, action: Park | End | Erase
) -> Nothing | None:
    """None: it was answered, decide again at once. Raises ApiError."""
    try:
        match action:
            case Park():
                done = await _park(context, facts, known, action)
            case End():
                done = await _end(context, facts, known, action)
            case Erase():
                done = await _erase(context, facts, known)
    except (SidecarUnreachableError, SidecarRefusalError, LedgerAwayError) as error:
        what = type(action).__name__.lower()
        log.log(retry_level(error), "%s %s: %s", what, facts.session.meta.key, error)
        done = False
    return None if done else Nothing(RETRY_S)


async def _park(context: Context, facts: SessionFacts, known: Known, action: Park) -> bool:
    known.memory = replace(known.memory, asked_park_ms=facts.now_ms)
    client = context.fleet.client(action.pod_uid)
    if client is None:
        return False
    await client.park(facts.session.meta.uid)
    return True


async def _end(context: Context, facts: SessionFacts, known: Known, action: End) -> bool:
    client, uid = context.fleet.client(action.pod_uid), facts.session.meta.uid
    if client is None:
        return False
    if not await client.end(uid, action.reason) and not await _is_over(context, uid):
        log.info("end %s: it lives on elsewhere", facts.session.meta.key)
        return False
    known.memory = replace(known.memory, ended=True)
    return True


async def _is_over(context: Context, uid: str) -> bool:
    """Whether the ledger knows nothing of it that could go on: a session that was placed and never
    opened has nothing to end."""
    lease = await context.routes.lease(uid)
    return not lease.held and lease.phase in ("", "ended", "erased")


async def _erase(context: Context, facts: SessionFacts, known: Known) -> bool:
    """The ledger by a sidecar, which knows its keys; the route record here."""
    status, uid = facts.session.status, facts.session.meta.uid
    ran = status.placement or status.last_placement
    if ran is not None:
        client = context.fleet.any_client()
        if client is None:
            return False
        try:
            await client.erase(uid)
        except SidecarRefusalError as error:
            if erasing.passes(error.code):
                raise
            await _note_refusal(context, facts, known, error)
            return True
    await context.routes.drop(uid)
    known.memory = replace(known.memory, erased=True)
    return True


async def _note_refusal(
    context: Context, facts: SessionFacts, known: Known, error: SidecarRefusalError
) -> None:
    """One that will be the same the next time: told once, and asked for ever more rarely."""
    log.log(retry_level(error), "erase %s: %s", facts.session.meta.key, error)
    news = known.memory.erase_refused != str(error)
    known.memory = erasing.after_refusal(known.memory, str(error), facts.now_ms)
    if news:
        note = f"a pod does not erase its ledger: {error}"
        await tell(context, facts.session, ERASURE_REFUSED, note, warning=True)
