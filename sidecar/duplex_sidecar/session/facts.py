"""What is fixed when a session opens: everything that its units read and none of them changes."""

from dataclasses import dataclass

from duplex_api.window import WindowBoundary
from duplex_sidecar.model.minicpmo45.decode import Sampling
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.window.parts import LayoutIds, PromptContext
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.state import Directive, PlanLimits, RebuildCause, WindowLayout


@dataclass(frozen=True)
class SessionFacts:
    """seed: names all random draws of the session. hysteresis_units, boundary: of the resolved
    window; they change outputs and are therefore recorded with each plan's directive."""

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

    def directive(self, rebuild: RebuildCause | None) -> Directive:
        """What the planner is told besides the state."""
        return Directive(
            rebuild=rebuild, hysteresis_units=self.hysteresis_units, boundary=self.boundary
        )


class SessionOver(Exception):
    """This session cannot go on; no other one is concerned. `code` is a protocol error code."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
