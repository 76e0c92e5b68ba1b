"""Settings, environment and restart policy of stage processes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import ElementType
from duplex_sidecar.stages.environment import stage_environment
from duplex_sidecar.stages.launch import stage_specs
from duplex_sidecar.stages.supervisor import RestartPolicy
from duplex_sidecar.stages.talker.config import TalkerSettings
from duplex_sidecar.stages.thinker.config import ThinkerSettings

pytestmark = pytest.mark.unit

GOOD = ThinkerSettings(
    checkpoint="/models/tiny",
    device=Device.CPU,
    element_type=ElementType.FLOAT32,
    context_tokens=8192,
    seats=6,
    kv_bytes=1 << 26,
    runtime_dir="/run/duplex/thinker",
    cache_dir="/cache",
)


def test_settings_travel_as_json() -> None:
    document = msgspec.json.encode(GOOD)
    assert msgspec.json.decode(document, type=ThinkerSettings) == GOOD
    assert GOOD.max_model_len == 8192 + 32


@pytest.mark.parametrize(
    "changes",
    [
        {"seats": 0},
        {"context_tokens": -1},
        {"kv_bytes": 0},
        {"max_batched_tokens": 0},
        {"feed_timeout_s": 0},
        {"element_type": "int64"},
        {"device": "tpu"},
        {"enforce_eager": False},
        {"runtime_dir": "relative"},
        {"checkpoint": "relative"},
        {"unknown": 1},
    ],
)
def test_wrong_settings_are_told_apart(changes: dict[str, object]) -> None:
    document = msgspec.to_builtins(GOOD) | changes
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode(document), type=ThinkerSettings)
    assert next(iter(changes)) in str(caught.value)


@pytest.mark.parametrize(
    ("said", "batch"),
    [
        ({}, 1),
        ({"device": Device.CUDA}, 8),
        ({"device": Device.CUDA, "encoder_batch": 3}, 3),
        ({"encoder_batch": 4}, 4),
    ],
)
def test_the_encoders_process_is_told_how_many_share_a_pass(
    tmp_path: Path, said: dict[str, Any], batch: int
) -> None:
    settings = SidecarSettings(
        checkpoint="/models/tiny",
        redis_url="redis://ledger",
        runtime_dir=str(tmp_path),
        cache_dir="/cache",
        **said,
    )
    (spec,) = (
        spec for spec in stage_specs(settings, ElementType.FLOAT32) if spec.stage == "encoder"
    )
    config = Path(spec.argv[spec.argv.index("--config") + 1])
    assert msgspec.json.decode(config.read_bytes(), type=EncoderSettings).max_batch == batch


def test_a_negative_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder_batch"):
        SidecarSettings(
            checkpoint="/m",
            redis_url="redis://l",
            runtime_dir="/r",
            cache_dir="/c",
            encoder_batch=-1,
        )


def test_only_the_thinker_knows_bench_scripts() -> None:
    document = msgspec.json.encode(GOOD)
    with pytest.raises(msgspec.ValidationError, match="bench_scripts"):
        msgspec.json.decode(document, type=TalkerSettings)


def test_the_ring_has_one_name_per_runtime_folder() -> None:
    other = msgspec.structs.replace(GOOD, runtime_dir="/run/other/thinker")
    assert GOOD.ring_path("thinker") == GOOD.ring_path("thinker")
    assert GOOD.ring_path("thinker") != other.ring_path("thinker")
    assert GOOD.ring_path("thinker").parent == Path("/dev/shm")


def test_the_environment_drops_what_would_hurt_and_keeps_the_rest() -> None:
    inherited = {
        "PATH": "/bin",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "16",
    }
    environment = stage_environment(inherited, Path("/cache"))
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_PLUGINS"] == "duplex"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["VLLM_CACHE_ROOT"] == "/cache/vllm"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_the_backoff_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(first_backoff_s=0.5, max_backoff_s=3.0)
    assert [policy.backoff_s(n) for n in (1, 2, 3, 4, 500)] == [0.5, 1.0, 2.0, 3.0, 3.0]
