"""The sidecar's image on CPUs: built from its Dockerfile, and a conversation with engines in it.

Its containers are those of examples/claim-tiny.yaml and of a pod of examples/pool-cpu.yaml.
"""

import hashlib
import json
import secrets
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from support.image_containers import (
    Container,
    Surroundings,
    image_config,
    running_container,
)
from support.kube import Json, until
from support.material import manifest, speech
from support.releases import EXAMPLES, example

from duplex_api.pool import PoolSpec
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.names import TLS_CERT_KEY, TLS_KEY_KEY, TOKEN_KEY, admin_server_name
from duplex_operator.resources.pods import PoolIdentity, pod_blueprint
from duplex_operator.resources.pool_secrets import PoolSecret, next_secret
from duplex_operator.sidecar_client import AdminAddress, AdminCredentials, SidecarClient
from duplex_sidecar.client.conversation import Conversation
from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3_000)]

POOL = PoolIdentity("talk", "demo", "11111111-2222-3333-4444-555555555555")
USER_ID = 65532
MAKE_TIMEOUT_S = 1_200.0
READY_TIMEOUT_S = 1_200.0
TALK_S = 12.0


@pytest.fixture(scope="module")
def checkpoint(sidecar_image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job of examples/claim-tiny.yaml leaves in its claim."""
    claim = tmp_path_factory.mktemp("checkpoint")
    claim.chmod(0o777)
    documents = yaml.safe_load_all((EXAMPLES / "claim-tiny.yaml").read_text())
    (job,) = (each for each in documents if each["kind"] == "Job")
    pod: Json = job["spec"]["template"]["spec"]
    folder = tmp_path_factory.mktemp("job")
    with running_container(
        sidecar_image, pod, folder, Surroundings({"checkpoint": claim})
    ) as container:
        status = container.await_end(MAKE_TIMEOUT_S)
        assert status == 0, container.log
    return claim


@pytest.fixture
def ledger_url(tmp_path: Path) -> Iterator[str]:
    valkey = EmbeddedValkey(tmp_path / "ledger", port=(port := free_port()))
    valkey.start()
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        valkey.stop()


def test_what_it_says_of_its_containers(sidecar_image: str) -> None:
    config = image_config(sidecar_image)
    assert config["User"] == f"{USER_ID}:{USER_ID}"
    assert config["Cmd"] == ["duplex", "serve", "--from-environment"]
    assert not config.get("Entrypoint")
    assert not [each for each in config["Env"] if each.startswith(("UV_", "SSL_"))]


async def test_a_conversation_with_engines(
    sidecar_image: str, checkpoint: Path, ledger_url: str, tmp_path: Path
) -> None:
    """As restricted as in a pool, and what it answers is heard outside."""
    secret, _ = next_secret(None, POOL, ledger_url, int(time.time() * 1000))
    door, admin = free_port(), free_port()
    surroundings = Surroundings(
        {"duplex-checkpoint": checkpoint, "duplex-admin": admin_folder(tmp_path, secret)},
        {
            "POD_IP": "127.0.0.1",
            "DUPLEX_POD_UID": POOL.uid,
            "DUPLEX_POD_NAME": "demo-abc234",
            "DUPLEX_REDIS_URL": ledger_url,
            # Of the machine's network, which is not the pod's own.
            "DUPLEX_HOST": "127.0.0.1",
            "DUPLEX_PORT": str(door),
            "DUPLEX_ADMIN_PORT": str(admin),
            "DUPLEX_ADVERTISE": f"127.0.0.1:{door}",
        },
    )
    resolved = resolve_pool(
        PoolSpec.model_validate(example("pool-cpu.yaml")["spec"] | {"slots": 1})
    )
    pod = pod_blueprint(POOL, resolved, sidecar_image).named("demo-abc234")["spec"]
    with running_container(sidecar_image, pod, tmp_path / "sidecar", surroundings) as container:
        await_ready(container, door)
        for process in container.processes():
            assert_restricted(process)
        address = AdminAddress("127.0.0.1", admin, admin_server_name(POOL.namespace, POOL.name))
        client = SidecarClient(address, AdminCredentials(secret.token, secret.ca_pem))
        token = secrets.token_urlsafe(16)
        try:
            await client.put_session(
                "s-image", manifest(), hashlib.sha256(token.encode()).hexdigest(), 1
            )
            base_url = f"http://127.0.0.1:{door}/v1"
            talk = await Conversation(base_url, "s-image", token, speech(TALK_S)).run()
        finally:
            await client.close()
        assert [unit["unit"] for unit in talk.units] == list(range(1, int(TALK_S) + 1))
        assert "speak" in {unit["decision"] for unit in talk.units}
        assert sum(len(reply.pcm_s16le) for reply in talk.replies) > 0
        assert talk.errors == []
        assert container.stop() == 0, container.log


def admin_folder(folder: Path, secret: PoolSecret) -> Path:
    """The pool's admin Secret as pods mount it."""
    made = folder / "admin"
    made.mkdir()
    texts = {
        TOKEN_KEY: secret.token,
        TLS_CERT_KEY: secret.certificate_pem,
        TLS_KEY_KEY: secret.key_pem,
    }
    for name, text in texts.items():
        (made / name).write_text(text)
        (made / name).chmod(0o444)
    return made


def await_ready(container: Container, port: int) -> None:
    def ready() -> bool:
        assert container.process.poll() is None, container.log
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return bool(json.load(answer)["ready"])
        except OSError:
            return False

    until(ready, "the sidecar's readiness", READY_TIMEOUT_S, poll_s=1.0)


def assert_restricted(process: psutil.Process) -> None:
    """It has what a pod under `restricted` may have, and its root is read-only."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert set(status["Uid"].split()) == {str(USER_ID)}
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    mounts = Path(f"/proc/{process.pid}/mounts").read_text().splitlines()
    (root,) = (line.split()[3] for line in mounts if line.split()[1] == "/")
    assert "ro" in root.split(",")
