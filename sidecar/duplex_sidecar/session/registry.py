"""All sessions of this replica: opened by the admin API, found by doors, taken up from the ledger.

A client that dials with the token of a session that no replica runs makes this one take it up. That
is the stand-alone rule; with an operator, placement decides and a refusal is final.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from duplex_api.pool import PoolSpec
from duplex_api.resolve import ResolvedSession, resolve_session
from duplex_api.session import DuplexSession
from duplex_api.window import WindowLimits
from duplex_sidecar.ledger import token as tokens
from duplex_sidecar.ledger.errors import (
    LeaseHeld,
    LeaseSettling,
    LedgerError,
    LedgerFull,
    LedgerUnavailable,
    SessionEnded,
    SessionErased,
    SessionExists,
    SessionUnknown,
)
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.recovery import RefusalCode, Refuse, decide
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.actor import ClientAttachment, SessionActor
from duplex_sidecar.session.assembly import Assembly, assemble_new, assemble_recovered
from duplex_sidecar.session.conversation import encode_conversation
from duplex_sidecar.session.opening import opening_of, require_served
from duplex_sidecar.telemetry.logs import log_context

log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT_S = 8.0
_ACQUIRE_POLL_S = 0.1
MAX_TOKEN_CHARACTERS = 512


@dataclass
class _Live:
    actor: SessionActor
    task: asyncio.Task[None]
    token_sha256: str


@dataclass
class _Door:
    """One session is opened or taken up by one caller at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0


