"""Holds a conversation through the gateway, as a client would: what `helm test` runs.

Makes a DuplexSession, waits until it is ready, sends a few units of faint noise, wants each of
them answered, closes, and deletes the session again. Exit status 0: it worked; 1: the last line
says what did not. Talks to the API server by plain HTTPS with the pod's own token.
"""

import asyncio
import base64
import json
import os
import random
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

ACCOUNT = Path(os.environ.get("TEST_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
API_SERVER = os.environ.get("TEST_API_SERVER", "https://kubernetes.default.svc")
GROUP = "apis/duplex.dev/v1alpha1"
UNITS = 3
UNIT_SAMPLES = 16_000
READY_WITHIN_S = float(os.environ.get("TEST_READY_WITHIN_S", "180"))
ANSWER_WITHIN_S = 60.0
GONE_WITHIN_S = 40.0
POLL_S = 1.0


class Failed(Exception):
    """What went wrong, in a sentence."""


class Cluster:
    """The objects of one namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._context = (
            ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
            if API_SERVER.startswith("https:")
            else None
        )

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """`path` without its group: "secrets/name". Empty answer: there is no such object."""
        group = "api/v1" if path.startswith("secrets") else GROUP
        request = urllib.request.Request(
            f"{API_SERVER}/{group}/namespaces/{self._namespace}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404 and method != "POST":
                return {}
            raise Failed(f"{method} {path}: {error.code} {_message(error)}") from None
        except urllib.error.URLError as error:
            raise Failed(f"the API server does not answer: {error.reason}") from None

    def delete(self, name: str) -> None:
        """Ends when the session is gone."""
        until = time.monotonic() + GONE_WITHIN_S
        while self.call("DELETE", f"duplexsessions/{name}"):
            if time.monotonic() > until:
                raise Failed(f"session {name} is not gone {GONE_WITHIN_S:.0f} s after its deletion")
            time.sleep(POLL_S)

    def pool(self) -> str:
        """A pool with a free slot, else any."""
        pools = self.call("GET", "duplexpools?limit=100").get("items", [])
        if not pools:
            raise Failed(
                f"there is no DuplexPool in namespace {self._namespace}: apply one,"
                " or name its pool in the value test.pool"
            )
        best = max(pools, key=lambda pool: pool.get("status", {}).get("freeSlots", 0))
        return best["metadata"]["name"]

    def ready(self, name: str) -> dict[str, Any]:
        """The session, once it is ready to be dialled."""
        until = time.monotonic() + READY_WITHIN_S
        while True:
            session = self.call("GET", f"duplexsessions/{name}")
            status = session.get("status", {})
            for condition in status.get("conditions", []):
                if condition["type"] == "Ready" and condition["status"] == "True":
                    return session
            ended = status.get("phase") in ("Ending", "Ended")
            if not session or ended or time.monotonic() > until:
                said = " ".join(
                    str(status[field])
                    for field in ("phase", "reason", "message")
                    if status.get(field)
                )
                raise Failed(
                    f"session {name} is not ready: {said or 'no operator has looked at it'}"
                )
            time.sleep(POLL_S)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error).get("message", error.reason))
    except ValueError:
        return str(error.reason)


def open_session(cluster: Cluster, name: str) -> tuple[str, str]:
    """(id, token) of a session that is ready."""
    cluster.delete(name)
    manifest = {
        "apiVersion": "duplex.dev/v1alpha1",
        "kind": "DuplexSession",
        "metadata": {"name": name},
        "spec": {
            "poolRef": {"name": os.environ.get("TEST_POOL") or cluster.pool()},
            "lifecycle": {"idleTimeout": "2m", "maxDuration": "10m"},
        },
    }
    cluster.call("POST", "duplexsessions", manifest)
    session = cluster.ready(name)
    secret = session["status"].get("tokenSecret", {"name": f"{name}-token", "key": "token"})
    data = cluster.call("GET", f"secrets/{secret['name']}").get("data", {})
    if secret["key"] not in data:
        raise Failed(f"Secret {secret['name']} has no key {secret['key']}")
    return session["metadata"]["uid"], base64.b64decode(data[secret["key"]]).decode()


def noise(seed: int) -> str:
    """One unit of faint noise: 16-bit samples at 16 kHz, base64."""
    draw = random.Random(seed)
    samples = (draw.randint(-200, 200) for _ in range(UNIT_SAMPLES))
    pcm = b"".join(sample.to_bytes(2, "little", signed=True) for sample in samples)
    return base64.b64encode(pcm).decode()


async def talk(session: str, token: str) -> list[float]:
    """Milliseconds of each unit, as the server counts them."""
    url = os.environ["TEST_GATEWAY_URL"]
    options: dict[str, Any] = {}
    certificate = os.environ.get("TEST_CERTIFICATE_FILE")
    if certificate:
        # The very certificate that the gateway was given, whoever signed it.
        context = ssl.create_default_context()
        context.load_verify_locations(certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        options = {"ssl": context, "server_hostname": os.environ["TEST_SERVER_NAME"]}
    async with connect(
        f"{url}?session={session}",
        additional_headers={"Authorization": f"Bearer {token}"},
        proxy=None,
        max_size=4 * 1024 * 1024,
        **options,
    ) as socket:
        heard = {"format": {"type": "audio/pcm", "rate": UNIT_SAMPLES}}
        update = {"type": "session.update"}
        update["session"] = {"type": "realtime", "audio": {"input": heard}}
        await socket.send(json.dumps(update))
        for unit in range(UNITS):
            append = {"type": "input_audio_buffer.append", "audio": noise(unit)}
            await socket.send(json.dumps(append))
        await socket.send(json.dumps({"type": "session.close"}))
        walls_ms: list[float] = []
        async for message in socket:
            event = json.loads(message)
            if event["type"] == "duplex.unit":
                walls_ms.append(event["wall_ms"])
            elif event["type"] == "error":
                raise Failed(f"{event['error']['code']}: {event['error']['message']}")
            elif event["type"] == "session.closed":
                break
        return walls_ms


def converse() -> str:
    name = os.environ["TEST_SESSION"]
    cluster = Cluster(os.environ["TEST_NAMESPACE"])
    began = time.monotonic()
    try:
        session, token = open_session(cluster, name)
        ready_s = time.monotonic() - began
        walls_ms = asyncio.run(asyncio.wait_for(talk(session, token), ANSWER_WITHIN_S))
    except TimeoutError:
        raise Failed(f"no answer to {UNITS} units within {ANSWER_WITHIN_S:.0f} s") from None
    except (OSError, WebSocketException) as error:
        raise Failed(f"the gateway: {type(error).__name__}: {error}") from None
    finally:
        cluster.delete(name)
    if len(walls_ms) < UNITS:
        raise Failed(
            f"{len(walls_ms)} of {UNITS} units were answered before the conversation closed"
        )
    walls = ", ".join(f"{wall:.0f}" for wall in walls_ms)
    return f"session ready after {ready_s:.1f} s; units took {walls} ms; closed; deleted"


def main() -> int:
    try:
        print(f"A conversation was held: {converse()}")
    except Failed as failure:
        print(f"FAILED: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
