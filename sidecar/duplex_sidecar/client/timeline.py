"""The picture of a conversation: what was heard and said, window, rebuilds, epochs, the kill."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from duplex_sidecar.client.conversation import OUTPUT_RATE_HZ, SAMPLE_RATE_HZ, Talk, lay_out_replies

_INPUT, _OUTPUT, _WINDOW = "#4c72b0", "#dd8452", "#55a868"
_CAUSES = {
    "slide": "#8172b3",
    "replica_restart": "#c44e52",
    "engine_restart": "#c44e52",
    "eviction": "#937860",
    "move": "#da8bc3",
    "truncation": "#8c8c8c",
}


def draw_timeline(path: Path, talk: Talk, input_pcm_s16le: bytes, killed_after: int | None) -> None:
    """Write a PNG. `killed_after`: last unit finished before the kill, None when there was none."""
    figure, (sound, window, latency) = plt.subplots(
        3, 1, figsize=(14, 8), sharex=True, height_ratios=(2, 2, 1.4), layout="constrained"
    )
    _draw_sound(sound, talk, input_pcm_s16le)
    _draw_window(window, talk.units)
    _draw_latency(latency, talk.units)
    if killed_after is not None:
        for axes in (sound, window, latency):
            axes.axvline(killed_after, color="black", linestyle="--", linewidth=1.4)
        sound.text(
            killed_after,
            1.04,
            f" sidecar killed, resumed on another after {talk.away_s():.0f} s",
            transform=sound.get_xaxis_transform(),
        )
    rebuilds = sum(1 for unit in talk.units if unit["rebuild_cause"])
    spoken = sum(1 for unit in talk.units if unit["decision"] == "speak")
    figure.suptitle(
        f"{len(talk.units)} units, {spoken} spoken, {len(talk.transcript)} turns, "
        f"{rebuilds} rebuilds",
        fontsize=13,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _envelope(pcm_s16le: bytes, rate_hz: int) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, peak) per 20 ms."""
    samples = np.frombuffer(pcm_s16le, dtype="<i2").astype(np.float32)
    step = rate_hz // 50
    usable = len(samples) // step * step
    peaks = np.abs(samples[:usable]).reshape(-1, step).max(axis=1) if usable else np.zeros(0)
    top = float(peaks.max()) if len(peaks) and peaks.max() > 0 else 1.0
    return np.arange(len(peaks)) / 50, peaks / top


def _legend(axes: Axes) -> None:
    """Beside the data, which goes up to the right edge."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def epoch_starts(units: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """(unit, epoch) of every unit with sound whose epoch is not that of the sound before it. Of
    `duplex.unit` events, whose `stage2_sequence` is that of a unit's last chunk."""
    starts: list[tuple[int, int]] = []
    for unit in units:
        if unit["stage2_sequence"] is None:
            continue
        if not starts or starts[-1][1] != unit["epoch"]:
            starts.append((unit["unit"], unit["epoch"]))
    return starts


def _draw_sound(axes: Axes, talk: Talk, input_pcm_s16le: bytes) -> None:
    seconds, peaks = _envelope(input_pcm_s16le, SAMPLE_RATE_HZ)
    axes.fill_between(seconds, 0, peaks, color=_INPUT, linewidth=0, label="speech in")
    seconds, peaks = _envelope(lay_out_replies(talk.replies), OUTPUT_RATE_HZ)
    axes.fill_between(seconds, 0, -peaks, color=_OUTPUT, linewidth=0, label="speech out")
    for number, epoch in epoch_starts(talk.units):
        axes.axvline(number, ymax=0.5, color=_OUTPUT, linewidth=0.8, alpha=0.7)
        axes.text(number, -1.0, f" epoch {epoch}", fontsize=7, rotation=90)
    axes.set_ylim(-1.1, 1.1)
    axes.set_yticks([])
    axes.set_ylabel("sound")
    _legend(axes)


def _draw_window(axes: Axes, units: list[dict[str, Any]]) -> None:
    numbers = [unit["unit"] for unit in units]
    axes.step(numbers, [unit["window_tokens"] for unit in units], where="post", color=_WINDOW)
    axes.set_ylabel("tokens in window")
    seen: set[str] = set()
    for unit in units:
        cause = unit["rebuild_cause"]
        if cause:
            axes.plot(
                unit["unit"],
                unit["window_tokens"],
                marker="v" if cause == "slide" else "D",
                markersize=5 if cause == "slide" else 9,
                color=_CAUSES.get(cause, "black"),
                linestyle="none",
                label=None if cause in seen else f"rebuild: {cause}",
            )
            seen.add(cause)
    if seen:
        _legend(axes)
    axes.grid(axis="y", alpha=0.3)


def _draw_latency(axes: Axes, units: list[dict[str, Any]]) -> None:
    for decision, color in (("listen", _INPUT), ("speak", _OUTPUT)):
        chosen = [unit for unit in units if unit["decision"] == decision]
        axes.bar(
            [unit["unit"] for unit in chosen],
            [unit["wall_ms"] for unit in chosen],
            color=color,
            label=decision,
        )
    axes.axhline(1_000, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylabel("ms a unit")
    axes.set_xlabel("seconds of conversation = units")
    _legend(axes)
