"""Who asks for a session on this replica, and whether they get it: the admin API opens and
prepares, doors attach clients. How it comes to run is in `session.arrivals`.

Stand-alone, a client that dials with the token of a session that no replica runs makes this one
take it up, which also wakes a parked one. With an operator, placement decides: a dial is told so.
"""

import asyncio
import logging
from collections.abc import Callable

from duplex_api.pool import PoolSpec
from duplex_api.resolve import ResolvedSession
from duplex_api.session import IMMUTABLE_SESSION_FIELDS, DuplexSession, SessionSpec
from duplex_sidecar.ledger import token as tokens
from duplex_sidecar.ledger.errors import SessionExists
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.session_view import Phase, SessionMeta
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.actor import SessionActor
from duplex_sidecar.session.arrivals import Arrivals, Claim
from duplex_sidecar.session.assembly import Assembly
from duplex_sidecar.session.clients import ClientAttachment
from duplex_sidecar.session.departures import Departures
from duplex_sidecar.session.opening import differs_from, resolve_served
from duplex_sidecar.session.owners import Owners
from duplex_sidecar.session.refusals import (
    PlacementRefused,
    Refusal,
    session_over,
    typed_refusals,
)
from duplex_sidecar.session.roster import Live, Roster
from duplex_sidecar.session.standing_by import StandingBy
from duplex_sidecar.session.token_change import NewToken, offer_token
from duplex_sidecar.session.turnstile import Turnstile

log = logging.getLogger(__name__)

MAX_TOKEN_CHARACTERS = 512


