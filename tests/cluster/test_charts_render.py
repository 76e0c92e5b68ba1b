"""The checked-in manifests are what Helm makes of the chart today. Needs Helm alone."""

import difflib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import cluster, render_charts

pytestmark = pytest.mark.cluster

SETS = sorted(render_charts.VALUES.glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    """Compiles it if it is not in the cache."""
    try:
        render_charts.helm()
    except render_charts.HelmMissingError:
        cluster.build(("helm",))


@pytest.mark.parametrize("values", SETS, ids=lambda path: path.stem)
def test_the_golden_manifests_are_what_helm_renders(values: Path) -> None:
    golden = (render_charts.GOLDEN / values.name).read_text(encoding="utf-8")
    made = render_charts.stable(render_charts.objects(values))
    differing = difflib.unified_diff(golden.splitlines(), made.splitlines(), lineterm="", n=2)
    assert "\n".join(differing) == "", "python -m scripts.render_charts writes them anew"


def test_the_example_values_are_rendered() -> None:
    values = render_charts.ROOT / "examples" / "helm" / "values.yaml"
    kinds = {found["kind"] for found in render_charts.objects(values)}
    assert {"PodMonitor", "NetworkPolicy", "ConfigMap", "Deployment"} <= kinds


def test_the_example_ingress_leads_to_the_gateway() -> None:
    values = render_charts.ROOT / "examples" / "helm" / "ingress.yaml"
    objects = render_charts.objects(values)
    (ingress,) = [found["spec"] for found in objects if found["kind"] == "Ingress"]
    (rule,) = ingress["rules"]
    assert ingress["tls"] == [{"hosts": [rule["host"]], "secretName": "voice-tls"}]
    (path,) = rule["http"]["paths"]
    backend = path["backend"]["service"]
    (service,) = [
        found["spec"]
        for found in objects
        if found["kind"] == "Service" and found["metadata"]["name"] == backend["name"]
    ]
    assert backend["port"]["name"] in {port["name"] for port in service["ports"]}
    (operator,) = [
        found["spec"]["template"]["spec"]["containers"][0]
        for found in objects
        if found["kind"] == "Deployment" and found["metadata"]["name"] == "talk-operator"
    ]
    endpoint = {each["name"]: each.get("value") for each in operator["env"]}
    assert endpoint["DUPLEX_GATEWAY_ENDPOINT"] == f"wss://{rule['host']}{path['path']}"


def notes(*values: str) -> list[str]:
    """The commands that the chart prints."""
    command = [render_charts.helm(), "install", "talk", str(render_charts.CHART)]
    command += ["-n", "duplex-system", "--dry-run=client", *values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.partition("Next:\n")[2].strip().splitlines()


@pytest.mark.parametrize(
    ("values", "home"),
    [
        ((), "duplex-system"),
        (("-f", str(render_charts.ROOT / "examples" / "helm" / "values.yaml")), "voice"),
        (("--set", "networkPolicy.poolNamespaces={voice,duplex-system}"), "duplex-system"),
        (("--set", "watchNamespaces={voice,lab}"), "voice"),
        (
            ("--set", "watchNamespaces={voice,lab},networkPolicy.poolNamespaces={other,lab}"),
            "lab",
        ),
        (("--set", "watchNamespaces={voice},networkPolicy.poolNamespaces={other}"), "voice"),
    ],
    ids=["bare", "example", "own-among", "watched", "both", "disjoint"],
)
def test_the_notes_name_a_namespace_whose_pods_are_closed_off(
    values: tuple[str, ...], home: str
) -> None:
    pool, session, test = (command.strip() for command in notes(*values))
    assert pool == f"kubectl -n {home} apply -f examples/pool.yaml"
    assert session.startswith(f"kubectl -n {home} apply -f examples/session.yaml")
    assert test.startswith("helm test talk -n duplex-system")


def test_helm_refuses_values_by_the_schema() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render_charts.objects(SETS[0], "--set", "gateway.replica=2")
    assert "additional properties 'replica' not allowed" in refused.value.stderr


def test_a_default_pool_wants_its_kind_first() -> None:
    command = [render_charts.helm(), "template", "talk", str(render_charts.CHART)]
    command += ["--values", str(render_charts.VALUES / "everything.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "install the chart duplex-crds first" in done.stderr


def test_both_charts_pass_lint() -> None:
    charts = [
        str(chart) for chart in (render_charts.CHART, render_charts.CHART.parent / "duplex-crds")
    ]
    command = [render_charts.helm(), "lint", "--strict", *charts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    """A release, a namespace or a pool may be called 12; YAML would have a number of it."""
    monitor = {"enabled": True, "pools": [{"namespace": "789", "name": "12"}]}
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"watchNamespaces": ["789"], "podMonitor": monitor}))
    chart = str(render_charts.CHART)
    command = [render_charts.helm(), "template", "123", chart, "-n", "456", "-f", str(values)]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {123, 456, 789, 12}.isdisjoint(numbers_in(list(yaml.safe_load_all(made))))


@pytest.mark.parametrize("pool", ["operator", "gateway"])
def test_a_pools_monitor_is_never_called_as_another(tmp_path: Path, pool: str) -> None:
    pools = [{"namespace": render_charts.NAMESPACE, "name": pool}]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"podMonitor": {"enabled": True, "pools": pools}}))
    monitors = [o for o in render_charts.objects(values) if o["kind"] == "PodMonitor"]
    assert len({each["metadata"]["name"] for each in monitors}) == len(monitors) == 3


def numbers_in(found: Any) -> set[int]:
    if isinstance(found, dict | list):
        inner = found.values() if isinstance(found, dict) else found
        return set().union(*map(numbers_in, inner))
    return {found} if isinstance(found, int) else set()
