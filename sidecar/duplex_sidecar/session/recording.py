"""What a unit leaves in the ledger and in the conversation's state. Pure."""

from dataclasses import dataclass

from duplex_api.window import WindowBoundary, WindowMode
from duplex_sidecar.framing.append import Append
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.media import Trim
from duplex_sidecar.model.minicpmo45.decode import AnswerFacts, Decision, UnitRules, advance
from duplex_sidecar.session.conversation import Conversation, Speech
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.hearing import first_unit_needed
from duplex_sidecar.session.open_unit import OpenUnit
from duplex_sidecar.stages.envelope import ThinkerAnswer
from duplex_sidecar.window.parts import HistoryUnit
from duplex_sidecar.window.state import Extend, Rebuild, WindowState

RECORDS_KEPT_UNITS = 1_200
"""Chain entries stay for 20 minutes after their blobs have gone (mode `off` keeps all)."""
SENTENCE_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
STRATEGY = "reprefill"
NO_DIRECTIVE = "none"
_NEWEST_REBUILD_WEIGHT = 0.3
FIRST_REBUILD_MS_PER_TOKEN = 0.1
"""What a rebuild is predicted with before the first one of a session has been measured: 10,000
tokens a second, slow for an accelerator's prefill and fast for a processor's."""


@dataclass(frozen=True)
class Planned:
    """A plan that is to be carried out, and the window after its admission."""

    plan: Extend | Rebuild
    window: WindowState


@dataclass(frozen=True)
class Answered:
    """An answer, what it means, and the rules and plan under which it was given."""

    rules: UnitRules
    answer: ThinkerAnswer
    facts: AnswerFacts
    plan: Extend | Rebuild
    window: WindowState


def unit_seed(facts: SessionFacts, seq: int) -> str:
    """Names the draws of a unit: a redone unit draws the same."""
    return f"{facts.seed}:thinker:{seq}"


def accept_draft(
    facts: SessionFacts, append: Append, plan: Extend | Rebuild, speech: Speech, traceparent: str
) -> records.AcceptDraft:
    return records.AcceptDraft(
        seq=append.seq,
        epoch=speech.epoch,
        turn=speech.turn,
        input=records.UnitInput(
            new_samples=append.new_samples,
            chunks=append.chunks,
            client_from_samples=append.client_from_samples,
            client_to_samples=append.client_to_samples,
            is_speech=append.is_speech,
            force_listen=append.force_listen,
            final=append.final,
        ),
        plan=plan_facts(facts, plan, append.seq),
        directive=plan.cause if isinstance(plan, Rebuild) else NO_DIRECTIVE,
        strategy=STRATEGY,
        seed=facts.seed,
        traceparent=traceparent,
    )


def commit_draft(
    facts: SessionFacts, seq: int, speech: Speech, answered: Answered
) -> records.CommitDraft:
    terminator = answered.facts.terminator
    name = None if terminator is None else facts.vocabulary.token_bytes[terminator].decode()
    return records.CommitDraft(
        seq=seq,
        epoch=speech.epoch,
        turn=speech.turn,
        token_ids=answered.answer.emitted_ids,
        sampled_ids=answered.answer.sampled_ids,
        terminator=name,
        decision=answered.facts.decision,
        turn_end=answered.facts.turn_end,
        plan=plan_facts(facts, answered.plan, seq),
    )


def plan_facts(facts: SessionFacts, plan: Extend | Rebuild, seq: int) -> records.PlanFacts:
    mode = facts.policy.mode
    if isinstance(plan, Extend):
        action = records.PlanAction.OPEN if seq == 1 else records.PlanAction.EXTEND
        return records.PlanFacts(action, mode, None, 0, 0, 0, plan.prompt_tokens)
    return records.PlanFacts(
        action=records.PlanAction.REBUILD,
        mode=mode,
        cause=plan.cause,
        dropped_units=plan.drop_units,
        dropped_tokens=plan.dropped_tokens,
        replacement_tokens=plan.replacement_tokens,
        prompt_tokens=plan.replacement_tokens,
    )


def conversation_after(
    facts: SessionFacts,
    before: Conversation,
    open_unit: OpenUnit,
    completed: HistoryUnit,
    answered: Answered,
    rebuild_ms: float | None,
) -> Conversation:
    """The state to commit with the answer."""
    answer = answered.answer
    return Conversation(
        seq=open_unit.append.seq,
        policy=advance(answered.rules, answer.sampled_ids, answer.emitted_ids, facts.vocabulary),
        window=answered.window,
        completed=completed,
        completed_ends=_boundary(facts, before, answered.facts),
        framing=open_unit.append.resume,
        encoder_mark_samples=open_unit.encoder_mark_samples,
        rebuild_ms_per_token=_learned(before.rebuild_ms_per_token, answered.plan, rebuild_ms),
    )


def predicted_rebuild_ms(known: Conversation, tokens: int) -> float:
    """What a rebuild of so many tokens is thought to take."""
    return tokens * (known.rebuild_ms_per_token or FIRST_REBUILD_MS_PER_TOKEN)


def trim_after(mode: WindowMode, after: Conversation) -> Trim:
    """What the commit may drop: blobs that left the window, PCM that no restore replays."""
    pcm_below = first_unit_needed(after.encoder_mark_samples)
    if mode is WindowMode.OFF:
        return Trim(window_below=1, pcm_below=pcm_below, records_below=1)
    window_below = after.window.units[0].seq if after.window.units else after.seq
    records_below = max(1, min(window_below, pcm_below, after.seq - RECORDS_KEPT_UNITS))
    return Trim(window_below, pcm_below, records_below)


def _boundary(facts: SessionFacts, before: Conversation, answer: AnswerFacts) -> WindowBoundary:
    listens_outside_of_a_reply = answer.decision is Decision.LISTEN and before.policy.turn_ended
    if answer.turn_end or listens_outside_of_a_reply:
        return WindowBoundary.TURN
    text = facts.vocabulary.text(answer.content_ids).rstrip()
    return WindowBoundary.SENTENCE if text.endswith(SENTENCE_ENDS) else WindowBoundary.UNIT


def _learned(before: float, plan: Extend | Rebuild, rebuild_ms: float | None) -> float:
    """Milliseconds per token of a rebuild, as a moving average."""
    if rebuild_ms is None or not isinstance(plan, Rebuild):
        return before
    newest = rebuild_ms / plan.replacement_tokens
    return newest if before == 0 else before + _NEWEST_REBUILD_WEIGHT * (newest - before)
