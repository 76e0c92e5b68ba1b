"""The W3C `traceparent` header as it is kept in the ledger: version 00."""

import re

from opentelemetry.trace import SpanContext, TraceFlags

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)


def format_traceparent(context: SpanContext) -> str:
    """55 characters: `00-<32 hex of the trace>-<16 hex of the span>-<2 hex of flags>`."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parse_traceparent(text: str) -> SpanContext | None:
    """The remote context, or None if `text` is no valid version 00 traceparent."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    context = SpanContext(
        trace_id=int(match[1], 16),
        span_id=int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
    )
    return context if context.is_valid else None
