"""The ledger's own speed: 200 sessions of one unit a second with their real bytes, on a server that
syncs every second and rewrites its append-only file meanwhile. The same again with all units at the
same instant, and on a server that syncs each write."""

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
from redis.asyncio import Redis

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.lease import LEASE_MS
from duplex_sidecar.ledger.nodes import make_nodes
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.store import Ledger, LedgerOptions
from tests.bench import ledger_load
from tests.bench.figures import Broken, Figure
from tests.bench.ledger_load import (
    THINKING_S,
    Payload,
    PlainWriter,
    Samples,
    Session,
    Times,
    timed,
    until,
)
from tests.bench.processes import cpu_s
from tests.bench.stats import percentile

SESSIONS = 200
PLAIN_SESSIONS = 40
SPREAD_S, AT_ONCE_S, FSYNC_S = 100, 50, 25
QUICK_S = 5
REWRITES = 3
CALL_TIMEOUT_MS = 5_000
"""Far above what is measured: a call that takes longer is a sample, not an error."""
WARM_UP_S = 2

RATIO_P50, RATIO_P99 = 1.5, 3.0
SPREAD_P99_MS, AT_ONCE_P99_MS = 10.0, 150.0
CLIENT_CPU_MS = 1.2
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Phase:
    """What one way of putting the units into the seconds came to. seconds: without the warm-up."""

    samples: Samples
    seconds: float
    client_cpu_ms: float
    server_cpu_ms: float
    rewrites: int
    delayed_fsyncs: int


def measure_ledger(quick: bool) -> tuple[list[Figure], dict[str, object]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(quick))


async def _measure(quick: bool) -> tuple[list[Figure], dict[str, object]]:
    spread_s, at_once_s, fsync_s = (QUICK_S,) * 3 if quick else (SPREAD_S, AT_ONCE_S, FSYNC_S)
    payload = Payload()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="duplex-bench-ledger-") as folder:
        disk_ms = _sync_times_ms(Path(folder))
        async with _bench(Path(folder) / "everysec", payload, Durability.MEMORY) as bench:
            spread = await bench.run(spread_s, at_once=False)
            at_once = await bench.run(at_once_s, at_once=True)
        async with _bench(Path(folder) / "always", payload, Durability.FSYNC) as bench:
            synced = await bench.run(fsync_s, at_once=False)
    rewrites = spread.rewrites + at_once.rewrites
    if not quick and rewrites < REWRITES:
        raise Broken(f"only {rewrites} rewrites of the append-only file")
    figures = [
        *_latencies("ledger, phases spread", spread, SPREAD_P99_MS),
        *_ratios(spread),
        *_latencies("ledger, all at one instant", at_once, AT_ONCE_P99_MS),
        *_latencies("ledger, fsync", synced, None),
        _renewals([spread, at_once]),
        *_costs(spread),
        Figure("ledger, rewrites of the append-only file meanwhile", float(rewrites), ""),
        Figure("disk: fdatasync of 64 KiB, p50", percentile(disk_ms, 0.5), "ms"),
    ]
    data: dict[str, object] = {
        "sessions": SESSIONS,
        "plain_sessions": PLAIN_SESSIONS,
        "bytes_of_a_unit": {
            "rows": ledger_load.ROWS_BYTES,
            "pcm": ledger_load.PCM_BYTES,
            "journal": ledger_load.SPOKEN_BYTES,
        },
        "plain_set_bytes": {
            "accept": bench.plain[0].accept_bytes,
            "commit": bench.plain[0].commit_bytes,
        },
        "disk_sync_ms": [round(took, 3) for took in disk_ms],
        "phases": {
            name: _facts(phase)
            for name, phase in (("spread", spread), ("at_once", at_once), ("fsync", synced))
        },
    }
    return figures, data


# --- the load -------------------------------------------------------------------------------------


