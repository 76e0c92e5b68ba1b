"""One session, unit by unit: wall times, stages, rebuilds, and what lies outside the stages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from duplex_sidecar.client.local_sidecar import LocalSidecar
from tests.bench.client import STAGES, Seen
from tests.bench.figures import Figure
from tests.bench.rig import Rig, Scenario
from tests.bench.scenarios import (
    BASIC,
    CAMERA_BASIC,
    CAMERA_CONTEXT,
    CONTEXT,
    CONTEXT_LONG,
    IDLE_S,
    OFF,
    Run,
    converse,
)
from tests.bench.stats import fit_line, percentile, spread

UNIT_MS = 1000.0
UNIT_CODES_SAMPLES = (20_000, 24_000)
"""Sound of 25 codes: one second, less what a turn's first chunk holds back. Fewer were cut short; a
turn's last unit may bring several seconds at once."""
LONG_UNITS = 120
QUICK_UNITS = 60
WARM_UP_UNITS = 3
"""The first ones open streams and fill caches; only the slowest unit counts them too."""
LISTEN_OFF_MS = 80.0
LISTEN_CONTEXT_MS = 300.0
SPEAK_OFF_MS = 250.0
OUTSIDE_CPU_MS = 5.0
SHARE_OF_FULL = 0.9
"""A context window counts as full from this share of its longest prompt on."""

SERVED = (OFF, CONTEXT, CONTEXT_LONG)
REBUILT = (CONTEXT, CONTEXT_LONG, BASIC, CAMERA_BASIC, CAMERA_CONTEXT)
WAITING = "nothing ahead"
"""In names: of a sidecar that opens no stream ahead, so that each unit waits for its rebuild."""


def measure_units(rig: Rig, sidecar: LocalSidecar) -> tuple[list[Figure], dict[str, object]]:
    """Raises Broken, SidecarFailed."""
    served = _converse_all(rig, sidecar, SERVED)
    plain, _ = rig.start_sidecar("plain", rebuild_ahead=False)
    rebuilt = _converse_all(rig, plain, REBUILT)
    plain.stop()
    off, context = served[OFF.name], served[CONTEXT.name]
    figures = [*_off(off)]
    for scenario in (CONTEXT, CONTEXT_LONG):
        figures += _context(scenario.name, served[scenario.name])
        figures += _context(f"{scenario.name}, {WAITING}", rebuilt[scenario.name])
    for scenario in (BASIC, CAMERA_BASIC, CAMERA_CONTEXT):
        figures += _reported(f"{scenario.name}, {WAITING}", rebuilt[scenario.name])
    figures += _ratios(off, rebuilt)
    figures += [*_outside(off), *_outside(context)]
    data: dict[str, object] = {name: as_data(run) for name, run in served.items()}
    data[WAITING] = {name: as_data(run) for name, run in rebuilt.items()}
    return figures, data


def _converse_all(rig: Rig, sidecar: LocalSidecar, scenarios: Sequence[Scenario]) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for scenario in scenarios:
        units = LONG_UNITS if scenario is CONTEXT_LONG or not rig.quick else QUICK_UNITS
        idle_s = IDLE_S if scenario in (OFF, CONTEXT) else 0.0
        runs[scenario.name] = converse(rig, sidecar, scenario, units, idle_s=idle_s)
    return runs


def _off(run: Run) -> list[Figure]:
    listens = _steady(run, listens_only)
    speaks = _steady(run, speaks_whole)
    return [
        _p50("off: listening unit, client's wall", _client(listens), LISTEN_OFF_MS),
        _p95("off: listening unit, client's wall", _client(listens)),
        _p50("off: listening unit, server's wall", [one.server_ms for one in listens]),
        _p50("off: speaking unit (25 codes), client's wall", _client(speaks), SPEAK_OFF_MS),
        _p95("off: speaking unit (25 codes), client's wall", _client(speaks)),
        _p50("off: speaking unit (25 codes), server's wall", [one.server_ms for one in speaks]),
        *_stages("off: listening unit", listens),
        *_stages("off: speaking unit", speaks),
    ]


