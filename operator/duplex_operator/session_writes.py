"""What is written to a session's object: its finalizer, its status, Events about it.

Each write is made on exactly the object that was decided on, and its answer is taken at once, so
that the next decision need not wait for the watch.
"""

from dataclasses import replace

from duplex_api.constants import SESSION_KIND
from duplex_api.session import SessionPhase, SessionStatus
from duplex_operator.context import Context
from duplex_operator.decide.actions import RemoveFinalizer, WriteStatus
from duplex_operator.decide.facts import SessionFacts
from duplex_operator.decide.status import RUNNING_PHASES, status_patch
from duplex_operator.kube.errors import MissingError
from duplex_operator.kube.events import tell_event
from duplex_operator.kube.resources import SESSIONS
from duplex_operator.names import SESSION_FINALIZER
from duplex_operator.objects import RawObject, SessionObject, read_session
from duplex_operator.observe import Known


async def add_finalizer(context: Context, session: SessionObject) -> None:
    """Raises ApiError, as all of these."""
    await _write_finalizers(context, session, (*session.meta.finalizers, SESSION_FINALIZER))


async def remove_finalizer(
    context: Context, session: SessionObject, action: RemoveFinalizer
) -> None:
    """Lets the object go, and says so."""
    kept = tuple(name for name in session.meta.finalizers if name != SESSION_FINALIZER)
    await _write_finalizers(context, session, kept)
    # Told once: a conflict above makes this begin again.
    await tell(context, session, action.reason, action.sentence, warning=action.warning)


async def write_status(context: Context, session: SessionObject, status: SessionStatus) -> None:
    meta, body = session.meta, {"status": status_patch(session.status, status)}
    written = await context.api.patch(
        SESSIONS, meta.key, body, version=meta.version, subresource="status"
    )
    _take(context, written)


async def report_status(
    context: Context, facts: SessionFacts, known: Known, action: WriteStatus
) -> None:
    """Writes it, tells of it, and forgets what was remembered for the status before."""
    await write_status(context, facts.session, action.status)
    memory, status = known.memory, action.status
    settled = status.phase in RUNNING_PHASES | {SessionPhase.PARKED}
    known.memory = replace(
        memory,
        flushed_ms=facts.now_ms,
        positioned_ms=facts.now_ms if status.queue_position else memory.positioned_ms,
        woken=memory.woken and not settled,
        refusal=memory.refusal if status.placement is not None else None,
    )
    placement = facts.placement
    if placement is not None and status.placement is None:
        context.fleet.forget_session(placement.pod_uid, facts.session.meta.uid)
    if action.event:
        session = facts.session
        await tell(context, session, action.reason, action.sentence, warning=action.warning)


async def delete_object(context: Context, session: SessionObject) -> None:
    meta = session.meta
    await context.api.delete(SESSIONS, meta.key, uid=meta.uid, version=meta.version)


async def read_again(context: Context, session: SessionObject) -> bool:
    """Somebody else has changed it: takes what is there now. False: that is no other than it was,
    or cannot be read, and deciding again at once would come to the same."""
    key = session.meta.key
    try:
        _take(context, await context.api.get(SESSIONS, key))
    except MissingError:
        context.store.sessions.drop(key, session.meta.uid)
    return context.store.sessions.get(key) is not session


async def tell(
    context: Context, session: SessionObject, reason: str, sentence: str, *, warning: bool
) -> None:
    """An Event. One that is lost stops nothing."""
    await tell_event(
        context.api,
        SESSION_KIND,
        session.meta,
        reason=reason,
        note=sentence,
        action="Reconcile",
        warning=warning,
    )


async def _write_finalizers(
    context: Context, session: SessionObject, names: tuple[str, ...]
) -> None:
    meta, body = session.meta, {"metadata": {"finalizers": list(names)}}
    _take(context, await context.api.patch(SESSIONS, meta.key, body, version=meta.version))


def _take(context: Context, raw: RawObject) -> None:
    found = read_session(raw)
    if found is not None:
        context.store.sessions.put(found)