@dataclass
class Bench:
    server: EmbeddedValkey
    redis: "Redis"
    sessions: list[Session]
    plain: list[PlainWriter]

    async def run(self, seconds: int, *, at_once: bool) -> Phase:
        """Each session a unit a second, for so many seconds behind a warm-up."""
        pid = self.server.pid
        assert pid is not None
        await self._seconds(WARM_UP_S, Samples(), at_once=at_once)
        before = await self._persistence()
        for session in self.sessions:
            session.renewals.clear()
        samples = Samples()
        began, client_s, server_s = time.perf_counter(), time.process_time(), cpu_s(pid)
        rewriting = asyncio.create_task(self._rewrite(seconds))
        await self._seconds(seconds, samples, at_once=at_once)
        took_s = time.perf_counter() - began
        client_s, server_s = time.process_time() - client_s, cpu_s(pid) - server_s
        rewriting.cancel()
        await asyncio.gather(rewriting, return_exceptions=True)
        after = await self._persistence()
        for session in self.sessions:
            samples.renew += session.renewals
        return Phase(
            samples=samples,
            seconds=took_s,
            client_cpu_ms=client_s * 1000 / samples.units,
            server_cpu_ms=server_s * 1000 / samples.units,
            rewrites=after["aof_rewrites"] - before["aof_rewrites"],
            delayed_fsyncs=after["aof_delayed_fsync"] - before["aof_delayed_fsync"],
        )

    async def _persistence(self) -> dict[str, int]:
        found = cast("dict[str, Any]", await self.redis.info("persistence"))
        return {name: int(found[name]) for name in ("aof_rewrites", "aof_delayed_fsync")}

    async def _rewrite(self, seconds: int) -> None:
        """The server does so by itself when its file has doubled; here two more in any case."""
        for _ in range(2):
            await asyncio.sleep(seconds / 3)
            info = cast("dict[str, Any]", await self.redis.info("persistence"))
            if not info["aof_rewrite_in_progress"]:
                await self.redis.bgrewriteaof()

    async def _seconds(self, seconds: int, samples: Samples, *, at_once: bool) -> None:
        start = time.perf_counter() + 0.2
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(self.sessions):
                phase = 0.0 if at_once else number / len(self.sessions)
                group.create_task(_talk(session, start + phase, seconds, samples))
            for number, writer in enumerate(self.plain):
                phase = 0.0 if at_once else (number + 0.5) / len(self.plain)
                group.create_task(_set(writer, start + phase, seconds, samples))


async def _talk(session: Session, start: float, seconds: int, samples: Samples) -> None:
    for second in range(seconds):
        due = start + second
        samples.late_units += time.perf_counter() > due + 1.0
        await until(due)
        await timed(samples.accept, session.accept, due)
        due += THINKING_S
        await until(due)
        await timed(samples.commit, session.commit, due)
        await timed(samples.journal, session.journal)
        samples.units += 1


async def _set(writer: PlainWriter, start: float, seconds: int, samples: Samples) -> None:
    accepts = samples.bare_accept if writer.bare else samples.set_accept
    commits = samples.bare_commit if writer.bare else samples.set_commit
    for second in range(seconds):
        due = start + second
        await until(due)
        await timed(accepts, writer.accept, due)
        due += THINKING_S
        await until(due)
        await timed(commits, writer.commit, due)


@asynccontextmanager
async def _bench(folder: Path, payload: Payload, durability: Durability) -> AsyncIterator[Bench]:
    appendfsync = "always" if durability is Durability.FSYNC else "everysec"
    server = EmbeddedValkey(folder, appendfsync=appendfsync)
    server.start()
    try:
        options = LedgerOptions(call_timeout_ms=CALL_TIMEOUT_MS, durability=durability)
        ledger = await Ledger.connect(server.url, options)
        nodes = make_nodes(server.url, connections=32, timeout_s=CALL_TIMEOUT_MS / 1000)
        node = nodes.holding("")
        sessions = [await Session.open(ledger, payload, who) for who in range(SESSIONS)]
        for number, session in enumerate(sessions):
            session.keeper.start()
            if number % 20 == 19:  # leases are taken up one after another, and renewed so
                await asyncio.sleep(0.08)
        try:
            plain = [
                PlainWriter(node, payload, who, bare=who % 2 == 1) for who in range(PLAIN_SESSIONS)
            ]
            yield Bench(server, node.redis, sessions, plain)
        finally:
            for session in sessions:
                await session.keeper.stop()
            await nodes.close()
            await ledger.close()
    finally:
        server.kill()