def _context(name: str, run: Run) -> list[Figure]:
    full = rebuilt_full(run.seen)
    listens = [one for one in full if listens_only(one)]
    slowest = max(one.client_ms for one in run.seen)
    tokens = percentile([float(one.window_tokens) for one in full], 0.5) if full else 0.0
    window = f"{tokens:.0f} tokens in the window"
    return [
        _p50(f"{name} full: listening unit, client's wall", _client(listens), LISTEN_CONTEXT_MS),
        _p95(f"{name} full: listening unit, client's wall", _client(listens)),
        _p50(f"{name} full: listening unit, server's wall", [one.server_ms for one in listens]),
        _p50(f"{name} full: waited for the rebuild", _rebuilds(full), note=window),
        *_stages(f"{name} full: listening unit", listens),
        Figure(
            f"{name}: slowest of {len(run.seen)} units, client's wall",
            slowest,
            "ms",
            UNIT_MS,
            "never slower than real time",
        ),
    ]


def _reported(name: str, run: Run) -> list[Figure]:
    rebuilt = [one for one in run.seen if one.rebuild_ms is not None]
    extended = [one for one in run.seen[WARM_UP_UNITS:] if one.rebuild_ms is None]
    tokens = [float(one.window_tokens) for one in rebuilt]
    window = f"{percentile(tokens, 0.5):.0f} tokens at the median" if tokens else ""
    return [
        _p50(f"{name}: unit without rebuild, client's wall", _client(extended)),
        _p50(f"{name}: unit with rebuild, client's wall", _client(rebuilt)),
        _p95(f"{name}: unit with rebuild, client's wall", _client(rebuilt)),
        _p50(f"{name}: rebuild", _rebuilds(rebuilt), note=window),
        Figure(f"{name}: slowest unit", max(one.client_ms for one in run.seen), "ms"),
    ]


def _ratios(off: Run, rebuilt: Mapping[str, Run]) -> list[Figure]:
    """Figures that a busy machine does not move much. rebuilt: with nothing made ahead."""
    listens = _client(_steady(off, listens_only))
    speaks = _client(_steady(off, speaks_whole))
    context = rebuilt[CONTEXT.name]
    full = _client([one for one in rebuilt_full(context.seen) if listens_only(one)])
    slides = [one for run in rebuilt.values() for one in run.seen if one.rebuild_ms is not None]
    line = fit_line([one.window_tokens / 1000 for one in slides], _rebuilds(slides))
    everything = off.seen[WARM_UP_UNITS:] + context.seen[WARM_UP_UNITS:]
    outside = [max(0.0, one.client_ms - one.stages_ms) for one in everything]
    shares = [over / one.client_ms * 100 for over, one in zip(outside, everything, strict=True)]
    return [
        Figure(f"context full, {WAITING} / off, listening units", _ratio(full, listens), "x"),
        Figure("speaking / listening unit in off", _ratio(speaks, listens), "x"),
        Figure(
            "rebuild, each 1,000 tokens",
            line.slope if line else None,
            "ms",
            note=f"{line.low:.0f} to {line.high:.0f}, from {line.count} rebuilds" if line else "",
        ),
        _p50("wall outside the stages", outside, note="client's wall less the four stages"),
        Figure("share of the wall outside the stages, p50", _middle(shares), "%"),
    ]


def _outside(run: Run) -> list[Figure]:
    """Processor time of the sidecar's own process: all that is not in a stage's process."""
    name, units, cost = run.scenario.name, len(run.seen), run.cost
    other_threads = cost.sidecar_ms - cost.main_thread_ms
    stages = sum(ms for role, ms in cost.by_role_ms.items() if role != "sidecar")
    return [
        Figure(
            f"{name}: sidecar's own CPU a unit",
            cost.sidecar_ms / units,
            "ms",
            OUTSIDE_CPU_MS,
            f"main thread {cost.main_thread_ms / units:.2f}, others {other_threads / units:.2f}",
        ),
        Figure(f"{name}: sidecar's CPU while idle, each second", cost.idle_ms_a_second, "ms"),
        Figure(f"{name}: CPU of the stages a unit", stages / units, "ms"),
        Figure(f"{name}: ledger server's CPU a unit", cost.ledger_ms / units, "ms"),
    ]


