"""What is told of a conversation in whose middle something was lost. Pure."""

from collections.abc import Sequence
from typing import Any

from duplex_sidecar.client.conversation import OUTPUT_RATE_HZ
from duplex_sidecar.ledger.records import Redo
from tests.gpu.recovery_judge import Struck

LATE_S = 1.0


def told_of(
    struck: Struck, killed_at_s: float, then: str, resumed_at_s: Sequence[float]
) -> dict[str, Any]:
    """Times are seconds from the kill. then: the replica behind it. next unit: the first one that
    it answered, when its `duplex.unit` came, which is behind its sound. wait: of the units that
    came behind the kill, from the last sample that was sent of one to its `duplex.unit`."""
    talk, open_unit = struck.talk, struck.at_kill.open_unit
    behind = [unit for unit in talk.units if talk.done_at_s[unit["unit"]] > killed_at_s]
    answered = [unit for unit in behind if unit["replica"] == then]
    sounding = [unit for unit in answered if unit["audio_samples"]]
    waits = [talk.done_at_s[unit["unit"]] - talk.sent_at_s[unit["unit"]] for unit in behind]
    return rounded(
        {
            "units": len(talk.units),
            "audio_s": sum(unit["audio_samples"] for unit in talk.units) / OUTPUT_RATE_HZ,
            "open_unit_at_kill": None if open_unit is None else open_unit.seq,
            "records_at_kill": len(struck.at_kill.entries),
            "records_at_end": len(struck.end.entries),
            "redos": sum(isinstance(entry.record, Redo) for entry in struck.end.entries),
            "resumed_s": [at_s - killed_at_s for at_s in resumed_at_s],
            "next_unit": _first(struck, answered, killed_at_s),
            "next_sounding_unit": _first(struck, sounding, killed_at_s),
            "longest_wait_s": max(waits, default=None),
            "late_units": sum(wait_s > LATE_S for wait_s in waits),
            "rebuilds": [
                {
                    "unit": unit["unit"],
                    "cause": unit["rebuild_cause"],
                    "ms": unit["rebuild_ms"],
                    "window_tokens": unit["window_tokens"],
                }
                for unit in behind
                if unit["rebuild_cause"] not in (None, "slide")
            ],
            "epoch_at_kill": struck.last_reply.epoch,
            "next_epoch": _next_epoch(struck),
            "events_that_came_twice": talk.repeated,
        }
    )


def _first(
    struck: Struck, units: Sequence[dict[str, Any]], killed_at_s: float
) -> dict[str, Any] | None:
    if not units:
        return None
    number = units[0]["unit"]
    return {"unit": number, "s": struck.talk.done_at_s[number] - killed_at_s}


def _next_epoch(struck: Struck) -> dict[str, Any] | None:
    first = struck.next_epoch
    if first is None:
        return None
    return {
        "epoch": first.epoch,
        "unit": int(first.input_s),
        "in_the_same_turn": first.turn == struck.last_reply.turn,
        "first_chunk_that_sounded": first.sequence,
        "from_sample": first.from_sample,
    }


def rounded(value: Any) -> Any:
    """With three decimals, however deep."""
    match value:
        case float():
            return round(value, 3)
        case dict():
            return {name: rounded(one) for name, one in value.items()}
        case list():
            return [rounded(one) for one in value]
        case _:
            return value
