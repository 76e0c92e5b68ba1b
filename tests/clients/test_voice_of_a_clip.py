"""A voice made of a recording by `duplex voice make` speaks where a manifest names it."""

import pytest
from support.material import CLIP_S, CLIP_VOICE, manifest, speech
from support.realtime import conversing
from support.talks import turns_of

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar

pytestmark = pytest.mark.client

UNITS = 20


async def heard_with(sidecar: LocalSidecar, voice: str) -> tuple[dict[int, list[bytes]], int]:
    """Sound of each turn, and positions of the prompt before the first unit."""
    async with conversing(sidecar, manifest(voice={"name": voice})) as client:
        await client.speak(speech(UNITS))
        await client.until_unit(UNITS)
        client.heard.assert_whole()
        assert client.heard.errors == []
        return turns_of(client.heard), client.heard.units[0]["window_tokens"]


async def test_it_speaks_and_is_heard_in_the_prompt(sidecar: LocalSidecar) -> None:
    turns, tokens = await heard_with(sidecar, CLIP_VOICE)
    assert sum(len(part) for parts in turns.values() for part in parts) > 2 * 24_000
    own_turns, own_tokens = await heard_with(sidecar, "default")
    assert tokens == own_tokens + int(10 * CLIP_S) - 60, "ten positions a second of the clip"
    assert turns != own_turns
    again, _ = await heard_with(sidecar, CLIP_VOICE)
    assert again == turns


async def test_a_voice_that_nobody_made_is_refused(sidecar: LocalSidecar) -> None:
    with pytest.raises(ApiError) as refused:
        sidecar.open_session("nobody", manifest(voice={"name": "nobody"}), "token")
    assert CLIP_VOICE in str(refused.value)
