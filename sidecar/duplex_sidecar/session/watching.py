"""Where the time of one unit goes: its span and steps, the metrics, the numbers of `UnitDone`."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import StageName, StepName
from duplex_sidecar.telemetry.traces import Step, UnitTrace

UNIT_MS = 1000.0
"""Input that a unit covers."""

_STAGES = {
    StepName.ENCODE: StageName.ENCODER,
    StepName.THINKER: StageName.THINKER,
    StepName.TALKER: StageName.TALKER,
    StepName.CODE2WAV: StageName.CODE2WAV,
}
_SHORT_NAMES = {
    step: _STAGES[step].value if step in _STAGES else step.value.rsplit(".", 1)[-1]
    for step in StepName
}


class UnitWatch:
    """One unit under way. stage_ms: milliseconds of each step that has ended, by stage or step.
    rebuild_ms: that the unit waited for the Thinker's rebuild, None when its stream was extended.
    rebuild_cost_ms: that the rebuild took, also when it was made ahead and nobody waited."""

    def __init__(
        self, trace: UnitTrace, metrics: Metrics, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self.trace = trace
        self.metrics = metrics
        self.stage_ms: dict[str, float] = {}
        self.rebuild_ms: float | None = None
        self.rebuild_cost_ms: float | None = None
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._begun_s: dict[StepName, float] = {}
        """Of the steps under way."""

    @property
    def wall_ms(self) -> float:
        return (self._clock_s() - self._started_s) * 1000

    @property
    def stage_ms_so_far(self) -> dict[str, float]:
        """`stage_ms`, and of the steps under way what they have taken until now."""
        now_s = self._clock_s()
        begun = {_SHORT_NAMES[step]: (now_s - at) * 1000 for step, at in self._begun_s.items()}
        return self.stage_ms | begun

    @property
    def in_steps(self) -> str:
        """Names of the steps under way, separated by spaces."""
        return " ".join(_SHORT_NAMES[step] for step in self._begun_s)

    def rebuilt(self, elapsed_ms: float) -> None:
        """The unit's prompt was rebuilt while it waited."""
        self.rebuild_ms = self.rebuild_cost_ms = elapsed_ms

    def rebuilt_ahead(self, waited_ms: float, cost_ms: float) -> None:
        """The unit found its prompt rebuilt, or nearly so."""
        self.rebuild_ms, self.rebuild_cost_ms = waited_ms, cost_ms

    @contextmanager
    def step(self, step: StepName) -> Generator[Step]:
        """One step of the unit's way. A step that fails leaves a failed span and no number."""
        self._begun_s[step] = self._clock_s()
        try:
            with self.trace.step(step, self._count) as timed:
                yield timed
        finally:
            self._begun_s.pop(step, None)

    def _count(self, step: StepName, elapsed_ms: float) -> None:
        stage = _STAGES.get(step)
        self.stage_ms[_SHORT_NAMES[step]] = elapsed_ms
        if stage is not None:
            self.metrics.stage_call(stage, elapsed_ms)
