"""What can be said of the charts without Helm."""

import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CHARTS = ("duplex", "duplex-crds")


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_has_the_version_of_the_package(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((ROOT / "charts" / name / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["name"], chart["version"], chart["appVersion"]) == (
        name,
        project["version"],
        project["version"],
    )


def test_the_crd_chart_holds_the_two_kinds_and_nothing_to_render() -> None:
    templates = sorted((ROOT / "charts" / "duplex-crds" / "templates").iterdir())
    assert [path.name for path in templates] == ["duplexpools.yaml", "duplexsessions.yaml"]
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert text == (ROOT / "crds" / path.name).read_text(encoding="utf-8")
        crd = yaml.safe_load(text)
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
