"""How sessions come to run on this replica: begun, taken up from the ledger, or handed over to it.

Whether one may is judged before (`session.registry`), and who asks is the session's `only_caller`
here. Whatever fails on the way gives back what it has: the lease, the streams, the offer.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from duplex_api.resolve import ResolvedLifecycle, ResolvedSession
from duplex_api.session import SessionSpec
from duplex_sidecar.ledger.errors import SessionExists
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.moving import Offer
from duplex_sidecar.ledger.records import Opening
from duplex_sidecar.ledger.recovery import RefusalCode, Refuse, decide
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.actor import SessionActor
from duplex_sidecar.session.assembly import Assembly, assemble_new, assemble_recovered
from duplex_sidecar.session.conversation import encode_conversation
from duplex_sidecar.session.departures import Departures
from duplex_sidecar.session.ending import SHUT_DOWN
from duplex_sidecar.session.opening import facts_of, opening_of, require_both_modalities
from duplex_sidecar.session.owners import Owners
from duplex_sidecar.session.reference import reference_rows
from duplex_sidecar.session.refusals import PlacementRefused, Refusal, typed_refusals
from duplex_sidecar.session.roster import Live, Roster
from duplex_sidecar.session.rows import RowsMissing, encode_rows
from duplex_sidecar.session.standing_by import Prepared, StandingBy
from duplex_sidecar.session.token_change import ClientTokens, offer_token
from duplex_sidecar.session.warming import Warmer
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.telemetry.logs import log_context
from duplex_sidecar.window.render import RenderError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """What comes with an order to run a session. token_sha256: of its client's token. fence: that
    an operator issued; None stand-alone. resume: it has a history, and is not begun without it."""

    token_sha256: str
    fence: int | None = None
    resume: bool = False


class Arrivals:
    """Raises what the ledger refuses, and ClientError for the rest."""

    def __init__(
        self,
        assembly: Assembly,
        ledger: Ledger,
        roster: Roster,
        owners: Owners,
        standing_by: StandingBy,
        departures: Departures,
    ) -> None:
        self._assembly = assembly
        self._ledger = ledger
        self._roster = roster
        self._owners = owners
        self._standing_by = standing_by
        self._departures = departures

    async def begin(
        self, session: str, spec: SessionSpec, resolved: ResolvedSession, claim: Claim
    ) -> SessionActor:
        """A new session, from its manifest. Raises UnservedManifestError, `SessionExists`."""
        assembly = self._assembly
        if await self._ledger.exists(session):
            # Known before a trace is begun and the encoder is asked: a session is often opened
            # again, to wake it.
            raise SessionExists(session, "exists")
        if claim.resume:
            message = "the session is to go on, and the ledger knows nothing of it"
            raise PlacementRefused(Refusal.LEDGER_LOST, message)
        require_both_modalities(resolved)
        trace = assembly.new_trace(session)
        draft, conversation = opening_of(session, resolved, assembly.model, trace.traceparent)
        reference = await reference_rows(assembly.stages.encoder, draft)
        head = await self._ledger.create(
            draft,
            replica=assembly.replica,
            token_sha256=claim.token_sha256,
            state=encode_conversation(conversation),
            reference_rows=() if reference is None else (encode_rows(reference),),
            retention_ms=resolved.lifecycle.retention_ms,
        )
        acquire = partial(self._owners.acquire, session, claim.fence)
        async with self._owners.held(session, acquire) as lease:
            actor = assemble_new(assembly, draft, conversation, lease, head, trace, reference)
        return self._start(session, actor, ClientTokens(claim.token_sha256), spec)

    async def take_up(self, session: str, claim: Claim, spec: SessionSpec | None) -> SessionActor:
        """Take a session over from the ledger, parked or left behind. spec: the manifest that it
        was ordered with, None where a client's dial asks for it."""
        async with self._owners.held(session, lambda: self._lease(session, claim)) as lease:
            loaded = await self._ledger.load(session)
            decision = decide(loaded, checkpoint=self._assembly.model.fingerprint)
            if isinstance(decision, Refuse):
                await self._refuse(lease, decision)
            meta = loaded.meta
            client_tokens = ClientTokens(meta.token_sha256, meta.token_offered_sha256)
            if claim.fence is not None:
                await offer_token(self._ledger, lease, client_tokens, claim.token_sha256)
            warm = await self._standing_by.take(session, loaded)
            actor = assemble_recovered(self._assembly, loaded, decision, lease, warm)
        return self._start(session, actor, client_tokens, spec or loaded.opening)

    async def _lease(self, session: str, claim: Claim) -> Lease:
        """By a hand-over to this replica if there was one, else as anybody gets it."""
        prepared = self._standing_by.prepared(session)
        if prepared is not None and (claim.fence or 0) <= prepared.offer.fence:
            lease = await self._owners.adopt(prepared.offer)
            if lease is not None:
                return lease
        return await self._owners.acquire(session, claim.fence)

    async def _refuse(self, lease: Lease, refusal: Refuse) -> NoReturn:
        """Nothing is deleted; only a unit that failed too often ends the session."""
        log.error("session refused: %s: %s", refusal.code, refusal.reason)
        ended = refusal.code is RefusalCode.UNIT_FAILED
        await self._ledger.release(lease, ended=refusal.code if ended else None)
        raise ClientError(_client_code(refusal), refusal.reason)

    async def take_handed(self, session: str, prepared: Prepared) -> SessionActor:
        """Take over one that this replica was made ready for, now that the lease is its own."""
        claim = Claim(prepared.token_sha256, prepared.offer.fence)
        actor = await self.take_up(session, claim, prepared.spec)
        actor.lifecycle = prepared.lifecycle
        return actor

    async def make_ready(
        self, offer: Offer, token_sha256: str, spec: SessionSpec, lifecycle: ResolvedLifecycle
    ) -> int:
        """Offer to take a session that another replica runs, and bring streams up to where it is.
        token_sha256: of its client's token. Returns the newest unit in them."""
        session = offer.session
        with self._roster.slot(session), typed_refusals():
            await self._ledger.moves.offer(offer)
            loaded = await self._ledger.load(session)
            decision = decide(loaded, checkpoint=self._assembly.model.fingerprint)
            if isinstance(decision, Refuse):
                raise ClientError(_client_code(decision), decision.reason)
            facts = facts_of(loaded.opening, self._assembly.model)
            warmer = Warmer(facts, self._assembly.stages, offer.fence)
            prepared = Prepared(offer, token_sha256, spec, lifecycle, warmer)
            try:
                await warmer.follow(loaded)
            except BaseException as error:
                self._standing_by.give_up(prepared)
                if isinstance(error, (StageError, RenderError, RowsMissing)):
                    raise ClientError(ErrorCode.NOT_READY, str(error)) from error
                raise
            self._standing_by.expect(session, prepared)
            return warmer.seq

    def _start(
        self,
        session: str,
        actor: SessionActor,
        client_tokens: ClientTokens,
        terms: SessionSpec | Opening,
    ) -> SessionActor:
        def forget(_: asyncio.Task[None]) -> None:
            ending = actor.ending or SHUT_DOWN
            if actor.left_warm is not None:
                self._standing_by.keep(session, actor.conversation, actor.runner, actor.left_warm)
            self._roster.leave(session, ending)
            self._assembly.metrics.sessions_live(len(self._roster.live))
            fields = {"reason": ending.word, "units": actor.conversation.seq}
            log.info("session no longer runs here", extra={"fields": fields})

        with log_context(session=session):  # the task keeps it, and so do those that it starts
            task = asyncio.create_task(actor.run(), name=f"session {session}")
            task.add_done_callback(forget)
            log.info("session runs here", extra={"fields": {"units": actor.conversation.seq}})
        entry = Live(actor, task, client_tokens, terms)
        self._roster.enter(session, entry)
        self._departures.told(entry)
        self._assembly.metrics.sessions_live(len(self._roster.live))
        self._departures.require_open()
        return actor


def _client_code(refusal: Refuse) -> ErrorCode:
    match refusal.code:
        case RefusalCode.UNIT_FAILED:
            return ErrorCode.UNIT_FAILED
        case RefusalCode.ENDED:
            return ErrorCode.SESSION_ENDED
        case _:
            return ErrorCode.LEDGER_CORRUPT
