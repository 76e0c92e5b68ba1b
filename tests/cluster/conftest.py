"""Fixtures of the cluster tier. `api_server` needs no root: it is an API server without nodes.

`cluster` has two nodes; `own_cluster` shares this machine's folders and ports with its pods. Where
there can be none, tests that ask for one do not run; the summary says so.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support.api_servers import ApiServer, running_api_server
from support.clusters import Cluster, OwnCluster, running_cluster
from support.releases import (
    POOL_VARIABLE,
    VALUES_VARIABLE,
    Voice,
    running_voice,
    told,
    voice_elsewhere,
    write_volume_voice,
)

from scripts import images
from scripts.cluster import API_PARTS, build, foreign_kubeconfig, install_packages, why_not

SIDECAR_IMAGE = "sidecar-cpu"

_NOT_RUN = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def bare_api_server() -> Iterator[ApiServer]:
    """Without our kinds."""
    with running_api_server() as server:
        yield server


@pytest.fixture(scope="session")
def api_server(bare_api_server: ApiServer) -> ApiServer:
    """With DuplexSession and DuplexPool installed. Pods are objects only: nothing runs them."""
    bare_api_server.install_crds()
    return bare_api_server


@pytest.fixture
def api_namespace(api_server: ApiServer) -> Iterator[str]:
    """A new namespace of the API server, under Pod Security `restricted`."""
    with api_server.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster of KUBECONFIG, else one of two nodes on this machine."""
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def own_cluster(cluster: Cluster) -> OwnCluster:
    """The one on this machine."""
    assert isinstance(cluster, OwnCluster)
    return cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new namespace of the cluster, under Pod Security `restricted`."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def voice(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Voice]:
    """A release that serves the whole cluster, whose gateway speaks TLS, and a pool of two real
    sidecars with one slot each and, on this machine's cluster, a volume of voices. For one module:
    another module's releases shall have their sessions for themselves."""
    if not isinstance(cluster, OwnCluster):
        elsewhere = told()
        assert elsewhere is not None
        with voice_elsewhere(cluster, elsewhere, tls=True) as running:
            yield running
        return
    voices = tmp_path_factory.mktemp("voices")
    voices.chmod(0o755)
    write_volume_voice(voices)
    with running_voice(cluster, tls=True, voices=voices) as running:
        yield running


@pytest.fixture(scope="session")
def sidecar_image() -> str:
    """The name of the sidecar's image for CPUs, in the store of `scripts.images`."""
    return images.images()[SIDECAR_IMAGE].tag


# --- what takes long the first time ---------------------------------------------------------------


def pytest_collection_finish(session: pytest.Session) -> None:
    """Install and compile here, where no test's timeout counts and the progress can be seen."""
    config = session.config
    if config.option.collectonly:
        return
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    wants_nodes = "cluster" in fixtures and foreign_kubeconfig() is None
    wants_image = "sidecar_image" in fixtures
    if wants_nodes or wants_image or "bare_api_server" in fixtures:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            if wants_nodes:
                install_packages()
            if wants_nodes or "bare_api_server" in fixtures:
                build(() if wants_nodes else API_PARTS)
            if wants_image:
                images.build((SIDECAR_IMAGE,))


# --- where there can be none ---------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons: dict[str, list[pytest.Item]] = {}
    for item in items:
        reason = _why_not_run(getattr(item, "fixturenames", ()))
        if reason is not None:
            reasons.setdefault(reason, []).append(item)
    left_out = [item for group in reasons.values() for item in group]
    config.stash[_NOT_RUN] = [
        f"{len(group)} tests NOT RUN: {reason}" for reason, group in reasons.items()
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _why_not_run(fixtures: tuple[str, ...] | list[str]) -> str | None:
    reason = why_not()
    if "cluster" in fixtures and reason is not None:
        return f"a cluster of nodes {reason}"
    if "sidecar_image" in fixtures:
        reason = images.why_not(SIDECAR_IMAGE)
        return None if reason is None else f"the sidecar's image {reason}"
    if foreign_kubeconfig() is None:
        return None
    if "own_cluster" in fixtures:
        return "they need this machine's own cluster (unset KUBECONFIG)"
    if "voice" in fixtures and told() is None:
        return f"they need {VALUES_VARIABLE} and {POOL_VARIABLE} (tests/cluster/README.md)"
    return None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """On a CI machine everything has to run."""
    if session.config.stash.get(_NOT_RUN, []) and os.environ.get("CI") == "true":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for sentence in config.stash.get(_NOT_RUN, []):
        terminalreporter.write_line(sentence, red=True)
