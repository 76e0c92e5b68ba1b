"""One session: observe, decide, apply, until there is nothing to do.

The only place where a session's actions meet the outside. Each takes one step that may be repeated:
an operator that dies between two of them leaves nothing that the next one does not find.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from duplex_api.admin import RESUME
from duplex_api.constants import API_VERSION, SESSION_KIND
from duplex_api.given_voices import given_voice_name
from duplex_api.session import SessionPhase, SessionStatus
from duplex_api.window import WindowPolicy
from duplex_operator.apply import (
    SESSIONS,
    ConflictError,
    EventType,
    MissingError,
    Regarding,
)
from duplex_operator.claims import LET_GO_AFTER_S
from duplex_operator.context import Context
from duplex_operator.decide import erasing
from duplex_operator.decide.acceptance import Accepted, RefusalReason, Refused
from duplex_operator.decide.actions import (
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
from duplex_operator.decide.facts import Refusal, SessionFacts
from duplex_operator.decide.lifecycle import (
    ERASURE_REFUSED,
    VOICE_REFUSAL,
    decide,
    suspect_look_s,
)
from duplex_operator.decide.placement import Waiting
from duplex_operator.decide.status import status_patch
from duplex_operator.manifests import manifest_text
from duplex_operator.names import SESSION_FINALIZER
from duplex_operator.objects import (
    Kind,
    ObjectKey,
    PodPhase,
    RawObject,
    SessionObject,
    read_session,
)
from duplex_operator.observe import Known, Observer
from duplex_operator.routes import LedgerAwayError
from duplex_operator.session_route import LATEST_LOOK_S, keep_route
from duplex_operator.sidecar_client import (
    SidecarClient,
    SidecarRefusalError,
    SidecarUnreachableError,
    retry_level,
)
from duplex_operator.store import Change
from duplex_operator.tokens import TokenUnusableError, obtain_token
from duplex_operator.voices import VoiceUnusableError, obtain_voice

log = logging.getLogger(__name__)

MOST_STEPS = 16
"""Of one look. A session that still has steps left is looked at again, after the others."""
RETRY_S = 1.0
SOON_S = 0.25
REFUSED_FOR_S = 2.0
"""How long a pod that had no room is left alone."""
_FULL = frozenset(("no_slot", "draining"))
_LATER = frozenset(("not_ready", "ledger_unavailable", "unauthorized", "session_busy", ""))


class SessionReconciler:
    """poke: tells the placer that a pool's queue has changed."""

    def __init__(self, context: Context, poke: Callable[[ObjectKey], None]) -> None:
        self._context = context
        self._poke = poke
        self._observer = Observer(context)
        self._known: dict[str, Known] = {}
        context.store.listeners.session.append(self._session_changed)

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
        known = self._known.get(uid)
        return None if known is None or known.token is None else known.token.sha256

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
            self._keep_queue(facts, action)
            try:
                rest = await self._apply(facts, known, action)
            except (ConflictError, MissingError):
                if await self._read_again(session):
                    continue
                return RETRY_S
            if rest is not None:
                return await self._settle(key, known, facts, rest)
        return SOON_S

    def _keep_queue(self, facts: SessionFacts, action: Action) -> None:
        """Whoever does not want a slot any more must not hold one up."""
        queued = isinstance(action, AskForSlot | Place | AssignToken | EnsureFinalizer)
        if not queued and not getattr(action, "queued", False):
            self._context.board.leave(facts.session.meta.uid)

    async def _apply(self, facts: SessionFacts, known: Known, action: Action) -> Nothing | None:
        """None: decide again at once."""
        match action:
            case Nothing():
                return action
            case EnsureFinalizer():
                await self._set_finalizers(
                    facts.session, (*facts.session.meta.finalizers, SESSION_FINALIZER)
                )
            case AssignToken():
                return await self._assign_token(facts, known)
            case AskForSlot():
                return self._ask_for_slot(facts, known)
            case Place():
                await self._write_status(facts, action.status)
                known.memory = replace(known.memory, refusal=None, waits_since_ms=0)
                self._context.board.leave(facts.session.meta.uid)
            case Open():
                return await self._open(facts, known, action)
            case HandOver():
                return await self._hand_over(facts, known, action)
            case Park():
                return await self._park(facts, known, action)
            case End():
                return await self._end(facts, known, action)
            case WriteStatus():
                await self._reflect(facts, known, action)
            case Erase():
                return await self._erase(facts, known)
            case RemoveFinalizer():
                await self._let_go(facts.session, action)
            case Delete():
                meta = facts.session.meta
                await self._context.api.delete(
                    SESSIONS, meta.key, uid=meta.uid, version=meta.version
                )
                return Nothing(RETRY_S)
        return None

    # Kubernetes

    async def _set_finalizers(self, session: SessionObject, names: tuple[str, ...]) -> None:
        meta = session.meta
        body = {"metadata": {"finalizers": list(names)}}
        self._take(await self._context.api.patch(SESSIONS, meta.key, body, version=meta.version))

    async def _write_status(self, facts: SessionFacts, status: SessionStatus) -> None:
        """On exactly the object that was decided on."""
        meta = facts.session.meta
        body = {"status": status_patch(facts.session.status, status)}
        self._take(
            await self._context.api.patch(
                SESSIONS, meta.key, body, version=meta.version, subresource="status"
            )
        )

    async def _reflect(self, facts: SessionFacts, known: Known, action: WriteStatus) -> None:
        await self._write_status(facts, action.status)
        memory, status = known.memory, action.status
        parked = status.phase is SessionPhase.PARKED
        running = status.phase in (SessionPhase.READY, SessionPhase.ACTIVE)
        known.memory = replace(
            memory,
            flushed_ms=facts.now_ms,
            positioned_ms=facts.now_ms if status.queue_position else memory.positioned_ms,
            woken=memory.woken and not (parked or running),
            refusal=memory.refusal if status.placement is not None else None,
        )
        placement = facts.placement
        if placement is not None and status.placement is None:
            self._context.fleet.forget_session(placement.pod_uid, facts.session.meta.uid)
        if action.event:
            await self._tell(facts.session, action.reason, action.sentence, warning=action.warning)

    async def _let_go(self, session: SessionObject, action: RemoveFinalizer) -> None:
        names = tuple(n for n in session.meta.finalizers if n != SESSION_FINALIZER)
        await self._set_finalizers(session, names)
        # Told once: a conflict above makes this begin again.
        await self._tell(session, action.reason, action.sentence, warning=action.warning)

    async def _tell(
        self, session: SessionObject, reason: str, sentence: str, *, warning: bool
    ) -> None:
        await self._context.api.event(
            Regarding(API_VERSION, SESSION_KIND, session.meta.key, session.meta.uid),
            reason=reason,
            note=sentence,
            action="Reconcile",
            event_type=EventType.WARNING if warning else EventType.NORMAL,
        )

    async def _read_again(self, session: SessionObject) -> bool:
        """Somebody else has changed it: take what is there now. False: that is no other than it
        was, or cannot be read, and deciding again at once would come to the same."""
        key = session.meta.key
        try:
            self._take(await self._context.api.get(SESSIONS, key))
        except MissingError:
            self._context.store.sessions.drop(key, session.meta.uid)
        return self._context.store.sessions.get(key) is not session

    def _take(self, raw: RawObject) -> None:
        found = read_session(raw)
        if found is not None:
            self._context.store.sessions.put(found)

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

    # Token, queue

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
        status = session.status
        last = status.placement or status.last_placement
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

    # The sidecar

    async def _open(self, facts: SessionFacts, known: Known, action: Open) -> Nothing | None:
        client = self._context.fleet.client(action.pod_uid)
        verdict, token = facts.verdict, facts.token
        window = verdict.window if isinstance(verdict, Accepted) else facts.session.status.window
        if client is None or token is None or window is None:
            return Nothing(SOON_S)
        uid = facts.session.meta.uid
        try:
            if action.dead_pod_uid:
                await self._tell_of_death(client, action.dead_pod_uid)
            text, voice = await self._order(facts.session, window)
            await self._context.occupancy.occupy(action.pod_uid)
            resume = action.goes_on and self._understands(action.pod_uid, RESUME)
            await client.put_session(uid, text, token.sha256, action.fence, voice, resume=resume)
        except VoiceUnusableError as error:
            return self._voiceless(facts, known, action, error)
        except SidecarUnreachableError as error:
            log.info("opening %s on %s: %s", facts.session.meta.key, action.pod_uid, error)
            return Nothing(SOON_S)
        except SidecarRefusalError as error:
            return self._refused(facts, known, action, error)
        known.memory = replace(
            known.memory,
            opened_fence=action.fence,
            opened_ms=facts.now_ms,
            refusal=None,
            token_untold=False,
        )
        return None

    def _understands(self, pod_uid: str, order: str) -> bool:
        feed = self._context.fleet.pod(pod_uid)
        return feed is not None and order in feed.understands

    async def _order(
        self, session: SessionObject, window: WindowPolicy
    ) -> tuple[str, bytes | None]:
        """What a sidecar is told to run, and the file of its voice, where that has to come along.

        Raises VoiceUnusableError, ApiError.
        """
        voice = await obtain_voice(self._context.api, session)
        return manifest_text(session, window, given_voice_name(voice) if voice else ""), voice

    def _voiceless(
        self, facts: SessionFacts, known: Known, action: Open, error: VoiceUnusableError
    ) -> Nothing | None:
        """Its voice's object has gone or changed since the session was accepted."""
        if facts.said is not None:
            return Nothing(RETRY_S)  # it runs there, and has its voice
        known.memory = replace(
            known.memory,
            refused_spec=Refused(RefusalReason.VOICE_UNUSABLE, str(error)),
            refused_at_ms=facts.now_ms,
            refusal=Refusal(action.fence, VOICE_REFUSAL, str(error)),
        )
        return None

    def _refused(
        self, facts: SessionFacts, known: Known, action: Open, error: SidecarRefusalError
    ) -> Nothing | None:
        if error.code in _LATER or (error.status >= 500 and error.code not in _FULL):
            return Nothing(SOON_S)
        if error.code in _FULL:
            self._context.board.refuse(action.pod_uid, self._context.monotonic_s() + REFUSED_FOR_S)
        elif error.status == 422 or error.code == "manifest_conflict":
            # A spec cannot change, but the file of its voice can.
            refused = Refused(RefusalReason.REFUSED_BY_POD, error.message or error.code)
            known.memory = replace(known.memory, refused_spec=refused, refused_at_ms=facts.now_ms)
        refusal = Refusal(action.fence, error.code, error.message)
        known.memory = replace(known.memory, refusal=refusal)
        log.info("opening %s: %s", facts.session.meta.key, error)
        return None

    async def _hand_over(
        self, facts: SessionFacts, known: Known, action: HandOver
    ) -> Nothing | None:
        """The sidecars are asked once for a placement: whatever goes wrong, the session goes on
        where it is, or with the pod that is ready for it."""
        fleet, uid = self._context.fleet, facts.session.meta.uid
        target, source = fleet.client(action.pod_uid), fleet.client(action.source_uid)
        feed, verdict, token = fleet.pod(action.pod_uid), facts.verdict, facts.token
        window = verdict.window if isinstance(verdict, Accepted) else facts.session.status.window
        if target is None or source is None or feed is None or token is None or window is None:
            return Nothing(SOON_S)
        try:
            text, voice = await self._order(facts.session, window)
            await self._context.occupancy.occupy(action.pod_uid)
            await target.prepare(uid, text, token.sha256, action.fence, voice)
            await source.hand_over(uid, feed.replica, action.fence)
        except VoiceUnusableError as error:
            # Nobody else can take it up now; where it is it has its voice.
            log.info("handing %s over: %s", facts.session.meta.key, error)
            return Nothing(RETRY_S)
        except (SidecarUnreachableError, SidecarRefusalError) as error:
            log.info("handing %s over: %s", facts.session.meta.key, error)
            known.memory = replace(known.memory, unmoved_fence=action.fence)
            return None
        known.memory = replace(
            known.memory,
            opened_fence=action.fence,
            opened_ms=facts.now_ms,
            refusal=None,
            token_untold=False,
        )
        return Nothing(SOON_S)

    async def _tell_of_death(self, client: SidecarClient, pod_uid: str) -> None:
        """What is proven of the pod where the session was. A pod that lives is never named: its
        sidecar may be a new one."""
        if self._is_proven_dead(pod_uid):
            await client.declare_dead(pod_uid)
            return
        for replica in self._context.fleet.ended_replicas(pod_uid):
            await client.declare_replica_dead(replica)

    def _is_proven_dead(self, pod_uid: str) -> bool:
        """No process of that pod can be alive: its object is gone, or says so."""
        pod = self._context.store.pod_by_uid(pod_uid)
        return pod is None or pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)

    async def _park(self, facts: SessionFacts, known: Known, action: Park) -> Nothing | None:
        known.memory = replace(known.memory, asked_park_ms=facts.now_ms)
        client = self._context.fleet.client(action.pod_uid)
        if client is None:
            return Nothing(RETRY_S)
        try:
            await client.park(facts.session.meta.uid)
        except (SidecarUnreachableError, SidecarRefusalError) as error:
            log.log(retry_level(error), "parking %s: %s", facts.session.meta.key, error)
            return Nothing(RETRY_S)
        return None

    async def _end(self, facts: SessionFacts, known: Known, action: End) -> Nothing | None:
        client = self._context.fleet.client(action.pod_uid)
        if client is None:
            return Nothing(RETRY_S)
        uid = facts.session.meta.uid
        try:
            if not await client.end(uid, action.reason) and not await self._is_over(uid):
                log.info("ending %s: it lives on elsewhere", facts.session.meta.key)
                return Nothing(RETRY_S)
        except (SidecarUnreachableError, SidecarRefusalError, LedgerAwayError) as error:
            log.log(retry_level(error), "ending %s: %s", facts.session.meta.key, error)
            return Nothing(RETRY_S)
        known.memory = replace(known.memory, ended=True)
        return None

    async def _is_over(self, uid: str) -> bool:
        """Whether the ledger knows nothing of it that could go on: a session that was placed and
        never opened has nothing to end."""
        lease = await self._context.routes.lease(uid)
        return not lease.held and lease.phase in ("", "ended", "erased")

    async def _erase(self, facts: SessionFacts, known: Known) -> Nothing | None:
        """The ledger by a sidecar, which knows its keys; the route record here."""
        session, uid = facts.session, facts.session.meta.uid
        ran = session.status.placement or session.status.last_placement
        try:
            if ran is not None:
                client = self._context.fleet.any_client()
                if client is None:
                    return Nothing(RETRY_S)
                await client.erase(uid)
            await self._context.routes.drop(uid)
        except (SidecarUnreachableError, SidecarRefusalError, LedgerAwayError) as error:
            log.log(retry_level(error), "erasing %s: %s", session.meta.key, error)
            if not isinstance(error, SidecarRefusalError) or erasing.passes(error.code):
                return Nothing(RETRY_S)
            news = known.memory.erase_refused != str(error)
            known.memory = erasing.after_refusal(known.memory, str(error), facts.now_ms)
            if news:
                note = f"a pod does not erase its ledger: {error}"
                await self._tell(session, ERASURE_REFUSED, note, warning=True)
            return None
        known.memory = replace(known.memory, erased=True)
        return None

    # The route record

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
