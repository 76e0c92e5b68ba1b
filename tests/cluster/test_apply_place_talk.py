"""The main job on a real cluster: apply, place, talk, drain in mid-sentence, talk on, delete; what
goes wrong meanwhile; and who may not do what to whom.

Everything is the product's own, installed by its charts, but for the sidecar's image (see
sidecar_pods). The client is the demo's, and keeps one connection to the gateway throughout.
"""

import asyncio
import json
import re
import ssl
from functools import partial
from urllib.parse import urlsplit

import pytest
from support.callers import (
    OPEN_TIMEOUT_S,
    REFUSED,
    Caller,
    calling,
    gateway_port,
    realtime_url,
    ticket,
    trusting,
    turned_away,
)
from support.kube import Json, KubeError, until
from support.releases import (
    RELEASE,
    SIDECARS,
    VOLUME_VOICE,
    Voice,
    applied,
    applied_beside,
    delete_and_wait,
    example,
    ledger_of,
    left_of,
    named,
    uninstall,
)
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidMessage

from duplex_sidecar.checkpoint.voice import voice_names
from duplex_sidecar.cli.places import default_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SESSION = "hello"
DRAIN = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--pod-selector={SIDECARS}")
OPERATORS = "app.kubernetes.io/component=operator"
NOW = ("--grace-period=0", "--force", "--wait=false")
LEAD_TIMEOUT_S = 150.0
"""Pods start, wait for a lease of 15 s to run out, and list everything."""
DRAIN_TIMEOUT_S = 180
TEST_TIMEOUT_S = 300.0


async def test_apply_place_talk_drain_delete(voice: Voice) -> None:
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    kube.apply(example("session.yaml"), namespace)
    kube.wait(f"dxs/{SESSION}", "condition=Ready", namespace)

    status: Json = kube.get("dxs", SESSION, namespace)["status"]
    pod = kube.get("pod", status["placement"]["pod"], namespace)
    assert pod["metadata"]["uid"] == status["placement"]["podUID"]
    assert pod["metadata"]["labels"]["duplex.dev/occupied"] == "true"

    async with calling(voice, SESSION) as caller:
        await caller.until_unit(5)
        # Beside the client, as everything here: one that does not read is cut off.
        await active(voice, SESSION)
        spoke = await caller.until_mid_sentence(after_unit=5)
        await drained(voice, pod["spec"]["nodeName"])
        await settled_elsewhere(voice, caller, spoke, pod["metadata"]["name"])
        await caller.until_unit(caller.last_unit + 5)
        caller.assert_whole()
        await asyncio.to_thread(told_of_the_move, voice, caller)

        await deleted(voice, caller, status)


async def active(voice: Voice, session: str) -> None:
    is_active = "jsonpath={.status.phase}=Active"
    await asyncio.to_thread(voice.cluster.wait, f"dxs/{session}", is_active, voice.namespace)


async def drained(voice: Voice, node: str) -> None:
    """What `kubectl drain` does ends well although the pod's budget forbids to evict it as long
    as it is occupied: the cordon alone makes the operator empty it."""
    drain = ("drain", node, *DRAIN, f"--timeout={DRAIN_TIMEOUT_S}s")
    try:
        await asyncio.to_thread(voice.cluster.kubectl, *drain, timeout_s=DRAIN_TIMEOUT_S + 10)
    finally:
        await asyncio.to_thread(voice.cluster.kubectl, "uncordon", node)


async def settled_elsewhere(voice: Voice, caller: Caller, spoke: Json, old_pod: str) -> None:
    """The sentence was spoken to its end by the old pod; the next unit is a rebuild by another."""
    moved = await caller.until(
        lambda event: event["type"] == "duplex.unit" and event["replica"] != spoke["replica"],
        "a unit on another pod",
    )
    assert moved["rebuild_cause"] == "move"
    ends = [each for each in caller.events if each["type"] == "response.done"]
    assert any(spoke["unit"] < end["duplex"]["unit"] < moved["unit"] for end in ends)
    assert await asyncio.to_thread(voice.pod_of, SESSION) not in ("", old_pod)
    assert caller.talk.replies