class SessionRegistry:
    """Implements `session.port.SessionPort`."""

    def __init__(
        self, assembly: Assembly, ledger: Ledger, slots: int, ready: Callable[[], bool]
    ) -> None:
        self._assembly = assembly
        self._ledger = ledger
        self._slots = slots
        self._ready = ready
        self._live: dict[str, _Live] = {}
        self._opening: set[str] = set()
        self._doors: dict[str, _Door] = {}
        self._dead_replicas: set[str] = set()
        self._closed = False

    @property
    def live(self) -> dict[str, SessionActor]:
        return {session: entry.actor for session, entry in self._live.items()}

    def ids(self) -> set[str]:
        """Sessions that hold a slot, those being opened included."""
        return {*self._live, *self._opening}

    @property
    def free_slots(self) -> int:
        return self._slots - len(self._live) - len(self._opening)

    def declare_dead(self, replica: str) -> None:
        """Proof of death: a supervisor saw that replica's process end. Its leases are broken when
        one of its sessions is asked for."""
        self._dead_replicas.add(replica)

    # --- opening ----------------------------------------------------------------------------------

    async def open(
        self, session: str, manifest: DuplexSession, token: str, pool: PoolSpec | None = None
    ) -> SessionActor:
        """Idempotent: the same session again returns the running one. pool: whose window presets
        the session may name.

        Raises WindowConfigError, UnknownPresetError and UnservedManifestError for the manifest,
        ClientError for the rest.
        """
        if not tokens_acceptable(token):
            raise ClientError(ErrorCode.INVALID_EVENT, "the token is empty or too long", "token")
        if (complaint := name_complaint(session)) is not None:
            raise ClientError(ErrorCode.INVALID_EVENT, complaint, "session")
        self._require_open()
        async with self._only_caller(session):
            entry = self._live.get(session)
            if entry is not None:
                if tokens.match(token, entry.token_sha256, "") is tokens.TokenMatch.NONE:
                    raise ClientError(ErrorCode.UNAUTHORIZED)
                return entry.actor
            resolved = self._resolved(manifest, pool)
            with self._slot(session), _typed_refusals():
                try:
                    return await self._create(session, resolved, token)
                except SessionExists:
                    return await self._take_up(session, await self._token_digest(session, token))

    def _resolved(self, manifest: DuplexSession, pool: PoolSpec | None) -> ResolvedSession:
        model = self._assembly.model
        limits = WindowLimits(max_model_tokens=model.max_model_tokens)
        resolved = resolve_session(manifest.spec, pool, limits)
        require_served(resolved, model)
        return resolved

    async def _create(self, session: str, resolved: ResolvedSession, token: str) -> SessionActor:
        assembly = self._assembly
        trace = assembly.new_trace(session)
        draft, conversation = opening_of(session, resolved, assembly.model, trace.traceparent)
        digest = tokens.token_sha256(token)
        head = await self._ledger.create(
            draft,
            replica=assembly.replica,
            token_sha256=digest,
            state=encode_conversation(conversation),
        )
        lease = await self._acquire(session)
        actor = assemble_new(assembly, draft, conversation, lease, head, trace)
        return self._start(session, actor, digest)

    # --- attaching --------------------------------------------------------------------------------

    async def attach(self, session: str, token: str, last_sequence: int | None) -> ClientAttachment:
        if name_complaint(session) is not None or not tokens_acceptable(token):
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        self._require_open()
        if not self._ready():
            raise ClientError(ErrorCode.NOT_READY)
        async with self._only_caller(session):
            entry = self._live.get(session)
            if entry is None:
                with _typed_refusals():
                    digest = await self._token_digest(session, token)
                    with self._slot(session):
                        actor = await self._take_up(session, digest)
            elif tokens.match(token, entry.token_sha256, "") is tokens.TokenMatch.NONE:
                raise ClientError(ErrorCode.SESSION_NOT_FOUND)
            else:
                actor = entry.actor
            return actor.attach(last_sequence)

    async def _token_digest(self, session: str, token: str) -> str:
        """The stored hash of the session's token, once the given one has proved right."""
        meta = await self._ledger.reader.meta(session)
        if meta is None or meta.phase is Phase.ERASED:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        matched = tokens.match(token, meta.token_sha256, meta.token_offered_sha256)
        if matched is tokens.TokenMatch.NONE:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        if meta.phase is Phase.ENDED:
            raise ClientError(ErrorCode.SESSION_ENDED, meta.reason)
        return meta.token_sha256

    async def _take_up(self, session: str, token_sha256: str) -> SessionActor:
        """Take a session over from the ledger."""
        lease = await self._acquire(session)
        loaded = await self._ledger.load(session)
        decision = decide(loaded, checkpoint=self._assembly.model.fingerprint)
        if isinstance(decision, Refuse):
            await self._refuse(lease, decision)
        actor = assemble_recovered(self._assembly, loaded, decision, lease)
        return self._start(session, actor, token_sha256)

    async def _refuse(self, lease: Lease, refusal: Refuse) -> NoReturn:
        """Nothing is deleted; only a unit that failed too often ends the session."""
        log.error("session refused: %s: %s", refusal.code, refusal.reason)
        ended = refusal.code is RefusalCode.UNIT_FAILED
        await self._ledger.release(lease, ended=refusal.code if ended else None)
        code = ErrorCode.UNIT_FAILED if ended else ErrorCode.LEDGER_CORRUPT
        if refusal.code is RefusalCode.ENDED:
            code = ErrorCode.SESSION_ENDED
        raise ClientError(code, refusal.reason)

    async def _acquire(self, session: str) -> Lease:
        """Wait for the lease of a lost owner to run out, or break it where its death is proven."""
        deadline = asyncio.get_running_loop().time() + ACQUIRE_TIMEOUT_S
        while True:
            try:
                return await self._ledger.acquire(session, self._assembly.replica)
            except LeaseHeld as held:
                wait_s = held.remaining_ms / 1000
                # One that this replica itself holds without running the session was left behind by
                # a caller that gave up.
                if held.replica in self._dead_replicas or held.replica == self._assembly.replica:
                    await self._ledger.break_lease(session, replica=held.replica)
                    continue
            except LeaseSettling as settling:
                wait_s = settling.wait_ms / 1000
            if asyncio.get_running_loop().time() + min(wait_s, _ACQUIRE_POLL_S) > deadline:
                raise ClientError(ErrorCode.NOT_READY, "another replica holds the session's lease")
            await asyncio.sleep(max(0.01, min(wait_s, _ACQUIRE_POLL_S)))

    # --- ending -----------------------------------------------------------------------------------

    async def end(self, session: str) -> bool:
        """End a running session for good. False when it does not run here."""
        entry = self._live.get(session)
        if entry is None:
            return False
        await entry.actor.end(ErrorCode.SESSION_ENDED, "ended by the admin API")
        await asyncio.wait({entry.task})  # then its slot is free, too
        return True

    async def close(self) -> None:
        """Let go of all sessions: their ledgers stay open for another replica. None starts any
        more."""
        self._closed = True
        for entry in self._live.values():
            entry.actor.let_go()
        await asyncio.gather(*(entry.task for entry in self._live.values()))

    # --- inside -----------------------------------------------------------------------------------

    def _start(self, session: str, actor: SessionActor, token_sha256: str) -> SessionActor:
        def forget(_: asyncio.Task[None]) -> None:
            del self._live[session]
            self._assembly.metrics.sessions_live(len(self._live))
            because = actor.ended_because
            code = because.code if because else None
            fields = {"reason": code, "units": actor.conversation.seq}
            log.info("session no longer runs here", extra={"fields": fields})

        with log_context(session=session):  # the task keeps it, and so do those that it starts
            task = asyncio.create_task(actor.run(), name=f"session {session}")
            task.add_done_callback(forget)
            log.info("session runs here", extra={"fields": {"units": actor.conversation.seq}})
        self._live[session] = _Live(actor, task, token_sha256)
        self._assembly.metrics.sessions_live(len(self._live))
        if self._closed:
            actor.let_go()
            self._require_open()
        return actor

    def _require_open(self) -> None:
        if self._closed:
            raise ClientError(ErrorCode.NOT_READY, "the replica is shutting down")

    @asynccontextmanager
    async def _only_caller(self, session: str) -> AsyncGenerator[None]:
        door = self._doors.setdefault(session, _Door())
        door.callers += 1
        try:
            async with door.lock:
                yield
        finally:
            door.callers -= 1
            if door.callers == 0:
                del self._doors[session]

    @contextmanager
    def _slot(self, session: str) -> Generator[None]:
        """A slot counts as taken while a session is being opened."""
        if self.free_slots < 1:
            raise ClientError(
                ErrorCode.RESOURCE_EXHAUSTED, f"all {self._slots} slots of this replica are taken"
            )
        self._opening.add(session)
        try:
            yield
        finally:
            self._opening.discard(session)


@contextmanager
def _typed_refusals() -> Generator[None]:
    """What the ledger says, in the words of the protocol."""
    try:
        yield
    except SessionUnknown:
        raise ClientError(ErrorCode.SESSION_NOT_FOUND) from None
    except SessionErased:
        raise ClientError(ErrorCode.SESSION_ENDED, "the session was erased") from None
    except SessionEnded as error:
        raise ClientError(ErrorCode.SESSION_ENDED, error.reason) from None
    except LedgerUnavailable as error:
        raise ClientError(ErrorCode.LEDGER_UNAVAILABLE, error.reason) from error
    except LedgerFull as error:
        raise ClientError(ErrorCode.RESOURCE_EXHAUSTED, error.reason) from error
    except (LedgerError, msgspec.MsgspecError) as error:
        log.error("session cannot be opened or taken up: %s", error)
        raise ClientError(ErrorCode.LEDGER_CORRUPT, str(error)) from error


def name_complaint(session: str) -> str | None:
    """Why the ledger has no keys for a session of that name; None when it has."""
    try:
        session_keys(session)
    except ValueError as error:
        return str(error)
    return None


def tokens_acceptable(token: str) -> bool:
    return 0 < len(token) <= MAX_TOKEN_CHARACTERS
