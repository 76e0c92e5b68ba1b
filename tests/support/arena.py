"""Two sidecars on one Valkey, to be treated badly. Started without the Valkey, which comes when
their stages are ready: so the start is a test, too."""

import time
from dataclasses import dataclass, field

from support.material import manifest
from support.sidecars import Bed, get

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar

MAX_MODEL_TOKENS = 512
LEDGER_HOLD_S = 5.0
"""A disk that takes its time is no outage."""
STAGES_TIMEOUT_S = 240.0


@dataclass
class Arena:
    """live: names and sidecars; a killed one is replaced when somebody asks for the pair."""

    bed: Bed
    live: dict[str, LocalSidecar] = field(default_factory=dict)
    without_ledger: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Answers of a sidecar whose stages were ready before there was a ledger."""
    refusal: ApiError | None = None
    """What it said to one who wanted a session then."""
    ready_after_ledger_s: float = 0.0
    start_log: str = ""
    """What it had written by then."""
    _started: int = 0

    def pair(self) -> tuple[LocalSidecar, LocalSidecar]:
        """Two sidecars that are ready."""
        for place in ("first", "second"):
            self._ensure(place)
        for sidecar in self.live.values():
            sidecar.wait_ready()
        return self.live["first"], self.live["second"]

    def one(self) -> LocalSidecar:
        """A sidecar that is ready."""
        place = "second" if self._lives("second") and not self._lives("first") else "first"
        self._ensure(place)
        self.live[place].wait_ready()
        return self.live[place]

    def _lives(self, place: str) -> bool:
        sidecar = self.live.get(place)
        return (
            sidecar is not None and sidecar.process is not None and sidecar.process.poll() is None
        )

    def _ensure(self, place: str) -> None:
        if self._lives(place):
            return
        self._started += 1
        self.live[place] = self.bed.prepare(
            f"{place}-{self._started}",
            max_model_tokens=MAX_MODEL_TOKENS,
            ledger_hold_s=LEDGER_HOLD_S,
            slots=6,
        )
        self.live[place].start()

    def start_without_ledger(self) -> None:
        for place in ("first", "second"):
            self._ensure(place)
        first = self.live["first"]
        deadline = time.monotonic() + STAGES_TIMEOUT_S
        while first.readiness() != (False, "ledger: connecting"):
            assert time.monotonic() < deadline, first.log_tail()
            assert first.process is not None
            assert first.process.poll() is None, first.log_tail()
            time.sleep(0.2)
        for path in ("/livez", "/readyz", "/statusz"):
            self.without_ledger[path] = get(first, path)
        try:
            first.open_session("too-early", manifest(), "token")
        except ApiError as error:
            self.refusal = error
        self.bed.valkey.start()
        self.ready_after_ledger_s = first.wait_ready()
        self.start_log = first.log.read_text()
