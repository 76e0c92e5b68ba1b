"""What the ledger holds of a session, as an outside observer reads it."""

from typing import Any

import msgspec

from duplex_sidecar.ledger.export import export_lines, verify_lines
from duplex_sidecar.ledger.reader import LedgerReader

Json = dict[str, Any]


async def committed_units(url: str, session: str) -> list[Json]:
    """The committed units as `ledger.jsonl` has them, in order; their hash chain is verified."""
    reader = await LedgerReader.connect(url)
    try:
        lines = list(export_lines(await reader.load(session)))
    finally:
        await reader.close()
    verify_lines(lines)
    decoded: list[Json] = [msgspec.json.decode(line) for line in lines]
    return [line for line in decoded if line["committed"]]


def tokens_of(units: list[Json]) -> list[list[int]]:
    return [unit["token_ids"] for unit in units]


def assert_input_is_whole(units: list[Json], unit_samples: int = 16_000) -> None:
    """Units from 1, and every client sample in exactly one of them."""
    assert [unit["seq"] for unit in units] == list(range(1, len(units) + 1))
    ranges = [
        (unit["input"]["client_from_samples"], unit["input"]["client_to_samples"]) for unit in units
    ]
    assert ranges == [(n * unit_samples, (n + 1) * unit_samples) for n in range(len(units))]
