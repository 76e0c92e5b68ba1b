"""A checkpoint of which only what makes and checks voices is there."""

from pathlib import Path

import pytest

from duplex_sidecar.checkpoint.config import write_config
from duplex_sidecar.checkpoint.layout import FLOW_NAME
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.weights_front_end import write_front_end


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Its flow decoder is of no use but to be told from others."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_config(tiny_config(), folder)
    write_front_end(folder, tiny_config().token2wav, 0)
    (folder / FLOW_NAME).write_bytes(b"flow decoder")
    return folder