def listens_only(one: Seen) -> bool:
    """It decided to listen, and no sound of an earlier turn left with it."""
    return one.decision == "listen" and one.audio_samples == 0


def speaks_whole(one: Seen) -> bool:
    """It spoke, and the Talker gave a unit's 25 codes."""
    least, most = UNIT_CODES_SAMPLES
    return one.decision == "speak" and least <= one.audio_samples <= most


def rebuilt_full(seen: Sequence[Seen]) -> list[Seen]:
    """Units that a slide rebuilt with the window at its longest."""
    rebuilt = [one for one in seen if one.rebuild_cause == "slide"]
    if not rebuilt:
        return []
    longest = max(one.window_tokens for one in rebuilt)
    return [one for one in rebuilt if one.window_tokens >= SHARE_OF_FULL * longest]


def as_data(run: Run) -> dict[str, object]:
    """For the JSON: every unit in short, and the costs."""
    return {
        "window": run.scenario.window,
        "camera": run.scenario.camera,
        "sessions": run.sessions,
        "decisions": {
            kind: sum(one.decision == kind for one in run.seen) for kind in ("listen", "speak")
        },
        "cost": {
            name: _rounded(value) if isinstance(value, dict) else round(value, 2)
            for name, value in asdict(run.cost).items()
        },
        "columns": [
            "unit",
            "decision",
            "client_ms",
            "first_audio_ms",
            "server_ms",
            *STAGES,
            "rebuild_ms",
            "window_tokens",
            "tokens",
            "audio_samples",
        ],
        "units": [_row(one) for one in run.seen],
    }


def _row(one: Seen) -> list[object]:
    return [
        one.unit,
        one.decision,
        round(one.client_ms, 1),
        None if one.first_audio_ms is None else round(one.first_audio_ms, 1),
        round(one.server_ms, 1),
        *(round(one.stage_ms.get(stage, 0.0), 1) for stage in STAGES),
        None if one.rebuild_ms is None else round(one.rebuild_ms, 1),
        one.window_tokens,
        one.tokens,
        one.audio_samples,
    ]


def _rounded(table: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in table.items()}


def _steady(run: Run, kind: Callable[[Seen], bool]) -> list[Seen]:
    return [one for one in run.seen[WARM_UP_UNITS:] if kind(one)]


def _client(seen: Iterable[Seen]) -> list[float]:
    return [one.client_ms for one in seen]


def _rebuilds(seen: Iterable[Seen]) -> list[float]:
    return [one.rebuild_ms for one in seen if one.rebuild_ms is not None]


def _stages(title: str, seen: Sequence[Seen]) -> list[Figure]:
    names = dict.fromkeys(name for one in seen for name in one.stage_ms)
    return [
        _p50(f"{title}, {name}", [one.stage_ms[name] for one in seen if name in one.stage_ms])
        for name in names
    ]


def _p50(
    name: str, samples: Sequence[float], at_most: float | None = None, note: str = ""
) -> Figure:
    found = spread(samples)
    count = f"n={found.count}" if found else ""
    return Figure(
        f"{name}, p50",
        found.p50 if found else None,
        "ms",
        at_most,
        ", ".join(part for part in (count, note) if part),
    )


def _p95(name: str, samples: Sequence[float]) -> Figure:
    return Figure(f"{name}, p95", percentile(samples, 0.95) if samples else None, "ms")


def _middle(samples: Sequence[float]) -> float | None:
    return percentile(samples, 0.5) if samples else None


def _ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    over, under = _middle(above), _middle(below)
    return None if over is None or not under else over / under
