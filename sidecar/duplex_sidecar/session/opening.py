"""What a session is opened with, and how the same comes back out of its ledger.

The manifest is resolved once; the opening record pins the result for life, so that a change of
defaults, of a preset or of the tokenizer's template never changes a running conversation.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from duplex_api.pool import PoolSpec
from duplex_api.problems import Problem
from duplex_api.resolve import (
    ResolvedCamera,
    ResolvedLifecycle,
    ResolvedSampling,
    ResolvedSession,
    resolve_session,
)
from duplex_api.session import BOTH_MODALITIES, DuplexSession, Modality
from duplex_api.window import ResolvedWindow, WindowLimits, WindowStrategy
from duplex_sidecar.framing.append import NEW_FRAMER
from duplex_sidecar.ledger.records import Opening, OpeningDraft, PromptIds, PromptPart, PromptRows
from duplex_sidecar.ledger.writing import MAX_RECORD_BYTES
from duplex_sidecar.model.minicpmo45.constants import SAMPLES_PER_POSITION, UNIT_SAMPLES
from duplex_sidecar.model.minicpmo45.context import (
    SessionContext,
    build_context,
    layout_ids_of,
)
from duplex_sidecar.model.minicpmo45.decode import GREEDY_SAMPLING, Sampling, initial_state
from duplex_sidecar.model.minicpmo45.framing import reserve_append
from duplex_sidecar.session.conversation import Conversation, first_conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.model import DEFAULT_VOICE, ServedModel
from duplex_sidecar.window.parts import PromptContext
from duplex_sidecar.window.policy import policy_of
from duplex_sidecar.window.state import PlanLimits, WindowLayout

ROOM_TO_ANSWER_TOKENS = 1
"""What an admission leaves free behind the unit."""
_OTHER_FIELDS_BYTES = 16 * 1024
"""Of an opening record: everything but the prompt, which is far less."""


@dataclass(frozen=True)
class SessionTerms:
    """Terms that a session keeps for life, beside its `SessionFacts`."""

    voice: str
    camera: ResolvedCamera
    lifecycle: ResolvedLifecycle


def opening_of(
    session: str, resolved: ResolvedSession, model: ServedModel, traceparent: str
) -> tuple[OpeningDraft, Conversation]:
    """The opening record and the state before unit 1."""
    context = _context_of(resolved, model)
    prompt = context.prompt
    seed = resolved.sampling.seed
    draft = OpeningDraft(
        session=session,
        checkpoint=model.fingerprint,
        parts=_parts(prompt),
        voice=voice_of(resolved),
        window=_raw(resolved.window),
        sampling=_raw(resolved.sampling),
        output=_raw(resolved.camera),
        limits=_raw(resolved.lifecycle),
        seed=secrets.randbits(48) if seed is None else seed,
        traceparent=traceparent,
    )
    policy = initial_state(seeded_text=context.opens_response)
    return draft, first_conversation(policy, NEW_FRAMER)


def _context_of(resolved: ResolvedSession, model: ServedModel) -> SessionContext:
    return build_context(
        resolved.prompt,
        _reference_samples(resolved, model),
        resolved.initial_text,
        model.encode,
        model.vocabulary.special_ids,
    )


def _parts(prompt: PromptContext) -> tuple[PromptPart, ...]:
    """Prefix, suffix, marker, and behind them the rows of the reference voice if there are any."""
    ids = (prompt.prefix_ids, prompt.suffix_ids, prompt.marker_ids)
    texts = tuple(PromptIds(each) for each in ids)
    if not prompt.reference_positions:
        return texts
    return (*texts, PromptRows(blob=0, rows=prompt.reference_positions))


def _reference_samples(resolved: ResolvedSession, model: ServedModel) -> int | None:
    """Of the clip that stands in the prompt: that of a voice which the session names. One that
    names none has the model's own voice, and nothing of it in the prompt."""
    if resolved.voice is None:
        return None
    samples = model.reference_samples(voice_of(resolved))
    return samples if samples >= SAMPLES_PER_POSITION else None


def reference_positions(opening: Opening | OpeningDraft) -> int:
    """Positions of the reference voice in the session's prompt."""
    return sum(part.rows for part in opening.parts if isinstance(part, PromptRows))


def voice_of(resolved: ResolvedSession) -> str:
    """Name of the voice file; a Secret's or ConfigMap's voice has got one from the operator."""
    return resolved.voice.name if resolved.voice and resolved.voice.name else DEFAULT_VOICE


def resolve_served(
    manifest: DuplexSession, pool: PoolSpec | None, model: ServedModel
) -> ResolvedSession:
    """Raises WindowConfigError, UnknownPresetError and UnservedManifestError."""
    limits = WindowLimits(max_model_tokens=model.max_model_tokens)
    resolved = resolve_session(manifest.spec, pool, limits)
    require_served(resolved, model)
    return resolved


