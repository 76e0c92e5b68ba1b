"""How a checkpoint gets into a pool's claim, on nodes: what examples/ and docs/install.md say.

The manifests are as they are there, but for the image: this machine's program is mounted into a
small one (see sidecar_pods).
"""

from pathlib import Path

import pytest
import yaml
from support.clusters import Mounts, OwnCluster
from support.kube import Json
from support.releases import EXAMPLES
from support.sidecar_pods import load_sidecar_image, share_program

from duplex_sidecar.checkpoint.behaviour import read_behaviours
from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.report import require_complete
from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.checkpoint.voice import load_voice, save_voice, seeded_voice
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.session.model import fingerprint_of

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

FILLED_WITHIN_S = 600.0
READY_WITHIN_S = 300.0


def with_this_program(pod_spec: Json, image: str, program: Mounts) -> None:
    (container,) = pod_spec["containers"]
    container["image"] = image
    container["volumeMounts"] += program.mounts
    pod_spec["volumes"] += program.volumes


def documents(file: str) -> list[Json]:
    return list(yaml.safe_load_all((EXAMPLES / file).read_text()))


def provided(cluster: OwnCluster, namespace: str, place: Path, *claims: str) -> dict[str, Path]:
    folders = {claim: place / claim for claim in claims}
    for folder in folders.values():
        folder.mkdir()
    cluster.provide(namespace, folders)
    return folders


def test_the_job_fills_its_claim(own_cluster: OwnCluster, namespace: str, tmp_path: Path) -> None:
    folder = provided(own_cluster, namespace, tmp_path, "tiny-checkpoint")["tiny-checkpoint"]
    program = share_program(own_cluster, namespace)
    claim, job = documents("claim-tiny.yaml")
    with_this_program(job["spec"]["template"]["spec"], load_sidecar_image(own_cluster), program)
    own_cluster.apply([claim, job], namespace)
    own_cluster.wait("job/tiny-checkpoint", "condition=Complete", namespace, FILLED_WITHIN_S)
    # Its weights are fitted: they may differ in a last bit from those that another machine makes.
    require_complete(folder)
    assert read_behaviours(folder)


def test_claims_are_filled_by_hand(own_cluster: OwnCluster, namespace: str, tmp_path: Path) -> None:
    """A checkpoint that somebody has, and a voice, by the commands of docs/install.md."""
    make_tiny(default_checkpoint(), cache_dir=default_cache_dir())
    config = read_config(default_checkpoint())
    voice = save_voice(tmp_path / "mine", seeded_voice("anna", 100, 5, config.token2wav))
    folders = provided(own_cluster, namespace, tmp_path, "minicpm-o-4-5", "voices")
    program = share_program(own_cluster, namespace)
    *claims, fill = documents("claims.yaml")
    with_this_program(fill["spec"], load_sidecar_image(own_cluster), program)
    own_cluster.apply([*claims, fill], namespace)
    own_cluster.wait("pod/fill", "condition=Ready", namespace, READY_WITHIN_S)
    own_cluster.kubectl("cp", f"{default_checkpoint()}/.", f"{namespace}/fill:/checkpoint")
    own_cluster.kubectl("cp", str(voice), f"{namespace}/fill:/voices/anna.safetensors")
    said = own_cluster.execute("fill", namespace, "duplex", "checkpoint", "report", "/checkpoint")
    assert said
    assert fingerprint_of(folders["minicpm-o-4-5"]) == fingerprint_of(default_checkpoint())
    assert load_voice(default_checkpoint(), "anna", config.token2wav, folders["voices"])
    own_cluster.kubectl("delete", "pod", "fill", "--now", namespace=namespace)
