"""A session comes to its pod: it is opened there, or handed over by the pod where it was.

What a sidecar refuses is remembered: the next decision says what comes of it.
"""

import logging
from dataclasses import replace

from duplex_api.admin import RESUME
from duplex_api.given_voices import given_voice_name
from duplex_api.window import WindowPolicy
from duplex_operator.context import Context
from duplex_operator.decide.acceptance import Accepted, RefusalReason, Refused
from duplex_operator.decide.actions import RETRY_S, SOON_S, HandOver, Nothing, Open
from duplex_operator.decide.facts import Refusal, SessionFacts
from duplex_operator.decide.lifecycle import LEDGER_LOST, VOICE_REFUSAL
from duplex_operator.manifests import manifest_text
from duplex_operator.objects import PodPhase, SessionObject
from duplex_operator.observe import Known
from duplex_operator.sidecar_client import (
    SidecarClient,
    SidecarRefusalError,
    SidecarUnreachableError,
    retry_level,
)
from duplex_operator.voices import VoiceUnusableError, obtain_voice

log = logging.getLogger(__name__)

REFUSED_FOR_S = 2.0
"""How long a pod that had no room is left alone."""
TELL_AGAIN_MS = 5_000
_OVER = frozenset(("session_ended", "stale_fence", LEDGER_LOST))
"""Refusals of an order about a session that runs there, after which it does not."""
_FULL = frozenset(("no_slot", "draining"))
_LATER = frozenset(("not_ready", "ledger_unavailable", "unauthorized", "session_busy", ""))


async def open_on_pod(
    context: Context, facts: SessionFacts, known: Known, action: Open
) -> Nothing | None:
    """None: it was answered, decide again at once. Raises ApiError."""
    client, token, window = context.fleet.client(action.pod_uid), facts.token, _window(facts)
    if client is None or token is None or window is None:
        return Nothing(SOON_S)
    uid = facts.session.meta.uid
    try:
        if action.dead_pod_uid:
            await _tell_of_death(context, client, action.dead_pod_uid)
        text, voice = await _order(context, facts.session, window)
        await context.occupancy.occupy(action.pod_uid)
        resume = action.goes_on and _understands(context, action.pod_uid, RESUME)
        await client.put_session(uid, text, token.sha256, action.fence, voice, resume=resume)
    except VoiceUnusableError as error:
        return _voiceless(facts, known, action, error)
    except SidecarUnreachableError as error:
        if facts.said is not None:
            return _tell_later(facts, known, error)
        log.info("opening %s on %s: %s", facts.session.meta.key, action.pod_uid, error)
        return Nothing(SOON_S)
    except SidecarRefusalError as error:
        return _refused(context, facts, known, action, error)
    _opened(facts, known, action.fence)
    return None


async def hand_over(
    context: Context, facts: SessionFacts, known: Known, action: HandOver
) -> Nothing | None:
    """The sidecars are asked once for a placement: whatever goes wrong, the session goes on where
    it is, or with the pod that is ready for it. Raises ApiError."""
    fleet, uid = context.fleet, facts.session.meta.uid
    target, source = fleet.client(action.pod_uid), fleet.client(action.source_uid)
    feed, token, window = fleet.pod(action.pod_uid), facts.token, _window(facts)
    if target is None or source is None or feed is None or token is None or window is None:
        return Nothing(SOON_S)
    try:
        text, voice = await _order(context, facts.session, window)
        await context.occupancy.occupy(action.pod_uid)
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
    _opened(facts, known, action.fence)
    return Nothing(SOON_S)


# What a sidecar is told


def _window(facts: SessionFacts) -> WindowPolicy | None:
    """One that its pool refuses by now goes on with the window that it was given."""
    verdict = facts.verdict
    return verdict.window if isinstance(verdict, Accepted) else facts.session.status.window


async def _order(
    context: Context, session: SessionObject, window: WindowPolicy
) -> tuple[str, bytes | None]:
    """The manifest, and the file of its voice, where that has to come along.

    Raises VoiceUnusableError, ApiError.
    """
    voice = await obtain_voice(context.api, session)
    return manifest_text(session, window, given_voice_name(voice) if voice else ""), voice


def _understands(context: Context, pod_uid: str, order: str) -> bool:
    feed = context.fleet.pod(pod_uid)
    return feed is not None and order in feed.understands


async def _tell_of_death(context: Context, client: SidecarClient, pod_uid: str) -> None:
    """What is proven of the pod where the session was. A pod that lives is never named: its
    sidecar may be a new one."""
    pod = context.store.pod_by_uid(pod_uid)
    if pod is None or pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        # Its object is gone, or says so: no process of it can be alive.
        await client.declare_dead(pod_uid)
        return
    for replica in context.fleet.ended_replicas(pod_uid):
        await client.declare_replica_dead(replica)


# What is remembered of the answer


def _opened(facts: SessionFacts, known: Known, fence: int) -> None:
    known.memory = replace(
        known.memory,
        opened_fence=fence,
        opened_ms=facts.now_ms,
        refusal=None,
        token_untold=False,
    )


def _voiceless(
    facts: SessionFacts, known: Known, action: Open, error: VoiceUnusableError
) -> Nothing | None:
    """Its voice's object has gone or changed since the session was accepted."""
    if facts.said is not None:
        return _tell_later(facts, known, error)  # it runs there, and has its voice
    known.memory = replace(
        known.memory,
        refused_spec=Refused(RefusalReason.VOICE_UNUSABLE, str(error)),
        refused_at_ms=facts.now_ms,
        refusal=Refusal(action.fence, VOICE_REFUSAL, str(error)),
    )
    return None


def _refused(
    context: Context, facts: SessionFacts, known: Known, action: Open, error: SidecarRefusalError
) -> Nothing | None:
    if facts.said is not None and error.code not in _OVER:
        return _tell_later(facts, known, error)
    if error.code in _LATER or (error.status >= 500 and error.code not in _FULL):
        return Nothing(SOON_S)
    if error.code in _FULL:
        context.board.refuse(action.pod_uid, context.monotonic_s() + REFUSED_FOR_S)
    elif error.status == 422 or error.code == "manifest_conflict":
        # A spec cannot change, but the file of its voice can.
        refused = Refused(RefusalReason.REFUSED_BY_POD, error.message or error.code)
        known.memory = replace(known.memory, refused_spec=refused, refused_at_ms=facts.now_ms)
    refusal = Refusal(action.fence, error.code, error.message)
    known.memory = replace(known.memory, refusal=refusal)
    log.info("opening %s: %s", facts.session.meta.key, error)
    return None


def _tell_later(facts: SessionFacts, known: Known, error: Exception) -> None:
    """It runs there, and is not to be moved nor left unlooked at because its sidecar cannot be told
    of a changed token: its ledger is away, say, or its voice has been replaced."""
    log.log(retry_level(error), "telling %s its token: %s", facts.session.meta.key, error)
    known.memory = replace(known.memory, told_from_ms=facts.now_ms + TELL_AGAIN_MS)
