"""The example pools: pods can be made of them."""

from pathlib import Path

import pytest
import yaml

from duplex_api.pool import DuplexPool
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.resources.pods import PoolIdentity, pod_blueprint

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
POOLS = sorted((ROOT / "examples").glob("pool*.yaml"))


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_a_pool_makes_pods(path: Path) -> None:
    pool = DuplexPool.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    identity = PoolIdentity("voice", pool.metadata.name, "uid")
    pod = pod_blueprint(identity, resolve_pool(pool.spec), "duplex-sidecar:0.1.0-cuda")
    [container] = pod.manifest["spec"]["containers"]
    assert container["image"].startswith("duplex-sidecar:0.1.0-")
    assert container["resources"]["requests"] or container["resources"]["limits"]
