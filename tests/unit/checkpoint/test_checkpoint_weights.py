"""Seeded random weights."""

import math

import pytest
import torch

from duplex_sidecar.checkpoint import weights as weights_module
from duplex_sidecar.checkpoint.layout import weight_shapes
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.checkpoint.presets import full_config, tiny_config
from duplex_sidecar.checkpoint.weights import sinusoids, spread, transformer_tensor
from duplex_sidecar.checkpoint.weights_token2wav import flow_tensor, hift_tensor

pytestmark = pytest.mark.unit


def test_a_tensor_depends_on_its_name_and_the_seed_alone() -> None:
    first = spread("a", (3, 4), 0)
    assert torch.equal(first, spread("a", (3, 4), 0))
    assert not torch.equal(first, spread("b", (3, 4), 0))
    assert not torch.equal(first, spread("a", (3, 4), 1))


def test_large_tensors_repeat_a_block_without_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_BLOCK_ELEMENTS", 1009)
    large = spread("a", (64, 64), 0)
    assert large.shape == (64, 64)
    assert len({tuple(row) for row in large.tolist()}) == 64
    assert abs(float(large.std()) - 1) < 0.1


def test_every_tensor_has_its_shape_and_is_finite() -> None:
    config = tiny_config()
    for name, shape in weight_shapes(config).items():
        tensor = transformer_tensor(name, shape, config, 0)
        assert tuple(tensor.shape) == shape
        assert tensor.isfinite().all()
    for shapes, make in (
        (flow_shapes(config.token2wav), flow_tensor),
        (hift_shapes(config.token2wav), hift_tensor),
    ):
        for key, shape in shapes.items():
            tensor = make(key, shape, 0)
            assert tuple(tensor.shape) == shape
            assert tensor.isfinite().all()


def test_what_writes_into_a_deep_stack_is_scaled_down() -> None:
    name = "llm.model.layers.0.mlp.down_proj.weight"
    for config, layers in ((tiny_config(), 4), (full_config(), 36)):
        tensor = transformer_tensor(name, (64, 512), config, 0)
        assert abs(float(tensor.std()) * math.sqrt(512 * 2 * layers) - 1) < 0.05


def test_positions_are_sines_and_cosines_of_falling_rates() -> None:
    table = sinusoids(1500, 64)
    assert table.shape == (1500, 64)
    assert torch.equal(table[0], torch.cat([torch.zeros(32), torch.ones(32)]))
    assert math.isclose(float(table[7, 0]), math.sin(7), abs_tol=1e-5)
    assert math.isclose(float(table[7, 63]), math.cos(7e-4), abs_tol=1e-6)
