"""What is fixed when a session opens: everything that its units read and none of them changes."""

from dataclasses import dataclass

from duplex_api.window import WindowBoundary
from duplex_sidecar.model.minicpmo45.decode import Sampling
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.window.parts import LayoutIds, PromptContext
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.state import Directive, PlanLimits, RebuildCause, WindowLayout


@dataclass(frozen=True)
class SessionFacts:
    """seed: names all random draws of the session. hysteresis_units, boundary: of the resolved
    window; they change outputs and are therefore recorded with each plan's directive. bench_script:
    what units emit in turn in a measurement with random weights, else empty."""

    session: str
    seed: int
    prompt: PromptContext
    layout: WindowLayout
    policy: WindowPolicy
    limits: PlanLimits
    hysteresis_units: int
    boundary: WindowBoundary
    layout_ids: LayoutIds
    sampling: Sampling
    vocabulary: Vocabulary
    bench_script: tuple[tuple[int, ...], ...] = ()

    def scripted_ids(self, seq: int) -> tuple[int, ...]:
        """What a unit emits under a bench script; empty: what the model says."""
        return self.bench_script[(seq - 1) % len(self.bench_script)] if self.bench_script else ()

    def directive(self, rebuild: RebuildCause | None) -> Directive:
        """What the planner is told besides the state."""
        return Directive(
            rebuild=rebuild, hysteresis_units=self.hysteresis_units, boundary=self.boundary
        )


class SessionOver(Exception):
    """This session cannot go on; no other one is concerned."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
