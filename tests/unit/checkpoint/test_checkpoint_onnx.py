"""ONNX files: what we write, the `onnx` package takes; what it writes, we can read the ports of."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.layout_front_end import (
    FRONT_END_NAMES,
    SPEAKER_MODEL_NAME,
    TOKENIZER_MODEL_NAME,
    check_front_end,
)
from duplex_sidecar.checkpoint.onnx_wire import GraphPorts, Port, read_graph_ports
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.weights_front_end import write_front_end

pytestmark = pytest.mark.unit

CONFIG = tiny_config().token2wav


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("front_end")
    write_front_end(made, CONFIG, 0)
    return made


def test_the_files_are_valid_and_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    write_front_end(tmp_path / "same", CONFIG, 0)
    write_front_end(tmp_path / "other", CONFIG, 1)
    for name in FRONT_END_NAMES:
        onnx.checker.check_model(onnx.load(folder / name), full_check=True)
        check_front_end(folder, name, CONFIG)
        assert (folder / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
        assert (folder / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_ports_are_those_that_the_package_reads(folder: Path) -> None:
    for name in FRONT_END_NAMES:
        graph = onnx.load(folder / name).graph
        ports = read_graph_ports(folder / name)
        for ours, theirs in ((ports.inputs, graph.input), (ports.outputs, graph.output)):
            assert [port.name for port in ours] == [value.name for value in theirs]
            for port, value in zip(ours, theirs, strict=True):
                tensor = value.type.tensor_type
                sizes = [dim.dim_value or None for dim in tensor.shape.dim]
                assert list(port.shape) == sizes
                kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
                assert np.dtype(port.element_type) == kind


def other_writer(path: Path, **changes: object) -> Path:
    """A speaker model by the package's own writer, with its weight among the inputs as old
    exporters have it."""
    shapes = {"features": (1, None, 80), "vector": (1, 192)} | changes
    weight = np.zeros((80, 192), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["features"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("MatMul", ["mean", "weight"], ["vector"]),
        ],
        "speaker",
        [
            helper.make_tensor_value_info("features", TensorProto.FLOAT, shapes["features"]),
            helper.make_tensor_value_info("weight", TensorProto.FLOAT, weight.shape),
        ],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, shapes["vector"])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_files_of_another_writer(tmp_path: Path) -> None:
    path = other_writer(tmp_path / SPEAKER_MODEL_NAME)
    assert read_graph_ports(path) == GraphPorts(
        (Port("features", "float32", (1, None, 80)),), (Port("vector", "float32", (1, 192)),)
    )
    check_front_end(tmp_path, SPEAKER_MODEL_NAME, CONFIG)
    # Names are the exporter's business, and a shape need not be told.
    other_writer(path, features=None)
    check_front_end(tmp_path, SPEAKER_MODEL_NAME, CONFIG)


@pytest.mark.parametrize(
    "changes",
    [{"features": (1, None, 64)}, {"features": (None, 80)}, {"vector": (1, 512)}],
)
def test_a_model_of_other_shapes_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    other_writer(tmp_path / SPEAKER_MODEL_NAME, **changes)
    with pytest.raises(CheckpointError) as refused:
        check_front_end(tmp_path, SPEAKER_MODEL_NAME, CONFIG)
    assert refused.value.fault is CheckpointFault.SHAPE_MISMATCH


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_told_as_one(folder: Path, data: st.DataObject) -> None:
    """Cut off or with a byte changed: either still a graph, or `unreadable` or `shape_mismatch`."""
    whole = (folder / TOKENIZER_MODEL_NAME).read_bytes()
    copy = folder / "damaged" / TOKENIZER_MODEL_NAME
    copy.parent.mkdir(parents=True, exist_ok=True)
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    copy.write_bytes(damaged)
    fault = fault_of(folder / "damaged")
    assert fault in (None, CheckpointFault.UNREADABLE, CheckpointFault.SHAPE_MISMATCH)
    assert fault is not None or len(damaged) == len(whole)


def fault_of(folder: Path) -> CheckpointFault | None:
    try:
        check_front_end(folder, TOKENIZER_MODEL_NAME, CONFIG)
    except CheckpointError as error:
        return error.fault
    return None


def test_no_file_and_no_graph(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as missing:
        read_graph_ports(tmp_path / "gone.onnx")
    assert missing.value.fault is CheckpointFault.MISSING
    for data in (b"", b"no graph at all", b"\x08\x08"):
        (tmp_path / "bad.onnx").write_bytes(data)
        with pytest.raises(CheckpointError) as bad:
            read_graph_ports(tmp_path / "bad.onnx")
        assert bad.value.fault is CheckpointFault.UNREADABLE
