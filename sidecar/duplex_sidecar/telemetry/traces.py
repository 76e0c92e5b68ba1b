"""Spans of a conversation: one `duplex.unit` a unit, its steps as children, rebuilds and epochs.

A session's spans form traces of at most `segment_units` units. Each trace (segment) hangs from a
`duplex.session` root that ends at once, so that a killed replica leaves no trace without a root,
and links to the segment before. `SessionTrace.traceparent` goes into the ledger with the unit; the
next owner hands it to `Tracing.session(..., before=...)`, which is how a trace continues across a
kill or a move. Parents are passed explicitly: a unit's steps overlap with those of the next unit.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.bounded import finishes_within
from duplex_sidecar.telemetry.sampling import SessionSampler
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traceparent import format_traceparent, parse_traceparent

MAX_CONTENT_CHARACTERS = 2_000
_SCOPE = "duplex"
_WENT_WELL = Status(StatusCode.UNSET)
_LIMITS = SpanLimits(
    max_span_attributes=32,
    max_events=64,
    max_links=4,
    max_event_attributes=16,
    max_span_attribute_length=MAX_CONTENT_CHARACTERS,
    max_attribute_length=MAX_CONTENT_CHARACTERS,
)


def resource_of(settings: TelemetrySettings) -> Resource:
    """What every span and metric of this process says about its origin."""
    return Resource.create(
        {
            names.SERVICE_NAME: settings.service_name,
            names.SERVICE_VERSION: settings.service_version,
            names.SERVICE_INSTANCE_ID: settings.replica,
        }
    )


class Tracing:
    """The tracer of this process. Not global: tests and two replicas in one process do not mix."""

    def __init__(self, settings: TelemetrySettings, processor: SpanProcessor | None = None) -> None:
        """`processor` replaces the exporter (tests). Starts one background thread if there is an
        endpoint, none otherwise."""
        self.settings = settings
        self._provider = TracerProvider(
            resource=resource_of(settings),
            sampler=ParentBased(SessionSampler(settings.trace_sample_ratio)),
            span_limits=_LIMITS,
            shutdown_on_exit=False,
        )
        if processor is None:
            processor = _otlp_processor(settings)
        if processor is not None:
            self._provider.add_span_processor(processor)
        self._processor = processor
        self._ids = RandomIdGenerator()
        self._scope = InstrumentationScope(_SCOPE, settings.service_version)
        self.tracer = self._provider.get_tracer(_SCOPE, settings.service_version)

    def session(
        self, session: str, before: str | None, reason: names.SegmentReason
    ) -> "SessionTrace":
        """Begin (or go on with) the traces of a session. `before`: the traceparent found in the
        ledger, from the previous owner; a malformed one is ignored (no link)."""
        return SessionTrace(self, session, before, reason)

    def record(
        self,
        name: str,
        parent: SpanContext,
        attributes: dict[str, AttributeValue],
        started_ns: int,
        status: Status,
    ) -> None:
        """A span that ends now and is traced if its parent is. There are five of these a unit: made
        finished, they cost a quarter of what the tracer's own take, which guards an open span
        against other threads and against attributes of any kind."""
        if self._processor is None or not parent.trace_flags.sampled:
            return
        context = SpanContext(
            parent.trace_id, self._ids.generate_span_id(), False, parent.trace_flags
        )
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._provider.resource,
                attributes,
                status=status,
                start_time=started_ns,
                end_time=time.time_ns(),
                instrumentation_scope=self._scope,
            )
        )

    def flush(self, timeout_ms: int) -> bool:
        """Export what has ended. False: the collector did not take it in time. Blocks: call it in a
        thread from asyncio."""
        return finishes_within(timeout_ms, self._provider.force_flush, "duplex-trace-flush")

    def close(self, timeout_ms: int) -> bool:
        """Flush and stop. False: gave up after `timeout_ms`; what was queued is lost."""
        return finishes_within(timeout_ms, self._provider.shutdown, "duplex-trace-close")


def _otlp_processor(settings: TelemetrySettings) -> SpanProcessor | None:
    url = settings.signal_url("v1/traces")
    if url is None:
        return None
    return BatchSpanProcessor(
        OTLPSpanExporter(endpoint=url, timeout=settings.export_timeout_ms / 1000),
        max_queue_size=settings.queue_spans,
        schedule_delay_millis=settings.span_delay_ms,
        max_export_batch_size=settings.batch_spans,
        export_timeout_millis=settings.export_timeout_ms,
    )


class SessionTrace:
    """The spans of one session on this replica."""

    def __init__(
        self, tracing: Tracing, session: str, before: str | None, reason: names.SegmentReason
    ) -> None:
        self.session = session
        self._tracing = tracing
        self._units = 0
        self._context: Context
        self.traceparent: str
        """W3C traceparent of the present segment: store it with every unit."""
        self._begin_segment(None if before is None else parse_traceparent(before), reason)

    def _begin_segment(self, before: SpanContext | None, reason: names.SegmentReason) -> None:
        root = self._tracing.tracer.start_span(
            names.SPAN_SESSION,
            context=Context(),
            links=() if before is None else (Link(before),),
            attributes={
                names.SESSION_ID: self.session,
                names.REPLICA: self._tracing.settings.replica,
                names.SEGMENT_REASON: reason,
            },
        )
        root.end()
        self._root = root.get_span_context()
        self._context = set_span_in_context(root, Context())
        self.traceparent = format_traceparent(self._root)

    def unit(self, seq: int, turn: int, audio_ms: float, redo_of: str | None = None) -> "UnitTrace":
        """Span `duplex.unit`. `audio_ms`: input it covers. `redo_of`: traceparent stored with the
        accept record of the first try, when this is a redo (it becomes a link)."""
        if self._units >= self._tracing.settings.segment_units:
            self._begin_segment(self._root, names.SegmentReason.CONTINUED)
            self._units = 0
        self._units += 1
        earlier = None if redo_of is None else parse_traceparent(redo_of)
        span = self._tracing.tracer.start_span(
            names.SPAN_UNIT,
            context=self._context,
            links=() if earlier is None else (Link(earlier),),
            attributes={
                names.SESSION_ID: self.session,
                names.UNIT_SEQ: seq,
                names.UNIT_TURN: turn,
                names.UNIT_AUDIO_MS: audio_ms,
                names.UNIT_REDO: redo_of is not None,
            },
        )
        return UnitTrace(self._tracing, span, self.session, seq)

    def rebuild(
        self,
        seq: int,
        mode: str,
        cause: names.RebuildCause,
        dropped_units: int,
        dropped_tokens: int,
        replacement_tokens: int,
        predicted_ms: float,
        unit: "UnitTrace | None" = None,
        *,
        ahead: bool = False,
    ) -> "TimedSpan":
        """Span `duplex.window.rebuild`, to be used as a context manager around the rebuild; its end
        sets `duplex.rebuild.actual_ms`. `unit`: the unit that waits for it, None for one made ahead
        or at recovery. `seq`: the unit whose prompt it makes. `replacement_tokens`: of the prompt,
        or, with `ahead`, of what is known of it before its append is there."""
        attributes: dict[str, AttributeValue] = {
            names.SESSION_ID: self.session,
            names.UNIT_SEQ: seq,
            names.WINDOW_MODE: mode,
            names.WINDOW_CAUSE: cause,
            names.WINDOW_DROPPED_UNITS: dropped_units,
            names.WINDOW_DROPPED_TOKENS: dropped_tokens,
            names.WINDOW_REPLACEMENT_TOKENS: replacement_tokens,
            names.REBUILD_PREDICTED_MS: predicted_ms,
        }
        if ahead:
            attributes[names.REBUILD_AHEAD] = True
        context = self._context if unit is None else unit.context
        span = self._tracing.tracer.start_span(
            names.SPAN_WINDOW_REBUILD, context=context, attributes=attributes
        )
        return TimedSpan(span, names.REBUILD_ACTUAL_MS)

    def stage2_epoch(
        self, epoch: int, cause: names.EpochCause, unit: "UnitTrace | None" = None
    ) -> None:
        """Event `duplex.stage2.epoch` on the unit's span, or, between units, on a short span."""
        attributes: dict[str, AttributeValue] = {
            names.STAGE2_EPOCH: epoch,
            names.STAGE2_CAUSE: cause,
        }
        if unit is not None:
            unit.event(names.EVENT_STAGE2_EPOCH, attributes)
            return
        span = self._tracing.tracer.start_span(
            names.SPAN_STAGE2_OPEN,
            context=self._context,
            attributes={names.SESSION_ID: self.session},
        )
        span.add_event(names.EVENT_STAGE2_EPOCH, attributes)
        span.end()


