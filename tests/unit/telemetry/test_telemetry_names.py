"""Names are the product's: prefixed, distinct, and those that were promised."""

import re

import pytest

from duplex_sidecar.telemetry import names

pytestmark = pytest.mark.unit

CONSTANTS = {
    name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)
}


def test_every_name_has_the_products_prefix() -> None:
    own = {n: v for n, v in CONSTANTS.items() if not n.startswith("SERVICE_")}
    assert all(re.fullmatch(r"duplex(\.[a-z0-9_]+)+", value) for value in own.values())


@pytest.mark.parametrize("kind", ["SPAN_", "EVENT_", "METRIC_"])
def test_names_of_a_kind_are_distinct(kind: str) -> None:
    values = [value for name, value in CONSTANTS.items() if name.startswith(kind)]
    assert len(values) == len(set(values)) > 3


def test_the_promised_names() -> None:
    assert [step.value for step in names.StepName] == [
        "duplex.encode",
        "duplex.accept",
        "duplex.thinker",
        "duplex.commit",
        "duplex.talker",
        "duplex.code2wav",
    ]
    assert {cause.value for cause in names.RebuildCause} == {
        "slide",
        "truncation",
        "eviction",
        "engine_restart",
        "replica_restart",
        "move",
    }
