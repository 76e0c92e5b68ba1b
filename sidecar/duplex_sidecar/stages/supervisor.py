"""Starts the stage processes, watches them, restarts them, and never leaves one behind.

One keeper per stage runs the life of its process: spawn, wait until its health answers, watch the
process and its health, sweep its process group, back off, again. Sessions see restarts through the
stage's link (`GONE`, then a larger generation); the application sees them through reports.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from duplex_sidecar.stages.envelope import Health, HealthReport
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.stages.family import group_runs
from duplex_sidecar.stages.link import StageLink

_LOG_ROTATE_BYTES = 4 * 1024 * 1024
_TAIL_BYTES = 16 * 1024
_REASON_LINES = 3
_SOCKET_POLL_S = 0.05
_SWEEP_POLL_S = 0.02
_SWEEP_POLLS = 50


class StageState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It was ready, was lost, and is coming back."""
    FAILED = "failed"
    """It failed to become ready too often; it is not started again."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StageSpec:
    """How to start one stage. argv[0] is a program; the process serves at `socket` when ready."""

    stage: str
    argv: tuple[str, ...]
    socket: Path
    log: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times in seconds. The backoff doubles from first to max and starts anew once a process has
    been ready for stable_s. max_failed_starts counts starts in a row that never became ready."""

    ready_timeout_s: float = 180.0
    progress_interval_s: float = 1.0
    first_backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    stable_s: float = 60.0
    max_failed_starts: int = 3
    health_interval_s: float = 2.0
    health_timeout_s: float = 10.0
    health_strikes: int = 2
    stop_grace_s: float = 8.0

    def backoff_s(self, failures: int) -> float:
        """Pause before the next start after `failures` failures in a row (1 or more)."""
        return min(self.max_backoff_s, self.first_backoff_s * 2 ** (failures - 1))


@dataclass(frozen=True, slots=True)
class StageReport:
    """A transition, or progress within one (same state again, elapsed_s grown).

    reason: why it was lost or failed, or the last log line while starting; for people.
    elapsed_s: since the process was started. generation: of the link at that time.
    """

    stage: str
    state: StageState
    generation: int
    reason: str
    elapsed_s: float
    limits: Mapping[str, int] = field(default_factory=dict[str, int])


class StageStartError(Exception):
    """A stage did not become ready. `log_tail` are its last log lines."""

    def __init__(self, stage: str, reason: str, log_tail: Sequence[str]) -> None:
        super().__init__(f"stage {stage} does not start: {reason}")
        self.stage = stage
        self.reason = reason
        self.log_tail = tuple(log_tail)


OnReport = Callable[[StageReport], None]
OnHealth = Callable[[HealthReport], None]
"""Told what each health check of a stage that serves has answered."""


class Supervisor:
    """Keeps the stages of one sidecar. Use from one event loop, in the thread that lives longest:
    the kernel kills the stages when the thread that started them ends."""

    def __init__(
        self,
        specs: Sequence[StageSpec],
        on_report: OnReport,
        policy: RestartPolicy | None = None,
        on_health: OnHealth = lambda _: None,
    ) -> None:
        self._on_report = on_report
        self._keepers = {
            spec.stage: _Keeper(spec, policy or RestartPolicy(), on_report, on_health)
            for spec in specs
        }
        self._tasks: list[asyncio.Task[None]] = []

    def link(self, stage: str) -> StageLink:
        """The link of a stage, valid for the whole life of the supervisor."""
        return self._keepers[stage].link

    def report(self, stage: str) -> StageReport:
        """The last report of a stage."""
        return self._keepers[stage].last_report

    def log_tail(self, stage: str, lines: int = 20) -> tuple[str, ...]:
        """The last lines that a stage wrote, oldest first."""
        return self._keepers[stage].log_tail(lines)

    async def start(self) -> None:
        """Start all stages side by side; returns when each has answered its health.

        Raises StageStartError when one gives up; the others are stopped then.
        """
        self._tasks = [asyncio.create_task(k.run()) for k in self._keepers.values()]
        try:
            await asyncio.gather(*(k.wait_ready_once() for k in self._keepers.values()))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all stages and everything that they started. Safe to call again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