def _sync_times_ms(folder: Path) -> list[float]:
    """What the disk itself takes: it says how `fsync` is to be read."""
    took: list[float] = []
    with (folder / "sync").open("wb") as file:
        for _ in range(50):
            file.write(os.urandom(65_536))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return took


# --- figures --------------------------------------------------------------------------------------


def _latencies(title: str, phase: Phase, target_ms: float | None) -> list[Figure]:
    found: list[Figure] = []
    for name, times in _timed(phase.samples):
        aim = target_ms if name in ("accept", "commit") else None
        found += [
            Figure(f"{title}: {name}, p50", percentile(times.since_due, 0.5), "ms"),
            Figure(f"{title}: {name}, p99", percentile(times.since_due, 0.99), "ms", aim),
        ]
    return found


def _timed(samples: Samples) -> list[tuple[str, Times]]:
    return [
        ("accept", samples.accept),
        ("commit", samples.commit),
        ("journal", samples.journal),
        ("plain SET of an accept's bytes", samples.set_accept),
        ("plain SET of a commit's bytes", samples.set_commit),
        ("bare SET of an accept's bytes", samples.bare_accept),
        ("bare SET of a commit's bytes", samples.bare_commit),
    ]


def _ratios(phase: Phase) -> list[Figure]:
    """Since the call: how late timers are is in both, and would hide what differs."""
    samples = phase.samples
    plain = "plain SETs of its bytes"
    pairs = (
        ("accept", plain, samples.accept, samples.set_accept, True),
        ("commit", plain, samples.commit, samples.set_commit, True),
        ("accept", f"bare {plain}", samples.accept, samples.bare_accept, False),
        ("commit", f"bare {plain}", samples.commit, samples.bare_commit, False),
    )
    return [
        Figure(
            f"ledger, phases spread: {name} in {what}, {word}",
            percentile(ours.since_call, share) / percentile(theirs.since_call, share),
            "times",
            target if aimed else None,
        )
        for name, what, ours, theirs, aimed in pairs
        for word, share, target in (("p50", 0.5, RATIO_P50), ("p99", 0.99, RATIO_P99))
    ]


def _renewals(phases: list[Phase]) -> Figure:
    took = [one for phase in phases for one in phase.samples.renew]
    return Figure("ledger: slowest renewal", max(took), "ms", LEASE_MS / 3, f"of {len(took)}")


def _costs(phase: Phase) -> list[Figure]:
    return [
        Figure(
            "ledger: client's CPU a unit",
            phase.client_cpu_ms,
            "ms",
            CLIENT_CPU_MS,
            "all of this process: accept, commit, journal, renewal, plain SETs, the bench itself",
        ),
        Figure("ledger: server's CPU a unit", phase.server_cpu_ms, "ms", note="without rewrites"),
    ]


def _facts(phase: Phase) -> dict[str, object]:
    samples = phase.samples
    return {
        "seconds": round(phase.seconds, 1),
        "units": samples.units,
        "units_late_by_a_second": samples.late_units,
        "aof_rewrites": phase.rewrites,
        "delayed_fsyncs": phase.delayed_fsyncs,
        "client_cpu_ms_a_unit": round(phase.client_cpu_ms, 3),
        "server_cpu_ms_a_unit": round(phase.server_cpu_ms, 3),
        "quantiles": list(QUANTILES),
        "ms_since_due": {name: _quantiles(times.since_due) for name, times in _timed(samples)},
        "ms_since_call": {
            **{name: _quantiles(times.since_call) for name, times in _timed(samples)},
            "renewal": _quantiles(samples.renew),
        },
    }


def _quantiles(values: list[float]) -> list[float]:
    return [round(percentile(values, share), 3) for share in QUANTILES]
