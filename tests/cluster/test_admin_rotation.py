"""A pool's admin token and certificate grow old under a conversation: the operator makes new ones,
the kubelet brings the token into pods that run, and real sidecars go by it."""

import asyncio
import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
from support.callers import Caller, calling
from support.kube import Json, until
from support.releases import SIDECARS, Voice, applied, delete_and_wait, named
from support.sidecar_pods import READY_TIMEOUT_S

from duplex_operator.names import (
    ADMIN_PORT,
    CA_KEY,
    TLS_CERT_KEY,
    TOKEN_KEY,
    admin_secret_name,
)
from duplex_operator.objects import timestamp
from duplex_operator.resources.pool_secrets import (
    ANNOTATION_CERTIFICATE_MADE,
    ANNOTATION_TOKEN_MADE,
    CERTIFICATE_RENEWED_AFTER_MS,
    PREVIOUS_TOKEN_KEPT_MS,
    PREVIOUS_TOKEN_KEY,
    TOKEN_LIFE_MS,
)
from duplex_sidecar.admin.tokens import OLD_TOKEN_VALID_S

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

OPERATORS = "app.kubernetes.io/component=operator"
ROTATED_WITHIN_S = 180.0
KUBELET_WITHIN_S = 300.0
"""A kubelet looks at what it has mounted once in a minute and a bit."""
SLACK_S = 120.0
LONG_TALK_S = 1_500.0


class Admin:
    """The admin port of one pod, by whatever token and authority."""

    def __init__(self, voice: Voice, pod: str) -> None:
        self._voice, self._pod = voice, pod

    def status(self, token: str, authorities: bytes) -> int:
        """Of its answer. Raises URLError where the pod's certificate is not believed."""
        trusting = ssl.create_default_context(cadata=authorities.decode())
        # The certificate is for the pool's name, and we come by loopback: only its signer counts.
        trusting.check_hostname = False
        kube, namespace = self._voice.cluster, self._voice.namespace
        with kube.port_forward(f"pod/{self._pod}", ADMIN_PORT, namespace) as port:
            request = urllib.request.Request(
                f"https://127.0.0.1:{port}/admin/v1/sessions",
                headers={"authorization": f"Bearer {token}"},
            )
            try:
                with urllib.request.urlopen(request, timeout=60, context=trusting) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

    def believed(self, token: str, authorities: bytes) -> bool:
        try:
            return self.status(token, authorities) == 200
        except urllib.error.URLError:
            return False


def secret_of(voice: Voice) -> dict[str, bytes]:
    return voice.cluster.secret(admin_secret_name(voice.pool), voice.namespace)


def pods_of(voice: Voice) -> dict[str, str]:
    """Of the pool: names by uid, since a name may come again."""
    pods = voice.cluster.items("pods", voice.namespace, SIDECARS)
    return {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods}


def age(voice: Voice) -> None:
    """As if token and certificate had been made long ago."""

    def before(life_ms: int) -> str:
        made = datetime.now(UTC) - timedelta(milliseconds=life_ms, days=1)
        return timestamp(round(made.timestamp() * 1000))

    annotations = {
        ANNOTATION_TOKEN_MADE: before(TOKEN_LIFE_MS),
        ANNOTATION_CERTIFICATE_MADE: before(CERTIFICATE_RENEWED_AFTER_MS),
    }
    change: Json = {"metadata": {"annotations": annotations}}
    voice.cluster.patch("secret", admin_secret_name(voice.pool), change, voice.namespace)


def restart_operators(voice: Voice) -> None:
    delete_and_wait(voice, "pods", f"--selector={OPERATORS}", namespace=voice.namespace)


async def heard_by_the_operator(voice: Voice, caller: Caller) -> None:
    """It has the feed of the session's pod: the status counts a unit that came just now."""
    since = caller.last_unit
    kube, namespace = voice.cluster, voice.namespace
    priority: int = kube.get("dxs", "rotated", namespace)["spec"].get("priority", 0) + 1
    await caller.until_unit(since + 2)
    kube.patch("dxs", "rotated", {"spec": {"priority": priority}}, namespace)

    def counted() -> bool:
        status: Json = kube.get("dxs", "rotated", namespace)["status"]
        return status["units"] > since and status["phase"] == "Active"

    await asyncio.to_thread(until, counted, "the unit in the status")


