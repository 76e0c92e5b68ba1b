"""Loading is strict and tells everything that is wrong, not the first thing."""

from pathlib import Path

import pytest
import torch

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.layout_token2wav import hift_shapes
from duplex_sidecar.stages.code2wav.layers import fold_weight_norm
from duplex_sidecar.stages.code2wav.weights import differences, dummy_weights, load_weights

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def write(formula, folder: Path) -> tuple[Path, Path]:
    assets = folder / "assets" / "token2wav"
    assets.mkdir(parents=True)
    flow, hift = formula.state_dicts()
    torch.save(flow, assets / "flow.pt")
    torch.save(hift, assets / "hift.pt")
    return assets / "flow.pt", assets / "hift.pt"


def test_loads_by_public_names(formula, tmp_path: Path) -> None:
    write(formula, tmp_path)
    flow, hift = formula.state_dicts()
    weights = load_weights(tmp_path, formula.sizes, CPU)
    assert torch.equal(weights.flow["encoder_proj.weight"], flow["encoder_proj.weight"])
    direction = hift["conv_pre.parametrizations.weight.original1"]
    norm = direction.flatten(1).norm(dim=1)[:, None, None]
    magnitude = hift["conv_pre.parametrizations.weight.original0"]
    torch.testing.assert_close(weights.hift["conv_pre.weight"], direction * magnitude / norm)


def test_every_difference_is_reported(formula, tmp_path: Path) -> None:
    path, _ = write(formula, tmp_path)
    flow, _ = formula.state_dicts()
    del flow["encoder_proj.bias"]
    flow["encoder.extra.weight"] = torch.zeros(1)
    flow["input_embedding.weight"] = torch.zeros(3, 3)
    torch.save(flow, path)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, formula.sizes, CPU)
    assert caught.value.fault is CheckpointFault.SHAPE_MISMATCH
    for text in (
        "encoder_proj.bias is missing",
        "encoder.extra.weight is unexpected",
        "input_embedding.weight has shape [3, 3], expected [64, 32]",
    ):
        assert text in caught.value.reason


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken"])
def test_damaged_file_is_unreadable(formula, tmp_path: Path, content: bytes) -> None:
    _, path = write(formula, tmp_path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, formula.sizes, CPU)
    assert caught.value.fault is CheckpointFault.UNREADABLE


def test_file_that_is_no_state_dict(formula, tmp_path: Path) -> None:
    path, _ = write(formula, tmp_path)
    torch.save([torch.zeros(1)], path)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, formula.sizes, CPU)
    assert caught.value.fault is CheckpointFault.UNREADABLE


def test_absent_file_is_missing(formula, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, formula.sizes, CPU)
    assert caught.value.fault is CheckpointFault.MISSING


def test_older_weight_norm_names_and_prefix_fold_alike(formula) -> None:
    _, hift = formula.state_dicts()
    older = {
        "generator."
        + name.replace(".parametrizations.weight.original0", ".weight_g").replace(
            ".parametrizations.weight.original1", ".weight_v"
        ): tensor
        for name, tensor in hift.items()
    }
    now, then = fold_weight_norm(hift), fold_weight_norm(older)
    assert now.keys() == then.keys()
    assert all(torch.equal(now[name], then[name]) for name in now)
    assert not any("original" in name for name in now)


def test_made_up_weights_have_the_same_names(formula) -> None:
    weights = dummy_weights(formula.sizes, CPU)
    again = dummy_weights(formula.sizes, CPU)
    assert torch.equal(weights.flow["encoder_proj.weight"], again.flow["encoder_proj.weight"])
    _, hift = formula.state_dicts()
    assert differences(hift, hift_shapes(formula.sizes)) == []