def require_both_modalities(resolved: ResolvedSession) -> None:
    """Of a session that begins: what is under way was let in by an earlier release, and spoke.
    Raises UnservedManifestError."""
    if set(resolved.output.modalities) != set(Modality):
        problem = Problem("spec.output.modalities", BOTH_MODALITIES, "[audio, text]")
        raise UnservedManifestError((problem,))


def require_served(resolved: ResolvedSession, model: ServedModel) -> None:
    """Raises UnservedManifestError, with paths, for what the contract allows and this sidecar can't
    serve (yet)."""
    problems: list[Problem] = []
    voice = voice_of(resolved)
    if resolved.voice is not None and resolved.voice.name is None:
        problems.append(
            Problem("spec.voice", "voices of Secrets and ConfigMaps need an operator", "name")
        )
    elif not model.has_voice(voice):
        known = ", ".join(sorted(model.voices))
        problems.append(Problem("spec.voice.name", f"the checkpoint has no voice {voice!r}", known))
    if resolved.window.strategy is not WindowStrategy.REPREFILL:
        problems.append(
            Problem("spec.window.strategy", "shift is not served", WindowStrategy.REPREFILL)
        )
    if not problems:
        problems += _context_problems(resolved, model)
    if problems:
        raise UnservedManifestError(tuple(problems))


def _context_problems(resolved: ResolvedSession, model: ServedModel) -> Iterator[Problem]:
    """What makes the context too long for the model with one unit behind it, or for the record of
    the opening."""
    context = _context_of(resolved, model)
    tokens = context.window.context_tokens
    unit = reserve_append(1, UNIT_SAMPLES, (), 0).slots + ROOM_TO_ANSWER_TOKENS
    fit = model.max_model_tokens - unit
    recorded_bytes = len(msgspec.json.encode(_parts(context.prompt)))
    room_bytes = MAX_RECORD_BYTES - _OTHER_FIELDS_BYTES
    if recorded_bytes > room_bytes:
        fit = min(fit, tokens * room_bytes // recorded_bytes)
    if tokens <= fit:
        return
    seeded = len(resolved.initial_text or "") > len(resolved.prompt or "")
    yield Problem(
        "spec.initialText" if seeded else "spec.prompt",
        f"makes a context of {tokens} tokens (prompt, initialText and voice together)",
        f"at most {max(0, fit)} tokens",
    )


def differs_from(opening: Opening, resolved: ResolvedSession, model: ServedModel) -> str | None:
    """The first term in which a manifest asks for something else than the session was opened with;
    None when a session opened with it would be the same one."""
    asked, _ = opening_of(opening.session, resolved, model, opening.traceparent)
    for name in ("voice", "parts", "window", "sampling", "output"):
        if getattr(opening, name) != getattr(asked, name):
            return _MANIFEST_WORDS.get(name, name)
    return None


_MANIFEST_WORDS = {"parts": "prompt", "output": "camera"}


class UnservedManifestError(ValueError):
    """The manifest is valid, but asks for what this sidecar does not serve."""

    code = "unserved_manifest"

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


def facts_of(opening: Opening | OpeningDraft, model: ServedModel) -> SessionFacts:
    """What the units read, out of the opening record."""
    prefix, suffix, marker = (part.ids for part in opening.parts if isinstance(part, PromptIds))
    window = msgspec.json.decode(opening.window, type=ResolvedWindow)
    reference = reference_positions(opening)
    return SessionFacts(
        session=opening.session,
        seed=opening.seed,
        prompt=PromptContext(
            prefix_ids=prefix, reference_positions=reference, suffix_ids=suffix, marker_ids=marker
        ),
        layout=WindowLayout(
            context_tokens=len(prefix) + reference + len(suffix),
            prefix_tokens=len(prefix) + reference,
            suffix_tokens=len(suffix),
            marker_tokens=len(marker),
            special_ids=model.vocabulary.special_ids,
        ),
        policy=policy_of(window),
        limits=PlanLimits(max_model_tokens=model.max_model_tokens),
        hysteresis_units=window.hysteresis_units,
        boundary=window.boundary,
        layout_ids=layout_ids_of(model.vocabulary.control_ids, None),
        sampling=_sampling(msgspec.json.decode(opening.sampling, type=ResolvedSampling)),
        vocabulary=model.vocabulary,
        bench_script=model.bench_script,
    )


def terms_of(opening: Opening | OpeningDraft) -> SessionTerms:
    return SessionTerms(
        voice=opening.voice,
        camera=msgspec.json.decode(opening.output, type=ResolvedCamera),
        lifecycle=msgspec.json.decode(opening.limits, type=ResolvedLifecycle),
    )


def _sampling(resolved: ResolvedSampling) -> Sampling:
    if resolved.greedy:
        return GREEDY_SAMPLING
    return Sampling(
        greedy=False,
        temperature=resolved.temperature,
        top_k=resolved.top_k,
        top_p=resolved.top_p,
    )


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
