"""The append-only file as a witness. It is copied from under the running server, a second server
is started on the copy, and what that one holds is read with a plain Redis client and judged with
sha256 and json alone: nothing here is the product's. docs/history.md has the layout it goes by.

What the product's own reader says of a session in the end has to be the same, byte by byte.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis import Redis
from support.valkeys import ValkeyProcess

from duplex_sidecar.history.observations import LedgerEnd

GENESIS_HASH = "0" * 64
WRITTEN_S = 10.0
Hash = dict[bytes, bytes]


@dataclass(frozen=True)
class FileEnd:
    """One session in the file. records: the opening, then those that are kept, as stored. head: the
    last one's hash, computed anew. problems: what does not fit in it."""

    records: tuple[bytes, ...]
    head: str
    events_last: int
    problems: tuple[str, ...]


class AofWitness:
    """Collects what the product's reader said of sessions of one server."""

    def __init__(self) -> None:
        self.ends: dict[str, LedgerEnd] = {}

    def expect(self, end: LedgerEnd) -> None:
        self.ends[end.session] = end

    def differences(self, url: str, folder: Path) -> list[str]:
        """Sentences; empty when the file of the server at `url` says the same of every session.
        folder: for the copy, must not exist yet."""
        found = read_file(url, self.ends, folder)
        return [
            f"{session}: {text}"
            for session, end in self.ends.items()
            for text in differences(end, found[session])
        ]


def differences(end: LedgerEnd, found: FileEnd | None) -> list[str]:
    """Between what the product's reader said and what is in the file. Pure."""
    if found is None or end.problem is not None:
        return [f"in the file: {found is not None}, the reader says {end.problem or 'nothing'}"]
    lines: list[dict[str, Any]] = [json.loads(line) for line in end.lines]
    said = tuple(record.encode() for line in lines for record in line["records"])
    texts = list(found.problems)
    if said != found.records:
        same = sum(one == other for one, other in zip(said, found.records, strict=False))
        texts.append(f"{len(said)} records read, {len(found.records)} in the file, {same} the same")
    if lines[-1]["hash"] != found.head:
        texts.append("another head")
    if end.events_last != found.events_last:
        texts.append(f"event {end.events_last} is the last, {found.events_last} in the file")
    return texts


def read_file(url: str, sessions: Iterable[str], folder: Path) -> dict[str, FileEnd | None]:
    """What a second server makes of the first one's file. None: nothing of that session."""
    with Redis.from_url(url, socket_timeout=10) as first:
        names = ("dir", "appenddirname", "appendfilename")
        found = {name: cast("dict[str, str]", first.config_get(name))[name] for name in names}
        options = ("--appenddirname", found["appenddirname"])
        options += ("--appendfilename", found["appendfilename"], "--appendonly", "yes")
        second = ValkeyProcess(folder, *options)
        _wait_until_written(first)
        source = Path(found["dir"]) / found["appenddirname"]
        shutil.copytree(source, folder / found["appenddirname"])
    try:
        second.start()
        with second.client as client:
            return {session: _session(client, session) for session in sessions}
    finally:
        second.kill()
        shutil.rmtree(folder)


def _wait_until_written(client: "Redis") -> None:
    """A server whose disk is slow keeps for a while what it has answered already; it is rewriting
    nothing when its files are copied."""
    deadline = time.monotonic() + WRITTEN_S
    while True:
        info = cast("dict[str, Any]", client.info("persistence"))
        if not info.get("aof_buffer_length") and not info["aof_rewrite_in_progress"]:
            return
        assert time.monotonic() < deadline, "the file does not come to rest"
        time.sleep(0.02)


def _session(client: "Redis", session: str) -> FileEnd | None:
    tag = f"duplex:{{{session}}}"
    meta = cast(Hash, client.hgetall(f"{tag}:meta"))
    if not meta:
        return None
    entries = cast(Hash, client.hgetall(f"{tag}:entries"))
    first, last = int(meta[b"records_first"]), int(meta[b"index"])
    records = [entries.get(b"%d" % index, b"{}") for index in (0, *range(first, last + 1))]
    problems = _chain(records, meta)
    for name, floor in (("pcm", b"pcm_floor"), ("rows", b"window_floor")):
        blobs = cast(Hash, client.hgetall(f"{tag}:{name}"))
        problems += _blobs(records, blobs, name, int(meta[floor]))
    events = {int(number) for number in cast("list[bytes]", client.hkeys(f"{tag}:events"))}
    events_last = int(meta[b"events_last"])
    if events != set(range(int(meta[b"events_first"]), events_last + 1)):
        problems.append("the journal has a gap")
    return FileEnd(tuple(records), _hash(records[-1]), events_last, tuple(problems))


def _chain(records: Sequence[bytes], meta: Hash) -> list[str]:
    """Each record holds the hash of the one before; the ones between the opening and the first that
    is kept were trimmed, and their last hash is in the meta."""
    problems: list[str] = []
    previous = GENESIS_HASH
    for number, stored in enumerate(records):
        if number == 1:
            previous = meta[b"floor_hash"].decode()
        if json.loads(stored).get("prev_hash") != previous:
            problems.append(f"record {number} does not follow the one before")
        previous = _hash(stored)
    if _hash(records[0]) != meta[b"opening_hash"].decode():
        problems.append("the opening is another one")
    if len(records) == 1:
        previous = meta[b"floor_hash"].decode()
    if previous != meta[b"head"].decode():
        problems.append("the last record is not the head")
    return problems


def _blobs(records: Sequence[bytes], blobs: Hash, name: str, floor: int) -> list[str]:
    """Those of accepted units from the floor on, by the hashes in their records."""
    problems: list[str] = []
    for record in map(json.loads, records):
        if record.get("kind") != "accepted" or record["seq"] < floor or not record["media"][name]:
            continue
        stored = blobs.get(b"%d" % record["seq"], b"")
        if _hash(stored) != record["media"][name]["sha256"]:
            problems.append(f"{name} of unit {record['seq']} differ from their record")
    return problems


def _hash(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()
