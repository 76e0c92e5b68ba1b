"""Conversations that can be compared: the same manifest and speech, alone and under attack."""

import base64
import json
from dataclasses import dataclass
from typing import Any

from support.ledgers import committed_units, tokens_of
from support.material import manifest, speech
from support.realtime import Heard, RealtimeClient, conversing

from duplex_sidecar.client.local_sidecar import LocalSidecar

OFF = manifest(window={"mode": "off"}, lifecycle={"disconnectGrace": "60s"})
CONTEXT = manifest(
    window={"mode": "context", "contextMaxUnits": 8, "contextPreviousMaxTokens": 60},
    lifecycle={"disconnectGrace": "60s"},
)


@dataclass(frozen=True)
class Undisturbed:
    """A conversation that had the sidecar to itself. units: its `duplex.unit` events. turns: sound
    of each turn, chunk by chunk."""

    tokens: list[list[int]]
    units: list[dict[str, Any]]
    turns: dict[int, list[bytes]]

    def inside_turn(self, first: int) -> int:
        """A unit from `first` on that speaks, whose turn goes on with another unit that speaks."""
        pairs = zip(self.units, self.units[1:], strict=False)
        for unit, later in pairs:
            sounding = unit["audio_samples"] and later["audio_samples"]
            if unit["unit"] >= first and sounding and unit["turn"] == later["turn"]:
                return unit["unit"]
        raise AssertionError("no turn of two units that sound")


def turns_of(heard: Heard) -> dict[int, list[bytes]]:
    """s16le of each turn, chunk by chunk."""
    turns: dict[int, list[bytes]] = {}
    for number in sorted(heard.sequenced):
        event = json.loads(heard.sequenced[number])
        if event["type"] == "response.output_audio.delta":
            turn = int(event["response_id"].rsplit("_", 1)[1])
            turns.setdefault(turn, []).append(base64.b64decode(event["delta"]))
    return turns


_known: dict[tuple[str, int, float], Undisturbed] = {}


async def undisturbed(
    sidecar: LocalSidecar, text: str, units: int, start_s: float = 0.0
) -> Undisturbed:
    """The same for every sidecar of a checkpoint, so it is done once."""
    key = (text, units, start_s)
    if key not in _known:
        async with conversing(sidecar, text, "alone") as client:
            await client.speak(speech(units, start_s))
            await client.until_unit(units)
            client.heard.assert_whole()
            assert client.heard.errors == []
            records = await committed_units(sidecar.settings.redis_url, client.session)
            turns = turns_of(client.heard)
            _known[key] = Undisturbed(tokens_of(records), client.heard.units, turns)
    return _known[key]


async def speak_in_step(
    client: RealtimeClient, first: int, last: int, start_s: float = 0.0
) -> None:
    """Units first..last, each when the one before is done; a stage may restart meanwhile."""
    for unit in range(first, last + 1):
        await client.speak(speech(1, start_s + unit - 1))
        await client.until_unit(unit, timeout_s=120)
