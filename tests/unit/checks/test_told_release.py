"""What a release on somebody's cluster is made of (`support/releases.py`)."""

from pathlib import Path

import pytest
from support.releases import POOL_VARIABLE, VALUES_VARIABLE, Told, told, told_pool

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples"


def file_of(folder: Path, *examples: str) -> Told:
    file = folder / "pool.yaml"
    file.write_text("---\n".join((EXAMPLES / name).read_text() for name in examples))
    return Told(folder / "values.yaml", file)


def test_nothing_is_told_unless_both_files_are_named() -> None:
    assert told({}) is None
    assert told({VALUES_VARIABLE: "values.yaml", POOL_VARIABLE: ""}) is None
    both = told({VALUES_VARIABLE: "values.yaml", POOL_VARIABLE: "pool.yaml"})
    assert both == Told(Path("values.yaml"), Path("pool.yaml"))


def test_the_pool_has_the_size_that_tests_want_and_is_otherwise_as_told(tmp_path: Path) -> None:
    others, pool = told_pool(file_of(tmp_path, "claim-tiny.yaml", "pool-cpu.yaml"))
    assert [each["kind"] for each in others] == ["PersistentVolumeClaim", "Job"]
    assert (pool["metadata"]["name"], pool["spec"]["replicas"], pool["spec"]["slots"]) == (
        "demo",
        2,
        1,
    )
    assert pool["spec"]["checkpoint"] == {"pvc": {"claimName": "tiny-checkpoint"}}


def test_a_file_without_a_pool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 pools"):
        told_pool(file_of(tmp_path, "claim-tiny.yaml"))