def told_of_the_move(voice: Voice, caller: Caller) -> None:
    """The status counts what the client has heard since the move. Counters alone are written once
    a minute: here something else is written that takes them along."""
    kube, namespace = voice.cluster, voice.namespace
    here = caller.talk.units[-1]["replica"]
    kube.patch("dxs", SESSION, {"spec": {"priority": 1}}, namespace)

    def counted() -> Json | None:
        session: Json = kube.get("dxs", SESSION, namespace)
        status: Json = session["status"]
        written = status["observedGeneration"] == session["metadata"]["generation"]
        return status if written and status.get("rebuilds") else None

    status = until(counted, "the rebuild in the status")
    units: list[Json] = []
    rebuilt: list[Json] = []

    def heard() -> bool:
        """The client, too: a status may be ahead of it."""
        units[:] = [unit for unit in caller.talk.units if unit["replica"] == here]
        rebuilt[:] = [unit for unit in units if unit["rebuild_cause"]]
        return units[-1]["unit"] >= status["units"] and len(rebuilt) >= status["rebuilds"]

    until(heard, "what the status counts")
    assert rebuilt[0]["rebuild_cause"] == "move"
    last = rebuilt[status["rebuilds"] - 1]
    told = status["lastRebuild"]
    assert told["cause"] == last["rebuild_cause"]
    assert told["costMs"] == pytest.approx(last["rebuild_ms"] or 0.0, abs=1.0)
    assert re.fullmatch(r"(?!0{32})[0-9a-f]{32}", told["traceID"])
    assert units[0]["unit"] <= status["units"] <= caller.last_unit
    (then,) = (unit for unit in units if unit["unit"] == status["units"])
    assert status["epoch"] - then["epoch"] in (0, 1)  # a turn's end begins the next one
    audio = status["audio"]
    assert audio["underruns"] > 0 or audio["longestGapMs"] == 0


async def deleted(voice: Voice, caller: Caller, status: Json) -> None:
    """While the client talks. Nothing stays: no ledger, no Secret, no finalizer, no taken slot."""
    kube, namespace = voice.cluster, voice.namespace
    await asyncio.to_thread(delete_and_wait, voice, f"dxs/{SESSION}", namespace=namespace)
    await caller.until(lambda event: event["type"] == "session.closed", "the session's end")
    assert kube.find("dxs", SESSION, namespace) is None
    token = status["tokenSecret"]["name"]
    until(lambda: kube.find("secret", token, namespace) is None, "the collection of its Secret")
    with ledger_of(kube, voice.namespace) as redis:
        until(lambda: left_of(redis, status["ledgerId"]) == [], "the ledger's erasure")
    await asyncio.to_thread(voice.await_free, 2)

    def marks() -> set[str]:
        pods = kube.items("pods", namespace, SIDECARS)
        return {pod["metadata"]["labels"]["duplex.dev/occupied"] for pod in pods}

    until(lambda: marks() == {"false"}, "pods that count as empty")


async def test_the_charts_own_test_holds_a_conversation(voice: Voice) -> None:
    voice.await_free(1)
    said = await asyncio.to_thread(
        voice.cluster.helm,
        "test",
        "talk",
        "-n",
        voice.namespace,
        "--logs",
        timeout_s=TEST_TIMEOUT_S,
    )
    assert "Phase:          Succeeded" in said


async def test_a_client_wakes_a_parked_session(voice: Voice) -> None:
    """It was gone for longer than its grace. The gateway asks, the operator places, a pod takes the
    conversation up, and the client goes on where it was."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    with applied(voice, named("sleeper", lifecycle={"disconnectGrace": "1s"})):
        kube.wait("dxs/sleeper", "condition=Ready", namespace)
        async with calling(voice, "sleeper") as caller:
            await caller.until_unit(3)
            await caller.hang_up()
            parked = ("dxs/sleeper", "jsonpath={.status.phase}=Parked", namespace)
            await asyncio.to_thread(kube.wait, *parked)
            assert await asyncio.to_thread(voice.pod_of, "sleeper") == ""
            await asyncio.to_thread(voice.await_free, 2)
            before = caller.last_unit
            caller.dial_again()
            await caller.until_unit(before + 4)
            caller.assert_whole(connections=2)
            (rebuilt,) = (unit for unit in caller.talk.units if unit["rebuild_cause"] == "move")
            assert rebuilt["unit"] > before
            await active(voice, "sleeper")
            status: Json = kube.get("dxs", "sleeper", namespace)["status"]
            assert status["placement"]["fence"] > 1


# --- what goes wrong -----------------------------------------------------------------------------


async def test_a_pod_is_killed_while_it_talks(voice: Voice) -> None:
    """Nothing is parked: the lease is broken, and the other pod takes over what was durable."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    with applied(voice, named("killed")):
        kube.wait("dxs/killed", "condition=Ready", namespace)
        async with calling(voice, "killed") as caller:
            before = await caller.until_unit(4)
            pod = await asyncio.to_thread(voice.pod_of, "killed")
            await asyncio.to_thread(kube.kubectl, "delete", "pod", pod, *NOW, namespace=namespace)
            await caller.until(
                lambda event: (
                    event["type"] == "duplex.unit" and event["replica"] != before["replica"]
                ),
                "a unit on another pod",
            )
            await caller.until_unit(caller.last_unit + 3)
            caller.assert_whole()
            assert await asyncio.to_thread(voice.pod_of, "killed") not in ("", pod)


