"""A cluster that is ended leaves nothing on the machine."""

import os
import subprocess
from pathlib import Path

import pytest
from support.clusters import OwnCluster
from support.kube import until

from scripts import cluster as recipe

pytestmark = pytest.mark.cluster


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout


def namespaces(kind: str) -> dict[str, set[int]]:
    """Of every process: which namespace of a kind, and the processes in it."""
    found: dict[str, set[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.setdefault(os.readlink(folder / "ns" / kind), set()).add(int(folder.name))
        except OSError:
            continue
    return found


def cgroups(name: str) -> list[Path]:
    top = Path("/sys/fs/cgroup")
    return [folder for folder in (top / name, *top.glob(f"*/{name}")) if folder.exists()]


def machine() -> dict[str, object]:
    """What a cluster could have changed outside its namespaces."""
    links = [line.split(":")[1].strip() for line in output("ip", "-o", "link").splitlines()]
    return {
        "links": links,
        "routes": output("ip", "route"),
        "rules": [line for line in output("iptables-save").splitlines() if line.startswith("-A")],
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "named namespaces": output("ip", "netns", "list"),
    }


@pytest.mark.long
@pytest.mark.usefixtures("own_cluster")
def test_nothing_is_left(tmp_path: Path) -> None:
    """A second cluster beside the first, of one node, is started and ended."""
    state = tmp_path / "state"
    before = machine()
    output(recipe.RECIPE / "up", recipe.binaries_folder(), state, "1")
    init = (state / "pids" / "init").read_text().strip()
    space = os.readlink(f"/proc/{init}/ns/pid")
    inside = namespaces("pid")[space]
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in inside}
    networks.discard(os.readlink("/proc/self/ns/net"))
    cgroup = output(
        "bash", "-c", f'state={state}; . {recipe.RECIPE}/lib.sh; echo "$cgroup"'
    ).strip()
    assert len(inside) > 8
    assert len(networks) == 2
    assert cgroups(cgroup)

    output(recipe.RECIPE / "down", state)

    until(lambda: space not in namespaces("pid"), "the end of the processes")
    assert not networks & set(namespaces("net"))
    assert not [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line
    ]
    assert not cgroups(cgroup)
    assert not state.exists()
    assert machine() == before


def test_up_again_changes_nothing(own_cluster: OwnCluster) -> None:
    node = own_cluster.get("node", "node1")["metadata"]["uid"]
    assert recipe.up() == own_cluster.kubeconfig
    assert own_cluster.get("node", "node1")["metadata"]["uid"] == node