class SessionRegistry:
    """Implements `session.port.SessionPort`."""

    def __init__(
        self,
        assembly: Assembly,
        ledger: Ledger,
        roster: Roster,
        ready: Callable[[], bool],
        *,
        placed: bool = False,
        keep_erasure: Callable[[str], None] = lambda session: None,
    ) -> None:
        """placed: an operator says which sessions run here; a dial takes up none. keep_erasure: see
        `Departures`."""
        self._assembly = assembly
        self._ledger = ledger
        self._ready = ready
        self._placed = placed
        self._owners = Owners(
            ledger, assembly.replica, assembly.address, assembly.metrics, assembly.pod_uid
        )
        self._turnstile = Turnstile()
        self.roster = roster
        self._standing_by = StandingBy(ledger, roster, self._take_over)
        self.departures = Departures(roster, ledger, self._owners, self._turnstile, keep_erasure)
        self._arrivals = Arrivals(
            assembly, ledger, roster, self._owners, self._standing_by, self.departures
        )

    @property
    def live(self) -> dict[str, SessionActor]:
        return {session: entry.actor for session, entry in self.roster.live.items()}

    @property
    def free_slots(self) -> int:
        return self.roster.free_slots

    @property
    def expected(self) -> tuple[SessionSpec, ...]:
        """Of the sessions that this replica is prepared for."""
        return self._standing_by.expected

    def declare_dead(self, name: str) -> None:
        """Proof of death of a replica, or of every replica of a pod (its uid): somebody saw it end.
        Its leases are broken when one of its sessions is asked for."""
        self._owners.dead.declare(name)

    # --- opening ----------------------------------------------------------------------------------

    async def open(
        self, session: str, manifest: DuplexSession, claim: Claim, pool: PoolSpec | None = None
    ) -> SessionActor:
        """Idempotent: the same order again returns the running session. pool: whose window presets
        the session may name.

        Raises WindowConfigError, UnknownPresetError and UnservedManifestError for the manifest,
        PlacementRefused, and ClientError for the rest.
        """
        if (complaint := name_complaint(session)) is not None:
            raise ClientError(ErrorCode.INVALID_EVENT, complaint, "session")
        self.departures.require_open()
        async with self._turnstile.only_caller(session):
            resolved = self._resolved(manifest, pool)
            entry = await self._staying(session)
            if entry is not None:
                self._require_same_terms(entry, manifest.spec, resolved)
                if await self._goes_on(entry, claim):
                    entry.terms = manifest.spec
                    entry.actor.lifecycle = resolved.lifecycle
                    return entry.actor
            self._require_placeable()
            with self.roster.slot(session), typed_refusals():
                try:
                    return await self._arrivals.begin(session, manifest.spec, resolved, claim)
                except SessionExists:
                    await self._require_right(session, claim)
                actor = await self._arrivals.take_up(session, claim, manifest.spec)
                actor.lifecycle = resolved.lifecycle
                return actor

    async def prepare(
        self, session: str, manifest: DuplexSession, claim: Claim, pool: PoolSpec | None = None
    ) -> int:
        """Make ready for a session that another replica runs and is to hand over under the claim's
        fence; this one takes it up when the lease is its own. Idempotent. Returns the newest unit
        that is in its streams. Raises as `open` does, PlacementRefused NOT_PREPARED where nobody
        runs it who could hand it over."""
        assert claim.fence is not None
        if (complaint := name_complaint(session)) is not None:
            raise ClientError(ErrorCode.INVALID_EVENT, complaint, "session")
        self.departures.require_open()
        async with self._turnstile.only_caller(session):
            resolved = self._resolved(manifest, pool)
            entry = await self._staying(session)
            if entry is not None and entry.actor.lease.fence == claim.fence:
                return entry.actor.conversation.seq  # it has come
            if entry is not None:
                raise PlacementRefused(Refusal.STALE_FENCE, "it runs here")
            self._require_placeable()
            known = self._standing_by.prepared(session)
            if known is None or known.offer.fence != claim.fence:
                await self._standing_by.drop(session)
                offer = self._owners.offer(session, claim.fence)
                return await self._arrivals.make_ready(
                    offer, claim.token_sha256, manifest.spec, resolved.lifecycle
                )
            with typed_refusals():
                await self._ledger.moves.offer(known.offer)
            self._standing_by.expect(session, known)
            return known.warmer.seq

    async def _take_over(self, session: str) -> None:
        """Of a session that was handed to this replica, unless somebody asked for it first."""
        async with self._turnstile.only_caller(session):
            prepared = self._standing_by.prepared(session)
            if prepared is None or self.departures.closed or session in self.roster.live:
                return
            try:
                with self.roster.slot(session), typed_refusals():
                    await self._arrivals.take_handed(session, prepared)
            except ClientError as refused:
                if prepared.complains(refused.code.value):
                    log.warning("session is not taken over: %s", refused.code)

    def _require_same_terms(
        self, entry: Live, spec: SessionSpec, resolved: ResolvedSession
    ) -> None:
        if isinstance(entry.terms, SessionSpec):
            other = first_difference(entry.terms, spec)
        else:
            other = differs_from(entry.terms, resolved, self._assembly.model)
        if other is not None:
            raise PlacementRefused(Refusal.MANIFEST_CONFLICT, f"it runs with another {other}")

    async def _goes_on(self, entry: Live, claim: Claim) -> bool:
        """Whether the running session is what is asked for. False: it was let go of, for it is to
        run under a larger fence. Raises PlacementRefused, ClientError."""
        fence = entry.actor.lease.fence
        if claim.fence is not None and claim.fence < fence:
            raise PlacementRefused(Refusal.STALE_FENCE, f"it runs here under fence {fence}")
        if claim.fence is not None:
            with typed_refusals():
                await offer_token(self._ledger, entry.actor.lease, entry.tokens, claim.token_sha256)
        elif not entry.tokens.lets_in(claim.token_sha256):
            raise ClientError(ErrorCode.UNAUTHORIZED)
        if claim.fence is not None and claim.fence > fence:
            entry.actor.wishes.let_go()
            await asyncio.wait({entry.task})
            return False
        return True

    def _resolved(self, manifest: DuplexSession, pool: PoolSpec | None) -> ResolvedSession:
        return resolve_served(manifest, pool, self._assembly.model)

    # --- attaching --------------------------------------------------------------------------------

    async def attach(self, session: str, token: str, last_sequence: int | None) -> ClientAttachment:
        if name_complaint(session) is not None or not tokens_acceptable(token):
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        self.departures.require_open()
        if not self._ready():
            raise ClientError(ErrorCode.NOT_READY)
        digest = tokens.token_sha256(token)
        async with self._turnstile.only_caller(session):
            entry = await self._staying(session)
            if entry is not None:
                return self._attached(entry, digest, last_sequence)
            with typed_refusals():
                meta = await self._require_token(session, digest)
                prepared = self._standing_by.prepared(session)
                if prepared is not None and meta.nonce == prepared.offer.nonce:
                    with self.roster.slot(session):
                        await self._arrivals.take_handed(session, prepared)
                    return self._attached(self.roster.live[session], digest, last_sequence)
                self._require_at_home(meta)
                with self.roster.slot(session):
                    await self._arrivals.take_up(session, Claim(meta.token_sha256), None)
            return self._attached(self.roster.live[session], digest, last_sequence)

    def _attached(
        self, entry: Live, token_sha256: str, last_sequence: int | None
    ) -> ClientAttachment:
        """Also of one that was taken up for this very dial: its tokens may be others by then."""
        actor = entry.actor
        if not entry.tokens.lets_in(token_sha256):
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        if not entry.tokens.hears(token_sha256):
            return actor.attach(last_sequence)
        new = NewToken(self._ledger, lambda: actor.lease, entry.tokens, token_sha256)
        attachment = actor.attach(last_sequence, new.said)
        if last_sequence is not None:
            new.said()  # that it resumes was its first message
        return attachment

    def _require_at_home(self, meta: SessionMeta) -> None:
        """Whether a dial may take the session up here."""
        if self._placed and meta.phase is Phase.PARKED:
            raise ClientError(ErrorCode.PARKED)
        if self._placed:
            raise ClientError(ErrorCode.LEASE_LOST, "the session does not run on this replica")
        self._require_placeable()

    async def _require_token(self, session: str, token_sha256: str) -> SessionMeta:
        """What the ledger has of the session, once the given token has proved right."""
        meta = await self._ledger.reader.meta(session)
        if meta is None or meta.phase is Phase.ERASED:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        matched = tokens.match_sha256(token_sha256, meta.token_sha256, meta.token_offered_sha256)
        if matched is tokens.TokenMatch.NONE:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        if meta.phase is Phase.ENDED:
            raise session_over(meta.reason)
        return meta

    async def _require_right(self, session: str, claim: Claim) -> None:
        """Stand-alone the token is the right to a session; an operator's word is one by itself."""
        if claim.fence is None:
            await self._require_token(session, claim.token_sha256)

    # --- leaving ----------------------------------------------------------------------------------

    async def end(self, session: str, reason: str = "") -> bool:
        """See `Departures.end`."""
        return await self.departures.end(session, reason)

    async def close(self) -> None:
        """Let go of all sessions: their ledgers stay open for another replica. None starts any
        more."""
        await self.departures.let_go_of_all()
        await self._standing_by.close()

    # --- inside -----------------------------------------------------------------------------------

    async def _staying(self, session: str) -> Live | None:
        """The running session; one that is about to leave is waited for, it ends in bounded
        time."""
        entry = self.roster.live.get(session)
        if entry is not None and entry.actor.leaving:
            await asyncio.wait({entry.task})
            entry = None
        return entry

    def _require_placeable(self) -> None:
        if self.departures.draining:
            raise PlacementRefused(Refusal.DRAINING, "the replica is being emptied")


def first_difference(one: SessionSpec, other: SessionSpec) -> str | None:
    """The first of the fields that a session keeps for life in which they differ."""
    for name in IMMUTABLE_SESSION_FIELDS:
        if getattr(one, name) != getattr(other, name):
            return name
    return None


def name_complaint(session: str) -> str | None:
    """Why the ledger has no keys for a session of that name; None when it has."""
    try:
        session_keys(session)
    except ValueError as error:
        return str(error)
    return None


def tokens_acceptable(token: str) -> bool:
    return 0 < len(token) <= MAX_TOKEN_CHARACTERS