@pytest.mark.long
async def test_operators_are_killed_while_a_client_talks(voice: Voice) -> None:
    """Nobody notices; the status converges under the next leader."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(1)
    with applied(voice, named("unattended")):
        kube.wait("dxs/unattended", "condition=Ready", namespace)
        async with calling(voice, "unattended") as caller:
            await caller.until_unit(3)
            kill = ("delete", "pods", f"--selector={OPERATORS}", *NOW)
            await asyncio.to_thread(kube.kubectl, *kill, namespace=voice.namespace)
            await caller.until_unit(caller.last_unit + 3)
            # A new leader places and ends.
            async with applied_beside(voice, named("later")):
                ready = ("dxs/later", "condition=Ready", namespace, LEAD_TIMEOUT_S)
                await asyncio.to_thread(kube.wait, *ready)
            caller.assert_whole()
            # The one of before may have been killed before it wrote so.
            await active(voice, "unattended")


@pytest.mark.long
async def test_the_last_slot(voice: Voice) -> None:
    """One waits, knows its position, and is placed when another ends. Its client only waits."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    with applied(voice, named("first"), named("second")):
        for name in ("first", "second"):
            kube.wait(f"dxs/{name}", "condition=Ready", namespace)
        with applied(voice, named("third")):
            kube.wait("dxs/third", "jsonpath={.status.queuePosition}=1", namespace)
            assert kube.get("dxs", "third", namespace)["status"]["phase"] == "Queued"
            async with calling(voice, "third") as caller:
                await asyncio.to_thread(kube.delete, named("first"), namespace)
                await caller.until_unit(2)
                caller.assert_whole()
            kube.wait("dxs/first", "delete", namespace)
            assert "queuePosition" not in kube.get("dxs", "third", namespace)["status"]


async def test_the_gateway_lets_nobody_in_without_the_token(voice: Voice) -> None:
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(1)
    with applied(voice, named("guarded"), named("other")):
        for name in ("guarded", "other"):
            kube.wait(f"dxs/{name}", "jsonpath={.status.tokenSecret.name}", namespace)
        own, other = (ticket(kube, name, namespace) for name in ("guarded", "other"))
        with gateway_port(voice) as port:
            for session, token in (
                (own.uid, "wrong"),
                (own.uid, other.token),
                (own.uid, ""),
                ("unknown", own.token),
                (f"{voice.namespace}/guarded", own.token),
            ):
                url = realtime_url(voice, port, session)
                assert await turned_away(url, token, trusting(voice)) == REFUSED


async def test_the_gateway_speaks_tls(voice: Voice) -> None:
    """With the certificate of the chart's Secret; all other calls here go by it, too."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(1)
    with applied(voice, named("private")):
        kube.wait("dxs/private", "condition=Ready", namespace)
        endpoint: str = kube.get("dxs", "private", namespace)["status"]["endpoint"]
        assert endpoint == f"wss://{RELEASE}-gateway.{namespace}.svc/v1/realtime"
        call = ticket(kube, "private", namespace)
        with gateway_port(voice) as port:
            url = realtime_url(voice, port, call.uid)
            with pytest.raises(ssl.SSLCertVerificationError):
                await turned_away(url, call.token, ssl.create_default_context())
            with pytest.raises(InvalidMessage):
                await turned_away(url.replace("wss:", "ws:"), call.token)
            # By the name that the status shows, as a client in the cluster dials it.
            name = urlsplit(endpoint).hostname
            trusted = connect(
                url,
                ssl=trusting(voice),
                server_hostname=name,
                additional_headers={"authorization": f"Bearer {call.token}"},
                open_timeout=OPEN_TIMEOUT_S,
            )
            async with trusted as socket:
                # Who has not got through to the pod after a second is told so first.
                while (opening := json.loads(await socket.recv())["type"]) == "session.queued":
                    continue
                assert opening == "session.created"


@pytest.mark.usefixtures("own_cluster")
async def test_a_voice_of_the_pools_volume(voice: Voice) -> None:
    """What neither the volume nor the checkpoint has is refused."""
    kube, namespace = voice.cluster, voice.namespace
    assert VOLUME_VOICE not in voice_names(default_checkpoint())
    voice.await_free(2)
    sessions = (
        named("partnered", voice={"name": VOLUME_VOICE}),
        named("voiceless", voice={"name": "nobody"}),
    )
    with applied(voice, *sessions):
        kube.wait("dxs/partnered", "condition=Ready", namespace)
        async with calling(voice, "partnered") as caller:
            await caller.until_mid_sentence(after_unit=1)
            caller.assert_whole()
            assert caller.talk.replies
        refused = "jsonpath={.status.conditions[?(@.type=='Accepted')].reason}=RefusedByPod"
        await asyncio.to_thread(kube.wait, "dxs/voiceless", refused, namespace)


@pytest.mark.long
async def test_a_namespace_goes_with_a_live_session(voice: Voice) -> None:
    """Of another namespace than its pool's, which allows it. Nothing holds the namespace."""
    kube = voice.cluster
    voice.await_free(1)
    with kube.namespace("guest") as guest:
        pool: Json = {"poolRef": {"name": voice.pool, "namespace": voice.namespace}}
        kube.apply(named("visitor", **pool), guest)
        refused = "jsonpath={.status.conditions[?(@.type=='Accepted')].status}=False"
        kube.wait("dxs/visitor", refused, guest)
        allowed = {"allowedNamespaces": {"from": "Listed", "names": [guest]}}
        kube.patch("dxp", voice.pool, {"spec": allowed}, voice.namespace)
        try:
            kube.wait("dxs/visitor", "condition=Ready", guest)
            async with calling(voice, "visitor", namespace=guest) as caller:
                await caller.until_unit(2)
                uid = (await asyncio.to_thread(ticket, kube, "visitor", guest)).uid
                await asyncio.to_thread(delete_and_wait, voice, f"namespace/{guest}")
                closed = await caller.until(
                    lambda event: event["type"] == "session.closed", "the session's end"
                )
                assert closed["reason"] != "parked"
        finally:
            kube.patch("dxp", voice.pool, {"spec": {"allowedNamespaces": None}}, voice.namespace)
    with ledger_of(kube, voice.namespace) as redis:
        until(lambda: not left_of(redis, uid), "the ledger's erasure")


