"""What a client hears too late, and what was rebuilt, told from the events that leave."""

import pytest

from duplex_sidecar.protocol.events import (
    Audio,
    Decision,
    Sequenced,
    SequencedBody,
    TurnMark,
    TurnStep,
    UnitDone,
)
from duplex_sidecar.session.quality import PLAYER_BUFFER_S, LastRebuild, SessionQuality

pytestmark = pytest.mark.unit


class Heard:
    def __init__(self) -> None:
        self.quality = SessionQuality(lambda: "a" * 32)

    def at(self, now_s: float, body: SequencedBody) -> None:
        self.quality.saw(Sequenced(1, body), now_s)


def sound(seconds: float) -> Audio:
    return Audio(1, 1, 0, 0, 0, bytes(2 * round(24_000 * seconds)))


def turn_starts() -> TurnMark:
    return TurnMark(TurnStep.STARTED, 1, 1, 0, "")


def done(wall_ms: float = 100.0, cause: str | None = None) -> UnitDone:
    return UnitDone(
        unit=1,
        turn=1,
        decision=Decision.SPEAK,
        tokens=1,
        window_tokens=1,
        rebuild_cause=cause,
        rebuild_ms=12.5 if cause else None,
        dropped_units=0,
        head=1,
        epoch=0,
        stage2_sequence=None,
        audio_samples=0,
        wall_ms=wall_ms,
        stage_ms={},
        replica="one",
    )


def test_sound_in_time_is_no_underrun() -> None:
    heard = Heard()
    heard.at(10.0, turn_starts())
    heard.at(10.0, sound(1.0))
    heard.at(11.0 + PLAYER_BUFFER_S, sound(1.0))
    assert heard.quality.underruns == 0


def test_sound_that_comes_late_is_counted_once_and_moves_what_follows() -> None:
    heard = Heard()
    heard.at(10.0, turn_starts())
    heard.at(10.0, sound(1.0))
    heard.at(11.5 + PLAYER_BUFFER_S, sound(1.0))
    heard.at(12.5 + PLAYER_BUFFER_S, sound(1.0))
    assert (heard.quality.underruns, heard.quality.longest_gap_ms) == (1, 500)


def test_silence_between_turns_is_none() -> None:
    heard = Heard()
    heard.at(10.0, turn_starts())
    heard.at(10.0, sound(1.0))
    heard.at(60.0, turn_starts())
    heard.at(60.0, sound(1.0))
    assert heard.quality.underruns == 0


def test_rebuilds_and_pace() -> None:
    heard = Heard()
    heard.at(1.0, done())
    assert (heard.quality.rebuilds, heard.quality.last_rebuild) == (0, None)
    heard.at(2.0, done(wall_ms=1001.0, cause="move"))
    assert heard.quality.last_rebuild == LastRebuild("move", 12.5, "a" * 32)
    assert (heard.quality.rebuilds, heard.quality.keeping_pace) == (1, False)
    heard.at(3.0, done())
    assert heard.quality.keeping_pace
