"""The example pools, and what fills their claims: pods can be made of them, all the same way."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from duplex_api.pool import DuplexPool
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.resources.pods import PoolIdentity, pod_blueprint
from duplex_sidecar.cli.main import app

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
POOLS = sorted((ROOT / "examples").glob("pool*.yaml"))
CLAIMS = sorted((ROOT / "examples").glob("claim*.yaml"))
FILLED_BY = {"pool-cpu": "claim-tiny", "pool": "claims"}


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_a_pool_makes_pods(path: Path) -> None:
    pool = DuplexPool.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    identity = PoolIdentity("voice", pool.metadata.name, "uid")
    pod = pod_blueprint(identity, resolve_pool(pool.spec), "duplex-sidecar:0.1.0-cuda")
    [container] = pod.manifest["spec"]["containers"]
    assert container["image"].startswith("duplex-sidecar:0.1.0-")
    assert container["resources"]["requests"] or container["resources"]["limits"]


def objects(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def pod_spec(name: str) -> dict[str, Any]:
    """Of the job or the pod that fills the claims."""
    [spec] = [
        each["spec"]["template"]["spec"] if each["kind"] == "Job" else each["spec"]
        for each in objects(name)
        if each["kind"] != "PersistentVolumeClaim"
    ]
    return spec


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_every_claim_of_a_pool_is_made_and_mounted_to_be_filled(path: Path) -> None:
    [pool] = objects(path.stem)
    wanted = {pool["spec"]["checkpoint"]["pvc"]["claimName"]}
    wanted |= {found["claimName"] for found in [pool["spec"].get("voices")] if found}
    filler = FILLED_BY[path.stem]
    made = {
        each["metadata"]["name"]
        for each in objects(filler)
        if each["kind"] == "PersistentVolumeClaim"
    }
    spec = pod_spec(filler)
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    [container] = spec["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert made == wanted == set(claims.values())
    assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.stem)
def test_what_fills_a_claim_is_as_the_pools_pods_are(path: Path) -> None:
    """So that it may run in a restricted namespace, and they can read what it wrote."""
    [pool] = [name for name, filler in FILLED_BY.items() if filler == path.stem]
    document = DuplexPool.model_validate(objects(pool)[0])
    identity = PoolIdentity("voice", pool, "uid")
    blueprint = pod_blueprint(identity, resolve_pool(document.spec), "duplex-sidecar:0.1.0-cuda")
    theirs, ours = blueprint.manifest["spec"], pod_spec(path.stem)
    [container] = ours["containers"]
    [sidecar] = theirs["containers"]
    assert container["image"] == sidecar["image"]
    assert container["securityContext"] == sidecar["securityContext"]
    # A volume is written by its group alone.
    group = theirs["securityContext"]["runAsGroup"]
    assert ours["securityContext"] == theirs["securityContext"] | {"fsGroup": group}
    assert ours["automountServiceAccountToken"] is False


def test_the_job_calls_verbs_that_exist() -> None:
    [container] = pod_spec("claim-tiny")["containers"]
    [(group, verb)] = re.findall(r"duplex ([a-z]+) ([a-z]+)", container["command"][-1])
    assert verb in list(app[group])
