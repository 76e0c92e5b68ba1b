"""Spans of a conversation: their tree, their attributes, and how they go on after a kill."""

from collections import Counter
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traceparent import format_traceparent, parse_traceparent
from duplex_sidecar.telemetry.traces import SessionTrace, Tracing

pytestmark = pytest.mark.unit


class Recorder:
    def __init__(self, **settings: object) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(
            TelemetrySettings(replica="r1", **settings), SimpleSpanProcessor(self.exporter)
        )

    def session(
        self,
        before: str | None = None,
        reason: names.SegmentReason = names.SegmentReason.OPENED,
    ) -> SessionTrace:
        return self.tracing.session("s1", before, reason)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def test_a_unit_has_its_steps_as_children() -> None:
    recorder = Recorder()
    with recorder.session().unit(7, 2, 1_000.0) as unit:
        for name in names.StepName:
            with unit.step(name) as step:
                pass
            assert step.elapsed_ms > 0
        unit.decided(names.UnitDecision.SPEAK, 12, 400)
    (span,) = recorder.named("duplex.unit")
    children = [s for s in recorder.spans if s.parent and s.parent.span_id == span.context.span_id]
    assert [child.name for child in children] == [step.value for step in names.StepName]
    assert dict(span.attributes or {}) == {
        "duplex.session.id": "s1",
        "duplex.unit.seq": 7,
        "duplex.unit.turn": 2,
        "duplex.unit.audio_ms": 1_000.0,
        "duplex.unit.redo": False,
        "duplex.unit.decision": "speak",
        "duplex.unit.tokens": 12,
        "duplex.unit.window_tokens": 400,
    }
    assert all(dict(c.attributes or {})["duplex.unit.seq"] == 7 for c in children)
    resource = span.resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("duplex-sidecar", "r1")


def test_units_may_overlap() -> None:
    recorder = Recorder()
    session = recorder.session()
    first, second = session.unit(1, 0, 1_000.0), session.unit(2, 0, 1_000.0)
    with first.step(names.StepName.TALKER), second.step(names.StepName.ENCODE):
        pass
    second.end()
    first.end()
    (talker,) = recorder.named("duplex.talker")
    assert talker.parent is not None
    assert talker.parent.span_id == first.span.get_span_context().span_id


@pytest.mark.parametrize("cause", list(names.RebuildCause))
def test_a_rebuild_says_why_and_what_it_cost(cause: names.RebuildCause) -> None:
    recorder = Recorder()
    session = recorder.session()
    with (
        session.unit(9, 0, 1_000.0) as unit,
        session.rebuild(9, "context", cause, 2, 26, 310, 31.5, unit) as rebuild,
    ):
        pass
    (span,) = recorder.named("duplex.window.rebuild")
    attributes = dict(span.attributes or {})
    assert attributes.pop("duplex.rebuild.actual_ms") == round(rebuild.elapsed_ms, 3)
    assert attributes == {
        "duplex.session.id": "s1",
        "duplex.unit.seq": 9,
        "duplex.window.mode": "context",
        "duplex.window.cause": cause.value,
        "duplex.window.dropped_units": 2,
        "duplex.window.dropped_tokens": 26,
        "duplex.window.replacement_tokens": 310,
        "duplex.rebuild.predicted_ms": 31.5,
    }
    assert span.parent is not None
    assert span.parent.span_id == unit.span.get_span_context().span_id


def test_a_rebuild_ahead_hangs_from_the_segment() -> None:
    recorder = Recorder()
    session = recorder.session()
    with session.rebuild(3, "basic", names.RebuildCause.SLIDE, 1, 13, 200, 20.0):
        pass
    (rebuild,), (root,) = recorder.named("duplex.window.rebuild"), recorder.named("duplex.session")
    assert rebuild.parent is not None
    assert rebuild.parent.span_id == root.context.span_id
    assert dict(rebuild.attributes or {})["duplex.rebuild.predicted_ms"] == 20.0


def test_an_epoch_is_an_event_of_its_unit_or_a_span_between_units() -> None:
    recorder = Recorder()
    session = recorder.session()
    with session.unit(1, 0, 1_000.0) as unit:
        session.stage2_epoch(4, names.EpochCause.TURN_END, unit)
    session.stage2_epoch(5, names.EpochCause.RECOVERY)
    (with_unit,), (alone,) = recorder.named("duplex.unit"), recorder.named("duplex.stage2.open")
    for span, epoch, cause in ((with_unit, 4, "turn_end"), (alone, 5, "recovery")):
        (event,) = span.events
        assert event.name == "duplex.stage2.epoch"
        assert dict(event.attributes or {}) == {
            "duplex.stage2.epoch": epoch,
            "duplex.stage2.cause": cause,
        }


