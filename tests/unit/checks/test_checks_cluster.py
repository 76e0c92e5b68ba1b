"""Which cluster the tests get, and what the recipe needs."""

import stat
from pathlib import Path

import pytest

from scripts import cluster

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)


def test_a_given_cluster_is_used() -> None:
    assert cluster.foreign_kubeconfig({"KUBECONFIG": "/etc/kube/config"}) == Path(
        "/etc/kube/config"
    )


@pytest.mark.parametrize("environment", [{}, {"KUBECONFIG": ""}])
def test_without_one_there_is_none(environment: dict[str, str]) -> None:
    assert cluster.foreign_kubeconfig(environment) is None


def test_the_own_cluster_is_not_taken_for_a_given_one() -> None:
    """`make cluster-up` prints this very line to be pasted."""
    environment = {"KUBECONFIG": str(cluster.own_kubeconfig())}
    assert cluster.foreign_kubeconfig(environment) is None


def test_nodes_need_root_or_a_given_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "needs root" in str(cluster.why_not())
    monkeypatch.setenv("KUBECONFIG", "/etc/kube/config")
    assert cluster.why_not() is None


def test_a_cluster_whose_first_process_is_gone_is_not_up() -> None:
    pids = cluster.state_folder() / "pids"
    pids.mkdir(parents=True)
    (cluster.state_folder() / "ready").touch()
    (pids / "init").write_text("1")
    (pids / "init.started").write_text("not when process 1 started")
    assert not cluster.is_up()


@pytest.mark.parametrize(
    ("printed", "release"),
    [("go version go1.26.8 linux/amd64", (1, 26)), ("go version go1.9", (1, 9)), ("?", (0, 0))],
)
def test_the_release_of_go_is_read(tmp_path: Path, printed: str, release: tuple[int, int]) -> None:
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\necho '{printed}'\n")
    go.chmod(stat.S_IRWXU)
    assert cluster.go_release(go) == release


@pytest.mark.parametrize("script", ["build", "up", "down", "enter"])
def test_the_scripts_of_the_recipe_can_be_run(script: str) -> None:
    assert (cluster.RECIPE / script).stat().st_mode & stat.S_IXUSR
