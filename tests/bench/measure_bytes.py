"""What a session costs the ledger's server in memory, in each window mode: sessions that are as old
as they have to be, so that everything that is bounded is full, on an embedded server of their own.

Rows come in two sizes, and each unit brings a second of sound to the journal, of which the last
minute is kept. The server says what it uses; beside it what each part of a session takes.
"""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.media import Trim
from duplex_sidecar.ledger.store import Ledger, LedgerOptions
from duplex_sidecar.session.recording import RECORDS_KEPT_UNITS
from tests.bench.figures import Figure
from tests.bench.ledger_load import (
    EVENT_BYTES,
    PCM_UNITS,
    ROWS_BYTES,
    SPOKEN_BYTES,
    WINDOW_UNITS,
    Payload,
    Session,
)

SESSIONS = 2
REAL_ROWS_BYTES = 10 * 4096 * 2
"""10 positions of 4,096 values in bfloat16; `ROWS_BYTES` is what the proofs of speed use."""
JOURNAL_S = 60
BASIC_TOKENS, LEAST_UNIT_TOKENS = 8_000, 13
"""The default high watermark, and a unit that listens: `<unit>`, 10 audio positions, its answer and
the closing token. So many units are the most that fit."""
BASIC_UNITS = BASIC_TOKENS // LEAST_UNIT_TOKENS
SETTLED_UNITS = RECORDS_KEPT_UNITS + 50
OFF_UNITS = (200, 400)
CALL_TIMEOUT_MS = 5_000
MIB, KIB = 1024 * 1024, 1024

PARTS = {
    "chain": ("meta", "entries", "order"),
    "pcm": ("pcm",),
    "rows": ("rows", "frames"),
    "state": ("state", "voice"),
    "journal": ("events", "events_order"),
}
"""Keys of a session (`ledger.keys`) by what they are for."""


@dataclass(frozen=True)
class Held:
    """Bytes of one session. whole: by what the server says that it uses. parts: by `MEMORY USAGE`.
    meta: what the session's own meta counts of records and blobs, against its limit."""

    units: int
    whole: float
    parts: dict[str, float]
    meta: int


def measure_bytes(quick: bool) -> tuple[list[Figure], dict[str, object]]:
    return asyncio.run(_measure(quick))


async def _measure(quick: bool) -> tuple[list[Figure], dict[str, object]]:
    figures: list[Figure] = []
    data: dict[str, object] = {
        "sessions": SESSIONS,
        "pcm_units": PCM_UNITS,
        "records_kept_units": RECORDS_KEPT_UNITS,
        "journal_s": JOURNAL_S,
        "context_units": WINDOW_UNITS,
        "basic_units": BASIC_UNITS,
    }
    settled = 70 if quick else SETTLED_UNITS
    off = (80, 100) if quick else OFF_UNITS
    for rows_bytes in (ROWS_BYTES, REAL_ROWS_BYTES):
        rows = f"rows of {rows_bytes // KIB} KiB"
        context = (await _held(rows_bytes, _sliding(WINDOW_UNITS), (settled,)))[-1]
        basic = (await _held(rows_bytes, _sliding(BASIC_UNITS), (settled,)))[-1]
        first, last = await _held(rows_bytes, _keeping, off)
        for mode, held in (("context", context), (f"basic at {BASIC_TOKENS:,} tokens", basic)):
            journal = held.parts["journal"]
            figures += [
                Figure(f"{mode}, {rows}: a session", held.whole / MIB, "MiB", note=_note(held)),
                Figure(f"{mode}, {rows}: without its journal", (held.whole - journal) / MIB, "MiB"),
            ]
        grown = (last.whole - first.whole) / (last.units - first.units)
        figures.append(Figure(f"off, {rows}: each unit", grown / KIB, "KiB", note=_note(last)))
        data[rows] = {
            "context": _facts(context),
            "basic": _facts(basic),
            "off": [_facts(first), _facts(last)],
        }
    return figures, data


def _sliding(units: int) -> Callable[[int], Trim]:
    """The window has so many units. As `session.recording.trim_after`."""

    def trim(seq: int) -> Trim:
        window = max(1, seq - units + 1)
        pcm = max(1, seq - PCM_UNITS + 1)
        return Trim(window, pcm, max(1, min(window, pcm, seq - RECORDS_KEPT_UNITS)))

    return trim


def _keeping(seq: int) -> Trim:
    """Nothing leaves but PCM."""
    return Trim(pcm_below=max(1, seq - PCM_UNITS + 1))


async def _held(rows_bytes: int, trim: Callable[[int], Trim], looks: tuple[int, ...]) -> list[Held]:
    """What a session holds after each of these numbers of units."""
    payload = Payload(rows_bytes)
    with tempfile.TemporaryDirectory(prefix="duplex-bench-bytes-") as folder:
        server = EmbeddedValkey(Path(folder) / "ledger")
        server.start()
        # A minute of sound by its bytes: this goes faster than a unit a second.
        minute = JOURNAL_S * (SPOKEN_BYTES + 2 * EVENT_BYTES)
        options = LedgerOptions(call_timeout_ms=CALL_TIMEOUT_MS, max_journal_bytes=minute)
        ledger = await Ledger.connect(server.url, options)
        client: Redis = Redis.from_url(server.url)
        try:
            await client.config_set("appendonly", "no")  # it is memory that is measured
            empty = await _used(client)
            sessions = [await Session.open(ledger, payload, who, trim) for who in range(SESSIONS)]
            found: list[Held] = []
            done = 0
            for units in looks:
                for _ in range(units - done):
                    for session in sessions:
                        await _one_unit(session)
                done = units
                found.append(await _look(client, sessions, units, empty))
            return found
        finally:
            await client.aclose()
            await ledger.close()
            server.kill()


async def _one_unit(session: Session) -> None:
    await session.accept()
    await session.commit()
    await session.journal()


async def _look(client: "Redis", sessions: list[Session], units: int, empty: int) -> Held:
    whole = (await _used(client) - empty) / len(sessions)
    keys = session_keys(sessions[0].name)
    parts = {
        part: float(sum([await _usage(client, getattr(keys, name)) for name in names]))
        for part, names in PARTS.items()
    }
    meta = cast("Any", await cast("Any", client.hget(keys.meta, "bytes")))
    return Held(units, whole, parts, int(meta))


async def _used(client: "Redis") -> int:
    return int(cast("dict[str, Any]", await client.info("memory"))["used_memory"])


async def _usage(client: "Redis", key: str) -> int:
    return int(cast("int | None", await client.memory_usage(key, samples=0)) or 0)


def _note(held: Held) -> str:
    parts = ", ".join(f"{name} {size / MIB:.2f}" for name, size in held.parts.items())
    return f"{held.units} units; MiB: {parts}"


def _facts(held: Held) -> dict[str, object]:
    return {
        "units": held.units,
        "used_memory_bytes": round(held.whole),
        "parts_bytes": {name: round(size) for name, size in held.parts.items()},
        "meta_bytes": held.meta,
    }
