"""One session: observe, decide, apply, until there is nothing to do.

Each action takes one step that may be repeated: an operator that dies between two of them leaves
nothing that the next one does not find. The steps outward are in `session_writes` (its object),
`session_opening` and `session_ending` (the sidecars) and `session_route` (the gateways).
"""

from collections.abc import Callable
from dataclasses import replace

from duplex_operator.claims import LET_GO_AFTER_S
from duplex_operator.context import Context
from duplex_operator.decide.acceptance import RefusalReason, Refused
from duplex_operator.decide.actions import (
    RETRY_S,
    SOON_S,
    Action,
    AskForSlot,
    AssignToken,
    Delete,
    End,
    EnsureFinalizer,
    Erase,
    HandOver,
    Nothing,
    Open,
    Park,
    Place,
    RemoveFinalizer,
    WriteStatus,
)
from duplex_operator.decide.facts import SessionFacts
from duplex_operator.decide.lifecycle import decide, suspect_look_s
from duplex_operator.decide.placement import Waiting
from duplex_operator.kube.errors import ConflictError, MissingError
from duplex_operator.objects import Kind, ObjectKey, SessionObject
from duplex_operator.observe import Known, Observer
from duplex_operator.routes import LedgerAwayError
from duplex_operator.session_ending import take_off
from duplex_operator.session_opening import hand_over, open_on_pod
from duplex_operator.session_route import LATEST_LOOK_S, keep_route
from duplex_operator.session_writes import (
    add_finalizer,
    delete_object,
    read_again,
    remove_finalizer,
    report_status,
    write_status,
)
from duplex_operator.store import Change
from duplex_operator.tokens import TokenUnusableError, obtain_token
from duplex_operator.voices import VoiceUnusableError, obtain_voice

MOST_STEPS = 16
"""Of one look. A session that still has steps left is looked at again, after the others."""