def test_the_trace_goes_on_after_a_kill() -> None:
    """The ledger keeps the traceparent: the next owner's trace links to the one before, and a unit
    done again links to its first try, which the killed replica may never have exported."""
    before = Recorder()
    killed = before.session()
    lost = killed.unit(30, 0, 1_000.0)
    stored_session, stored_unit = killed.traceparent, lost.traceparent

    after = Recorder()
    resumed = after.session(stored_session, names.SegmentReason.RESUMED)
    with resumed.unit(30, 0, 1_000.0, redo_of=stored_unit):
        pass
    (old_root,) = before.named("duplex.session")
    (new_root,) = after.named("duplex.session")
    (redo,) = after.named("duplex.unit")
    assert [link.context.trace_id for link in new_root.links] == [old_root.context.trace_id]
    assert [link.context.span_id for link in new_root.links] == [old_root.context.span_id]
    assert [format_traceparent(link.context) for link in redo.links] == [stored_unit]
    assert dict(redo.attributes or {})["duplex.unit.redo"] is True
    assert redo.context.trace_id == new_root.context.trace_id != old_root.context.trace_id


def test_a_long_session_is_cut_into_linked_segments() -> None:
    recorder = Recorder(segment_units=3)
    session = recorder.session()
    parents = [session.traceparent]
    for seq in range(1, 8):
        session.unit(seq, 0, 1_000.0).end()
        parents.append(session.traceparent)
    assert len(set(parents)) == 3
    first, second, third = recorder.named("duplex.session")
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert [link.context.span_id for link in third.links] == [second.context.span_id]
    reasons = [dict(r.attributes or {})["duplex.segment.reason"] for r in (first, second, third)]
    assert reasons == ["opened", "continued", "continued"]
    units = recorder.named("duplex.unit")
    assert [unit.context.trace_id for unit in units].count(first.context.trace_id) == 3


def test_content_stays_out_unless_it_is_switched_on() -> None:
    for switched_on in (False, True):
        recorder = Recorder(include_content=switched_on)
        with recorder.session().unit(1, 0, 1_000.0) as unit:
            unit.text("what was said " * 1_000)
        (span,) = recorder.named("duplex.unit")
        texts = [dict(e.attributes or {})["duplex.content.text"] for e in span.events]
        assert [len(text) for text in texts] == ([2_000] if switched_on else [])


def test_a_failure_is_told_by_its_type_only() -> None:
    recorder = Recorder()
    unit = recorder.session().unit(1, 0, 1_000.0)
    with pytest.raises(ValueError, match="secret"), unit.step(names.StepName.THINKER):
        raise ValueError("secret words")
    unit.stage_fault(names.StageName.THINKER, "gone")
    unit.encoder_reset()
    unit.end(RuntimeError("secret words"))
    (step,), (span,) = recorder.named("duplex.thinker"), recorder.named("duplex.unit")
    assert (step.status.status_code, step.status.description) == (StatusCode.ERROR, "ValueError")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "RuntimeError")
    assert [event.name for event in span.events] == ["duplex.stage.fault", "duplex.encoder.reset"]
    assert "secret" not in "".join(span.to_json() for span in recorder.spans)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-0-0-01",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "01-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01\n",
        "x" * 10_000,
    ],
)
def test_a_malformed_traceparent_is_no_link(text: str) -> None:
    assert parse_traceparent(text) is None
    recorder = Recorder()
    recorder.session(text)
    (root,) = recorder.named("duplex.session")
    assert list(root.links) == []


def test_a_traceparent_is_read_as_it_was_written() -> None:
    text = "00-" + "1f" * 16 + "-" + "2e" * 8 + "-01"
    context = parse_traceparent(text)
    assert context is not None
    assert context.is_remote
    assert format_traceparent(context) == text


def test_a_session_is_traced_whole_or_not_at_all() -> None:
    """Over several segments and replicas; of many sessions, the part that was asked for."""
    traced: list[set[str]] = []
    for _ in range(2):
        recorder = Recorder(trace_sample_ratio=0.25, segment_units=2)
        for number in range(400):
            name = f"session-{number}"
            session = recorder.tracing.session(name, None, names.SegmentReason.OPENED)
            for seq in range(5):
                with session.unit(seq, 1, 1_000.0) as unit, unit.step(names.StepName.ENCODE):
                    pass
        counts = Counter(str((s.attributes or {})[names.SESSION_ID]) for s in recorder.spans)
        assert set(counts.values()) == {3 + 5 + 5}
        traced.append(set(counts))
    assert traced[0] == traced[1]
    assert 70 <= len(traced[0]) <= 130


@pytest.mark.parametrize(("ratio", "spans"), [(0.0, 0), (1.0, 2)])
def test_none_or_all_are_traced(ratio: float, spans: int) -> None:
    recorder = Recorder(trace_sample_ratio=ratio)
    session = recorder.session()
    with session.unit(1, 1, 1_000.0):
        pass
    assert len(recorder.spans) == spans
    assert parse_traceparent(session.traceparent) is not None
