"""Today's operator and sidecars of the first release, alone and beside new ones."""

import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from support.api_servers import ApiServer
from support.first_release import FirstRelease
from support.operators import Place, operating, placed, until
from support.stand_in_sidecar import StandInSidecar

from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PAIRS = [
    pair
    for pair in itertools.product((FirstRelease, StandInSidecar), repeat=2)
    if FirstRelease in pair
]


@pytest.fixture
async def redis(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url, protocol=2, decode_responses=True)
    yield client
    await client.aclose()


@pytest.fixture
async def place(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> AsyncIterator[Place]:
    async with placed(api_server.kubeconfig, valkey.url, api_namespace) as place:
        yield place


@pytest.mark.parametrize("pair", PAIRS, ids=["old to old", "old to new", "new to old"])
async def test_a_whole_life_between_two_releases(
    place: Place, redis: Redis, pair: tuple[type[StandInSidecar], type[StandInSidecar]]
) -> None:
    await place.make_pool()
    first = await place.make_pod("pod-a", kind=pair[0])
    second = await place.make_pod("pod-b", kind=pair[1])
    await place.mark_pods(draining="pod-b", staying="pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        status = await place.phase("talk", "Ready")
        assert status["placement"]["pod"] == "pod-a"
        first.attach(uid)
        first.talk(uid, 3)
        await place.phase("talk", "Active")
        await place.mark_pods(draining="pod-a", staying="pod-b")

        async def moved() -> bool:
            return uid in second.sessions

        await until(moved, "the other pod")
        status = await place.phase("talk", "Ready")
        assert status["placement"] == {"pod": "pod-b", "podUID": second.pod_uid, "fence": 2}
        assert first.calls.count("POST sessions/*/park", uid) == 1
        second.attach(uid)
        second.talk(uid, 4)
        await place.phase("talk", "Active")

        await place.change_session("talk", desiredState="Parked")
        status = await place.phase("talk", "Parked")
        assert status["units"] == 4
        await place.change_session("talk", desiredState="Running")
        await place.phase("talk", "Ready")
        await second.park(uid, "client_away")
        await place.phase("talk", "Parked")
        await place.wake_session(redis, "talk", uid)
        status = await place.phase("talk", "Ready")
        assert status["placement"]["fence"] == 4

        await place.delete_session("talk")
        await place.gone("talk")
    found = cast("Any", redis.hget(f"duplex:{{{uid}}}:meta", "phase"))
    assert await found == "erased"
    assert second.calls.count("DELETE sessions/*", uid) == 1
    for sidecar in (first, second):
        if isinstance(sidecar, FirstRelease):
            assert sidecar.refused == [], "nothing that it does not know was said to it"


@pytest.mark.parametrize("kind", [FirstRelease, StandInSidecar])
async def test_a_pod_ends_and_its_sessions_go_to_the_other_release(
    place: Place, kind: type[StandInSidecar]
) -> None:
    other = StandInSidecar if kind is FirstRelease else FirstRelease
    await place.make_pool()
    await place.make_pod("pod-a", kind=kind)
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        second = await place.make_pod("pod-b", kind=other)
        await place.kill_pod("pod-a")

        async def moved() -> bool:
            return uid in second.sessions

        await until(moved, "the other pod")
        status = await place.phase("talk", "Ready")
        assert status["placement"]["fence"] == 2


async def test_a_conversation_without_its_ledger_ends_and_says_so(
    place: Place, redis: Redis
) -> None:
    """One that was never talked to has lost nothing and begins again."""
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        used = await place.make_session("used")
        unused = await place.make_session("unused")
        for name in ("used", "unused"):
            await place.phase(name, "Ready")
        pod.attach(used)
        pod.talk(used, 3)
        await place.phase("used", "Active")
        for name, uid in (("used", used), ("unused", unused)):
            await pod.park(uid, "client_away")
            await place.phase(name, "Parked")
            await redis.delete(f"duplex:{{{uid}}}:meta")
            await place.wake_session(redis, name, uid)
        status = await place.phase("used", "Ended")
        assert status["reason"] == "LedgerLost"
        assert "placement" not in status
        assert used not in pod.sessions
        assert pod.calls.count("PUT sessions/*", used) == 2, "it is not tried again and again"

        async def told() -> str | None:
            """As an Event, which comes after the status."""
            types = {event["reason"]: event["type"] for event in await place.events("used")}
            return types.get("LedgerLost")

        assert await until(told, "the Event of the lost ledger") == "Warning"
        status = await place.phase("unused", "Ready")
        assert status["placement"]["fence"] == 2
