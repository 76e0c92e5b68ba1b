"""The picture of a conversation: where epochs begin, and nothing lies on the data."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from duplex_sidecar.client import timeline
from duplex_sidecar.client.conversation import Talk
from duplex_sidecar.client.timeline import draw_timeline, epoch_starts

pytestmark = pytest.mark.unit


def unit(number: int, epoch: int, last_chunk: int | None, replica: str = "one") -> dict[str, Any]:
    return {
        "unit": number,
        "decision": "listen" if last_chunk is None else "speak",
        "epoch": epoch,
        "stage2_sequence": last_chunk,
        "wall_ms": 80.0,
        "window_tokens": 100,
        "rebuild_cause": "slide" if number % 2 else None,
        "replica": replica,
    }


UNITS = [
    unit(1, 0, None),
    unit(2, 0, 2),
    unit(3, 0, 4),
    unit(4, 1, None),
    unit(5, 1, 1),
    unit(6, 2, 5, "two"),
    unit(7, 2, None, "two"),
    unit(8, 2, 6, "two"),
]


def test_an_epoch_begins_where_the_sound_before_was_of_another() -> None:
    """A unit tells the number of its last chunk, which is hardly ever 0."""
    assert epoch_starts(UNITS) == [(2, 0), (5, 1), (6, 2)]
    assert epoch_starts([]) == []


def test_the_picture_marks_epochs_and_the_outage_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(timeline.plt, "close", drawn.append)
    talk = Talk(units=UNITS, done_at_s={each["unit"]: 1.0 * each["unit"] for each in UNITS})
    talk.done_at_s |= {6: 91.0, 7: 92.0, 8: 93.0}
    with mpl.rc_context():
        draw_timeline(tmp_path / "timeline.png", talk, bytes(2 * 16_000 * len(UNITS)), 5)
    (figure,) = drawn
    sound = figure.axes[0]
    told = [text.get_text().strip() for text in sound.texts]
    assert told[:3] == ["epoch 0", "epoch 1", "epoch 2"]
    assert told[3] == "sidecar killed, resumed on another after 86 s"
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    monkeypatch.undo()
    plt.close(figure)
