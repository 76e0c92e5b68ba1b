"""The kinds of session that are measured, and one conversation of a kind on a running sidecar."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from duplex_sidecar.client.local_sidecar import LocalSidecar
from tests.bench.client import Seen, UnitClient, script
from tests.bench.processes import cpu_by_role, cpu_s, main_thread_cpu_s
from tests.bench.rig import Rig, Scenario, root_process

OFF = Scenario("off", {"mode": "off"})
CONTEXT = Scenario("context", {"mode": "context"})
"""The defaults: 24 units whole, 500 tokens of earlier replies."""
CONTEXT_LONG = Scenario("context-80", {"mode": "context", "contextMaxUnits": 80})
"""About 1,300 positions, near the longest of the proofs' figures."""
BASIC = Scenario(
    "basic", {"mode": "basic", "basicWindowHighTokens": 700, "basicWindowLowTokens": 400}
)
CAMERA_BASIC = Scenario(
    "camera-basic",
    {"mode": "basic", "basicWindowHighTokens": 1600, "basicWindowLowTokens": 1200},
    camera=True,
)
"""As in the example with the camera."""
CAMERA_CONTEXT = Scenario("camera-context", CONTEXT.window, camera=True)

ROLL_OVER_TOKENS = 7_000
"""`off` grows up to the model's length; a new session goes on before that."""
IDLE_S = 5.0


@dataclass(frozen=True)
class Cost:
    """Processor time in ms: of the sidecar's own process, of its main thread, of each role of the
    tree, of the ledger's server. idle_ms_a_second: the sidecar's with a client that says
    nothing."""

    sidecar_ms: float
    main_thread_ms: float
    by_role_ms: dict[str, float]
    ledger_ms: float
    wall_s: float
    idle_ms_a_second: float


@dataclass(frozen=True)
class Run:
    """A finished conversation. sessions: how many it took (see ROLL_OVER_TOKENS). retained_units,
    retained_row_bytes: what the sidecar kept of the window at the end of each, the most of them."""

    scenario: Scenario
    seen: list[Seen]
    cost: Cost
    sessions: int
    retained_units: int
    retained_row_bytes: int


OnUnit = Callable[[int, int], None]


def converse(
    rig: Rig,
    sidecar: LocalSidecar,
    scenario: Scenario,
    units: int,
    *,
    on_unit: OnUnit = lambda number, seq: None,
    idle_s: float = 0.0,
) -> Run:
    """`units` units one at a time. on_unit: after each, with its number from 1 and the one in
    its session. Raises Broken, ApiError."""
    root = root_process(sidecar)
    frames: Sequence[bytes] = rig.frames if scenario.camera else ()
    seen: list[Seen] = []
    sessions, seq, retained_units, retained_bytes = 0, 0, 0, 0
    client: UnitClient | None = None
    before = _Meter(root, rig.valkey.pid)
    try:
        for number, unit in enumerate(
            script(rig.speech, units, frames=frames, forced=rig.forced), start=1
        ):
            if client is None:
                client = rig.open(sidecar, scenario)
                client.dial()
                sessions, seq = sessions + 1, 0
            seq += 1
            seen.append(client.say(unit, seq))
            on_unit(number, seq)
            if seen[-1].window_tokens > ROLL_OVER_TOKENS or number == units:
                after = _Meter(root, rig.valkey.pid) if number == units else None
                view = rig.view(client)
                retained_units = max(retained_units, int(view["retainedUnits"]))
                retained_bytes = max(retained_bytes, int(view["retainedRowBytes"]))
                idle_ms = _idle_ms(root, idle_s) if number == units else 0.0
                client.close_session()
                client = None
                if after is not None:
                    cost = before.until(after, idle_ms)
                    return Run(scenario, seen, cost, sessions, retained_units, retained_bytes)
        raise AssertionError("the last unit returns")
    finally:
        if client is not None:
            client.hang_up()


class _Meter:
    """The processor clocks at one moment."""

    def __init__(self, root: psutil.Process, ledger_pid: int | None) -> None:
        self.at_s = time.monotonic()
        self.sidecar_s = cpu_s(root.pid)
        self.main_s = main_thread_cpu_s(root.pid)
        self.by_role_s = cpu_by_role(root)
        self.ledger_s = cpu_s(ledger_pid) if ledger_pid else 0.0

    def until(self, later: "_Meter", idle_ms_a_second: float) -> Cost:
        return Cost(
            sidecar_ms=(later.sidecar_s - self.sidecar_s) * 1000,
            main_thread_ms=(later.main_s - self.main_s) * 1000,
            by_role_ms={
                role: (seconds - self.by_role_s.get(role, 0.0)) * 1000
                for role, seconds in later.by_role_s.items()
            },
            ledger_ms=(later.ledger_s - self.ledger_s) * 1000,
            wall_s=later.at_s - self.at_s,
            idle_ms_a_second=idle_ms_a_second,
        )


def _idle_ms(root: psutil.Process, seconds: float) -> float:
    """Milliseconds of the sidecar's processor time a second while its client says nothing."""
    if not seconds:
        return 0.0
    before = cpu_s(root.pid)
    time.sleep(seconds)
    return (cpu_s(root.pid) - before) * 1000 / seconds
