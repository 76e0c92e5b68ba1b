"""Which sessions are traced: all of a session's traces, or none, on whichever replica it runs."""

import hashlib
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from duplex_sidecar.telemetry import names

_HASH_BYTES = 8


def is_traced(session: str, ratio: float) -> bool:
    """The same answer everywhere. Of many sessions, `ratio` are traced."""
    digest = hashlib.sha256(session.encode()).digest()[:_HASH_BYTES]
    return int.from_bytes(digest) < ratio * 2 ** (8 * _HASH_BYTES)


class SessionSampler(Sampler):
    """For roots, by their session's id; whatever is below follows its root (`ParentBased`). By the
    trace's id each segment of a conversation would be drawn for by itself."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        session = str((attributes or {}).get(names.SESSION_ID, ""))
        taken = is_traced(session, self._ratio)
        decision = Decision.RECORD_AND_SAMPLE if taken else Decision.DROP
        return SamplingResult(decision, attributes if taken else None, trace_state)

    def get_description(self) -> str:
        return f"SessionSampler{{{self._ratio}}}"