async def test_token_and_certificate_are_rotated_under_a_call(voice: Voice) -> None:
    kube, namespace = voice.cluster, voice.namespace
    await asyncio.to_thread(voice.await_free, 2)
    with applied(voice, named("rotated")):
        kube.wait("dxs/rotated", "condition=Ready", namespace)
        async with calling(voice, "rotated", seconds=LONG_TALK_S) as caller:
            await caller.until_unit(2)
            pod = voice.pod_of("rotated")
            admin = Admin(voice, pod)
            first = secret_of(voice)
            old = first[TOKEN_KEY].decode()
            assert await asyncio.to_thread(admin.status, old, first[CA_KEY]) == 200

            age(voice)
            await asyncio.to_thread(restart_operators, voice)
            await asyncio.to_thread(
                until,
                lambda: secret_of(voice)[TOKEN_KEY] != first[TOKEN_KEY],
                "a new token",
                ROTATED_WITHIN_S,
            )
            second = secret_of(voice)
            new = second[TOKEN_KEY].decode()
            assert second[PREVIOUS_TOKEN_KEY] == first[TOKEN_KEY]
            assert second[TLS_CERT_KEY] != first[TLS_CERT_KEY]
            assert first[CA_KEY] in second[CA_KEY]
            # Whatever certificate the pod shows is believed. It takes the old token alone until its
            # kubelet has brought the new one; from then on both.
            await heard_by_the_operator(voice, caller)
            await asyncio.to_thread(
                until,
                lambda: admin.status(new, second[CA_KEY]) == 200,
                "the new token in the pod",
                KUBELET_WITHIN_S,
                1.0,
            )
            known_s = asyncio.get_running_loop().time()
            assert await asyncio.to_thread(admin.status, old, second[CA_KEY]) == 200

            # A pod that begins now has the new certificate, and the operator believes it.
            known = await asyncio.to_thread(pods_of, voice)
            (idle,) = set(known.values()) - {pod}
            await asyncio.to_thread(delete_and_wait, voice, f"pod/{idle}", namespace=namespace)

            def others() -> list[str]:
                return [name for uid, name in pods_of(voice).items() if uid not in known]

            (fresh,) = await asyncio.to_thread(until, others, "another pod")
            ready = (f"pod/{fresh}", "condition=Ready", namespace, READY_TIMEOUT_S)
            await asyncio.to_thread(kube.wait, *ready)
            await asyncio.to_thread(voice.await_free, 1)
            newest = second[CA_KEY].removesuffix(first[CA_KEY])
            assert await asyncio.to_thread(Admin(voice, fresh).status, new, newest) == 200
            # The one that talks shows it, too, to whoever connects from now on.
            await asyncio.to_thread(
                until,
                lambda: admin.believed(new, newest),
                "the new certificate in the pod",
                KUBELET_WITHIN_S,
                1.0,
            )

            # The overlap ends on the pod and in the Secret. Nobody who talks notices.
            left_s = known_s + OLD_TOKEN_VALID_S - asyncio.get_running_loop().time()
            await asyncio.to_thread(
                until,
                lambda: admin.status(old, second[CA_KEY]) == 401,
                "the end of the old token",
                max(left_s, 0.0) + SLACK_S,
                2.0,
            )
            await asyncio.to_thread(
                until,
                lambda: PREVIOUS_TOKEN_KEY not in secret_of(voice),
                "a Secret without the old token",
                PREVIOUS_TOKEN_KEPT_MS / 1000,
                2.0,
            )
            assert await asyncio.to_thread(admin.status, new, second[CA_KEY]) == 200
            await heard_by_the_operator(voice, caller)
            caller.assert_whole()
            assert voice.pod_of("rotated") == pod