class TimedSpan:
    """A span as a context manager. `elapsed_ms` is final after the block; an exception marks the
    span as failed with the exception's type (never its text, which might quote content)."""

    __slots__ = ("_elapsed_name", "_started_s", "elapsed_ms", "span")

    def __init__(self, span: Span, elapsed_name: str | None = None) -> None:
        self.span = span
        self.elapsed_ms = 0.0
        self._elapsed_name = elapsed_name
        self._started_s = time.perf_counter()

    def set(self, name: str, value: AttributeValue) -> None:
        """Set one attribute (a name of `telemetry.names`)."""
        self.span.set_attribute(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.elapsed_ms = (time.perf_counter() - self._started_s) * 1000
        if self._elapsed_name is not None:
            self.span.set_attribute(self._elapsed_name, round(self.elapsed_ms, 3))
        if kind is not None:
            self.span.set_status(Status(StatusCode.ERROR, kind.__name__))
        self.span.end()


class UnitTrace(TimedSpan):
    """The span of one unit; `end` it when its last sound has left (or use it as a block)."""

    __slots__ = ("_tracing", "context", "seq", "session", "traceparent")

    def __init__(self, tracing: Tracing, span: Span, session: str, seq: int) -> None:
        super().__init__(span)
        self._tracing = tracing
        self.session = session
        self.seq = seq
        self.context = set_span_in_context(span, Context())
        self.traceparent = format_traceparent(span.get_span_context())
        """Store it with the accept record: a redo links to it."""

    def step(
        self, name: names.StepName, done: Callable[[names.StepName, float], None] | None = None
    ) -> "Step":
        """A child span: `with unit.step(StepName.ENCODE): ...`. done: called with the step and its
        milliseconds when the block ends without an exception."""
        return Step(self, name, done)

    def record(self, name: names.StepName, started_ns: int, status: Status) -> None:
        """A step that ends now."""
        attributes: dict[str, AttributeValue] = {
            names.SESSION_ID: self.session,
            names.UNIT_SEQ: self.seq,
        }
        self._tracing.record(
            name.value, self.span.get_span_context(), attributes, started_ns, status
        )

    def event(self, name: str, attributes: dict[str, AttributeValue]) -> None:
        """One event (a name of `telemetry.names`) on the unit's span."""
        self.span.add_event(name, attributes)

    def decided(self, decision: names.UnitDecision, tokens: int, window_tokens: int) -> None:
        """What the Thinker answered: tokens of the unit, tokens in the window after it."""
        self.span.set_attribute(names.UNIT_DECISION, decision)
        self.span.set_attribute(names.UNIT_TOKENS, tokens)
        self.span.set_attribute(names.UNIT_WINDOW_TOKENS, window_tokens)

    def stage_fault(self, stage: names.StageName, fault: str) -> None:
        """Event: a stage call of this unit failed (`fault`: a StageFault)."""
        self.event(names.EVENT_STAGE_FAULT, {names.STAGE: stage, names.STAGE_FAULT: fault})

    def encoder_reset(self) -> None:
        """Event: the audio encoder dropped its cache before this unit (contract section G)."""
        self.event(names.EVENT_ENCODER_RESET, {})

    def text(self, text: str) -> None:
        """The model's words, only with `include_content`; cut at 2,000 characters."""
        if self._tracing.settings.include_content:
            self.event(
                names.EVENT_CONTENT_TEXT, {names.CONTENT_TEXT: text[:MAX_CONTENT_CHARACTERS]}
            )

    def end(self, error: BaseException | None = None) -> None:
        """End the span outside of a `with` block."""
        self.__exit__(None if error is None else type(error), error, None)


class Step:
    """One step of a unit as a context manager; as with `TimedSpan`, a failure is told by its
    exception's type only. `elapsed_ms` is final after the block."""

    __slots__ = ("_done", "_name", "_started_ns", "_started_s", "_unit", "elapsed_ms")

    def __init__(
        self,
        unit: UnitTrace,
        name: names.StepName,
        done: Callable[[names.StepName, float], None] | None,
    ) -> None:
        self.elapsed_ms = 0.0
        self._unit = unit
        self._name = name
        self._done = done
        self._started_ns = time.time_ns()
        self._started_s = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.elapsed_ms = (time.perf_counter() - self._started_s) * 1000
        status = _WENT_WELL if kind is None else Status(StatusCode.ERROR, kind.__name__)
        self._unit.record(self._name, self._started_ns, status)
        if kind is None and self._done is not None:
            self._done(self._name, self.elapsed_ms)
