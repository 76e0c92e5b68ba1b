"""Spans of made-up units, for tests of what becomes of them."""

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.traces import SessionTrace


def speak_units(session: SessionTrace, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        with session.unit(seq, 0, 1_000.0) as unit:
            for name in names.StepName:
                with unit.step(name):
                    pass
            cause = names.RebuildCause.SLIDE
            with session.rebuild(seq, "context", cause, 1, 13, 200, 30.0, unit):
                pass
            session.stage2_epoch(seq, names.EpochCause.TURN_END, unit)