def test_rights_in_a_namespace_reach_no_other(voice: Voice) -> None:
    """Somebody who administers a namespace, against the sessions, Secrets and pool of another."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(1)
    with kube.namespace("guest") as guest, applied(voice, named("private")):
        kube.wait("dxs/private", "condition=Ready", namespace)
        kube.kubectl("create", "serviceaccount", "neighbour", namespace=guest)
        grant = ("create", "rolebinding", "neighbour", "--clusterrole=admin")
        user = f"system:serviceaccount:{guest}:neighbour"
        kube.kubectl(*grant, f"--serviceaccount={guest}:neighbour", namespace=guest)
        for what in ("dxs/private", "secret/private-token", f"dxp/{voice.pool}", "pods"):
            with pytest.raises(KubeError, match="Forbidden"):
                kube.kubectl("get", what, f"--as={user}", namespace=namespace)
        # What they may make in their own namespace gets them no further.
        kube.await_right(user, "create", "duplexsessions.duplex.dev", guest)
        thief = named("thief", poolRef={"name": voice.pool, "namespace": namespace})
        create = ("create", "-f", "-", f"--as={user}")
        kube.kubectl(*create, namespace=guest, stdin=json.dumps(thief))
        refused = "jsonpath={.status.conditions[?(@.type=='Accepted')].status}=False"
        kube.wait("dxs/thief", refused, guest)
        assert "placement" not in kube.get("dxs", "thief", guest)["status"]
        delete_and_wait(voice, "dxs/thief", f"--as={user}", namespace=guest)
        assert kube.get("dxs", "private", namespace)["status"]["phase"] == "Ready"


# --- the end: last, since it takes the release away ----------------------------------------------


async def test_an_uninstall_ends_calls(voice: Voice) -> None:
    """While somebody talks and somebody else could. Of both nothing stays, and nothing of the
    release; the pool is left, as ever."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    kube.apply([named("talking"), named("waiting")], namespace)
    for name in ("talking", "waiting"):
        kube.wait(f"dxs/{name}", "condition=Ready", namespace)
    async with calling(voice, "talking") as caller:
        await caller.until_unit(3)
        removal = asyncio.create_task(asyncio.to_thread(uninstall, voice.cluster, namespace))
        farewell = await caller.until(
            lambda event: event["type"] == "session.closed", "the session's end"
        )
        assert farewell["reason"] not in ("", "parked")
        assert farewell["message"]
        caller.assert_whole()
        await removal
    assert kube.items("dxs", namespace) == []
    assert kube.find("secret", f"{RELEASE}-ledger", namespace) is None
    for name in ("talking-token", "waiting-token"):
        gone = partial(kube.find, "secret", name, namespace)
        until(lambda gone=gone: gone() is None, f"the collection of Secret {name}")
    release = f"app.kubernetes.io/instance={RELEASE}"
    kinds = "deployments,jobs,services,serviceaccounts,roles,rolebindings,configmaps,secrets"
    assert kube.items(kinds, namespace, release) == []
    until(lambda: kube.items("pods", namespace, release) == [], "the end of the release's pods")
    assert kube.find("dxp", voice.pool, namespace) is not None
    assert len(kube.items("pods", namespace, SIDECARS)) == 2