class SessionReconciler:
    """poke: tells the placer that a pool's queue has changed."""

    def __init__(self, context: Context, poke: Callable[[ObjectKey], None]) -> None:
        self._context = context
        self._poke = poke
        self._observer = Observer(context)
        self._known: dict[str, Known] = {}
        context.store.listeners.session.append(self._session_changed)

    async def __call__(self, key: ObjectKey) -> float | None:
        """Returns after how many seconds to look again."""
        for _ in range(MOST_STEPS):
            self._context.dirty.seen(Kind.SESSION, key)
            session = self._context.store.sessions.get(key)
            if session is None:
                return None
            if not self._context.claims.takes_care_of(session, self._context.now_ms()):
                self._context.board.leave(session.meta.uid)
                return LET_GO_AFTER_S if session.meta.deleting else None
            known = self._known.setdefault(session.meta.uid, Known())
            facts = await self._observer.facts(session, known)
            action = decide(facts)
            self._keep_queue(session, action)
            try:
                rest = await self._apply(facts, known, action)
            except (ConflictError, MissingError):
                if await read_again(self._context, session):
                    continue
                return RETRY_S
            if rest is not None:
                return await self._settle(key, known, facts, rest)
        return SOON_S

    def _keep_queue(self, session: SessionObject, action: Action) -> None:
        """Whoever does not want a slot any more must not hold one up."""
        match action:
            case AskForSlot() | Place() | AssignToken() | EnsureFinalizer():
                pass
            case WriteStatus(queued=True) | Nothing(queued=True):
                pass
            case _:
                self._context.board.leave(session.meta.uid)

    async def _apply(self, facts: SessionFacts, known: Known, action: Action) -> Nothing | None:
        """None: decide again at once."""
        context, session = self._context, facts.session
        match action:
            case Nothing():
                return action
            case EnsureFinalizer():
                await add_finalizer(context, session)
            case AssignToken():
                return await self._assign_token(facts, known)
            case AskForSlot():
                return self._ask_for_slot(facts, known)
            case Place():
                await write_status(context, session, action.status)
                known.memory = replace(known.memory, refusal=None, waits_since_ms=0)
                context.board.leave(session.meta.uid)
            case Open():
                return await open_on_pod(context, facts, known, action)
            case HandOver():
                return await hand_over(context, facts, known, action)
            case Park() | End() | Erase():
                return await take_off(context, facts, known, action)
            case WriteStatus():
                await report_status(context, facts, known, action)
            case RemoveFinalizer():
                await remove_finalizer(context, session, action)
            case Delete():
                await delete_object(context, session)
                return Nothing(RETRY_S)
        return None

    async def _settle(
        self, key: ObjectKey, known: Known, facts: SessionFacts, rest: Nothing
    ) -> float | None:
        """Before the session is left alone: the gateway learns what the status says."""
        session = self._context.store.sessions.get(key)
        after_s = rest.after_s
        if session is not None and not session.meta.deleting:
            try:
                token_look_s = await keep_route(self._context, session, known)
                after_s = min(after_s or LATEST_LOOK_S, token_look_s) if token_look_s else after_s
            except LedgerAwayError:
                after_s = min(after_s or RETRY_S, RETRY_S)
        look_s = suspect_look_s(facts.pod)
        return after_s if look_s is None else min(after_s or look_s, look_s)

    # Before it has a slot: token, queue

    async def _assign_token(self, facts: SessionFacts, known: Known) -> Nothing | None:
        session = facts.session
        try:
            # Here, and not when it opens: what cannot be used never takes a slot.
            await obtain_voice(self._context.api, session)
            token = await obtain_token(self._context.api, session)
        except (TokenUnusableError, VoiceUnusableError) as error:
            of_token = isinstance(error, TokenUnusableError)
            reason = RefusalReason.TOKEN_UNUSABLE if of_token else RefusalReason.VOICE_UNUSABLE
            refused = Refused(reason, str(error))
            known.memory = replace(known.memory, refused_spec=refused, refused_at_ms=facts.now_ms)
            return Nothing(RETRY_S) if facts.placement is not None else None
        if known.token_lost and facts.placement is not None:
            known.memory = replace(known.memory, token_untold=True)
        known.token, known.token_lost = token, False
        try:
            await keep_route(self._context, session, known)
        except LedgerAwayError:
            return Nothing(RETRY_S)
        return None

    def _ask_for_slot(self, facts: SessionFacts, known: Known) -> Nothing:
        session = facts.session
        last = session.status.placement or session.status.last_placement
        waiting = Waiting(
            uid=session.meta.uid,
            priority=session.spec.priority or 0,
            arrived_ms=session.meta.created_ms,
            last_pod="" if last is None else last.pod_uid,
        )
        if known.memory.waits_since_ms == 0:
            known.memory = replace(known.memory, waits_since_ms=facts.now_ms)
        self._context.board.ask(session.pool_key, waiting)
        self._poke(session.pool_key)
        return Nothing()

    # What is remembered of a session between looks

    def wake(self, uid: str) -> None:
        """A client waits for this session."""
        session = self._context.store.session_by_uid(uid)
        if session is not None:
            known = self._known.setdefault(uid, Known())
            known.memory = replace(known.memory, woken=True)
            self._context.dirty.mark(Kind.SESSION, session.meta.key)

    def forget_token(self, uid: str) -> None:
        """Its Secret has changed or is gone: obtain the token again."""
        session = self._context.store.session_by_uid(uid)
        if session is not None:
            known = self._known.setdefault(uid, Known())
            if known.token is not None:
                known.replaced = known.replaced or known.token.sha256
                known.replaced_at_ms = self._context.now_ms()
            known.token, known.token_lost = None, True
            self._context.dirty.mark(Kind.SESSION, session.meta.key)

    def token_hash(self, uid: str) -> str | None:
        """sha256 of the token as it is known; None: it is not."""
        known = self._known.get(uid)
        return None if known is None or known.token is None else known.token.sha256

    def _session_changed(self, change: Change[SessionObject]) -> None:
        before, after = change.before, change.after
        if before is None:
            return
        if after is None or after.meta.uid != before.meta.uid:
            self._known.pop(before.meta.uid, None)
        elif before.meta.generation != after.meta.generation:
            known = self._known.get(after.meta.uid)
            if known is not None:
                known.memory = replace(known.memory, refused_spec=None)
            pool = self._context.board.prioritise(after.meta.uid, after.spec.priority or 0)
            if pool is not None:
                self._poke(pool)
