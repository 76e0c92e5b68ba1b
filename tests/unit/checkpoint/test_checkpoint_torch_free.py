"""What the sidecar process reads of a checkpoint must not bring torch with it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

MODULES = (
    "config",
    "layout",
    "headers",
    "report",
    "tokenizer",
    "voice",
    "voice_origin",
    "onnx_wire",
    "layout_front_end",
    "engine_view",
    "behaviour",
)


def test_reading_a_checkpoint_imports_no_torch() -> None:
    imports = "; ".join(f"import duplex_sidecar.checkpoint.{name}" for name in MODULES)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=180, check=False)
    assert done.returncode == 0