class _Keeper:
    """The life of one stage's process."""

    def __init__(
        self, spec: StageSpec, policy: RestartPolicy, on_report: OnReport, on_health: OnHealth
    ) -> None:
        self.link = StageLink(spec.stage)
        self._spec = spec
        self._policy = policy
        self._on_report = on_report
        self._on_health = on_health
        self._ready_once: asyncio.Future[None] | None = None
        self._started_at = time.monotonic()
        self.last_report = StageReport(spec.stage, StageState.STOPPED, 0, "not started", 0.0)

    async def wait_ready_once(self) -> None:
        if self._ready_once is None:
            self._ready_once = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._ready_once)

    async def run(self) -> None:
        """Until cancelled, or until the stage gives up."""
        failures = failed_starts = 0
        state = StageState.STARTING
        try:
            while True:
                lost, was_ready, ready_s = await self._one_life(state)
                failures = 1 if ready_s >= self._policy.stable_s else failures + 1
                failed_starts = 0 if was_ready else failed_starts + 1
                if failed_starts >= self._policy.max_failed_starts:
                    self._give_up(lost)
                    return
                if was_ready:
                    state = StageState.RESTARTING
                else:
                    self._report(state, lost)
                await asyncio.sleep(self._policy.backoff_s(failures))
        except asyncio.CancelledError:
            self._report(StageState.STOPPED, "asked to stop")
            raise

    async def _one_life(self, state: StageState) -> tuple[str, bool, float]:
        """Spawn, serve, sweep. Returns why it was lost, whether it was ready, and for how long."""
        process = await self._spawn(state)
        if isinstance(process, str):
            return process, False, 0.0
        ready_at: float | None = None
        try:
            lost = await self._until_ready(process, state)
            if lost is None:
                ready_at = time.monotonic()
                lost = await self._until_lost(process)
                await self.link.detach()
                # Said before the sweep, so that sessions need not wait for it.
                self._report(StageState.RESTARTING, lost)
            ready_s = 0.0 if ready_at is None else time.monotonic() - ready_at
            return lost, ready_at is not None, ready_s
        finally:
            await self.link.detach()
            await asyncio.shield(asyncio.ensure_future(self._end(process)))

    async def _spawn(self, state: StageState) -> asyncio.subprocess.Process | str:
        self._started_at = time.monotonic()
        self._report(state, "starting the process")
        try:
            with contextlib.suppress(FileNotFoundError):
                self._spec.socket.unlink()
            with self._open_log() as log:
                return await asyncio.create_subprocess_exec(
                    *self._spec.argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(self._spec.environment),
                    # Its own process group: one signal reaches the engine core too, and Ctrl-C at
                    # a terminal reaches only the sidecar, which stops the stages in order.
                    start_new_session=True,
                )
        except OSError as error:
            return f"cannot start {self._spec.argv[0]}: {error}"

    async def _until_ready(
        self, process: asyncio.subprocess.Process, state: StageState
    ) -> str | None:
        """None when ready, else why not."""
        deadline = self._started_at + self._policy.ready_timeout_s
        next_progress = self._started_at + self._policy.progress_interval_s
        while time.monotonic() < deadline:
            if process.returncode is not None:
                return self._exit_reason(process)
            with contextlib.suppress(OSError, StageError):
                if not self.link.connected:
                    await self.link.attach(self._spec.socket)
                health = await self._health()
                self._report(StageState.READY, "", health.limits)
                if self._ready_once is not None and not self._ready_once.done():
                    self._ready_once.set_result(None)
                return None
            if time.monotonic() >= next_progress:
                next_progress += self._policy.progress_interval_s
                self._report(state, (self.log_tail(1) or ("loading",))[-1])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _SOCKET_POLL_S)
        return f"not ready within {self._policy.ready_timeout_s:g} s"

    async def _until_lost(self, process: asyncio.subprocess.Process) -> str:
        strikes = 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._policy.health_interval_s)
            if process.returncode is not None:
                return self._exit_reason(process)
            try:
                self._on_health(await self._health())
                strikes = 0
            except StageError as error:
                strikes += 1
                if strikes >= self._policy.health_strikes:
                    return f"health failed {strikes} times: {error.reason}"

    async def _health(self) -> HealthReport:
        return await self.link.call(Health(), HealthReport, self._policy.health_timeout_s)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ask it to leave, then make it; nothing of its group survives."""
        if process.returncode is None:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._policy.stop_grace_s)
        # Also after a clean exit: the engine core may still be there. What leaves by itself (the
        # process that removes named semaphores) gets a moment for it.
        if process.returncode is None or not await _group_is_gone(process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await _group_is_gone(process.pid)
        with contextlib.suppress(FileNotFoundError):
            self._spec.socket.unlink()

    def _give_up(self, reason: str) -> None:
        self._report(StageState.FAILED, reason)
        if self._ready_once is not None and not self._ready_once.done():
            self._ready_once.set_exception(
                StageStartError(self._spec.stage, reason, self.log_tail(20))
            )

    def _report(
        self, state: StageState, reason: str, limits: Mapping[str, int] | None = None
    ) -> None:
        self.last_report = StageReport(
            stage=self._spec.stage,
            state=state,
            generation=self.link.generation,
            reason=reason,
            elapsed_s=time.monotonic() - self._started_at,
            limits=limits or {},
        )
        self._on_report(self.last_report)

    def _exit_reason(self, process: asyncio.subprocess.Process) -> str:
        status = process.returncode
        assert status is not None
        how = f"exited with status {status}" if status >= 0 else signal.Signals(-status).name
        tail = " | ".join(self.log_tail(_REASON_LINES))
        return f"{how}: {tail}" if tail else how

    def _open_log(self) -> BinaryIO:
        log = self._spec.log
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > _LOG_ROTATE_BYTES:
            log.replace(log.with_suffix(log.suffix + ".1"))
        return log.open("ab")

    def log_tail(self, lines: int) -> tuple[str, ...]:
        try:
            with self._spec.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return ()
        return tuple(line for line in text.splitlines() if line.strip())[-lines:]


async def _group_is_gone(group: int) -> bool:
    """Whether nothing of the process group is left, or leaves within a second."""
    for _ in range(_SWEEP_POLLS):
        if not group_runs(group):
            return True
        await asyncio.sleep(_SWEEP_POLL_S)
    return False
