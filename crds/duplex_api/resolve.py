"""A session's spec with every default filled in: what a sidecar runs.

The only home of the defaults beside the window's (`duplex_api.window`).
"""

from dataclasses import dataclass
from typing import TypeVar

from duplex_api.base import ApiModel
from duplex_api.durations import duration_ms
from duplex_api.pool import PoolSpec
from duplex_api.problems import Problem
from duplex_api.session import (
    AudioFormat,
    Camera,
    DesiredState,
    Lifecycle,
    Modality,
    Output,
    Sampling,
    SessionSpec,
    Voice,
)
from duplex_api.window import ResolvedWindow, WindowLimits, WindowPolicy, resolve_window

_Model = TypeVar("_Model", bound=ApiModel)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """seed None: drawn when the session opens."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class ResolvedOutput:
    modalities: tuple[Modality, ...]
    audio_format: AudioFormat


@dataclass(frozen=True, slots=True)
class ResolvedCamera:
    """frames_per_unit 0: camera frames are refused."""

    frames_per_unit: int
    high_resolution: bool


@dataclass(frozen=True, slots=True)
class ResolvedLifecycle:
    idle_timeout_ms: int
    disconnect_grace_ms: int
    max_duration_ms: int
    park_after_ms: int
    ttl_after_finished_ms: int
    retention_ms: int


@dataclass(frozen=True, slots=True)
class ResolvedSession:
    """prompt, initial_text, voice None: the model's own."""

    window: ResolvedWindow
    prompt: str | None
    initial_text: str | None
    voice: Voice | None
    camera: ResolvedCamera
    output: ResolvedOutput
    sampling: ResolvedSampling
    priority: int
    lifecycle: ResolvedLifecycle
    desired_state: DesiredState


DEFAULT_LIFECYCLE = Lifecycle(
    idle_timeout="30m",
    disconnect_grace="30s",
    max_duration="4h",
    park_after="2m",
    ttl_after_finished="1h",
    retention="24h",
)
LEAST_RETENTION_MS = 10_000
"""A ledger outlives a lease whose owner is late to renew it, and the search for the next owner."""
DEFAULT_SAMPLING = Sampling(temperature=0.7, top_k=20, top_p=0.8)
"""Contract section C. Kept under `greedy` too, where nothing looks at them."""
DEFAULT_OUTPUT = Output(modalities=(Modality.AUDIO, Modality.TEXT), audio_format=AudioFormat.PCM)
DEFAULT_CAMERA = Camera(frames_per_unit=1, high_resolution=True)
"""Of a session that has a camera."""


class UnknownPresetError(ValueError):
    """The session names a window preset that its pool does not have."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problems = (problem,)


def resolve_session(
    spec: SessionSpec, pool: PoolSpec | None, limits: WindowLimits
) -> ResolvedSession:
    """Everything named, by session > pool preset > defaults.

    pool None: the stand-alone sidecar, which has no presets. Raises WindowConfigError or
    UnknownPresetError, both with `problems`.
    """
    preset_name, preset = _window_preset(spec, pool)
    return ResolvedSession(
        window=resolve_window(
            spec.window, preset, limits, preset_path=f"pool.spec.windowPresets.{preset_name}"
        ),
        prompt=spec.prompt,
        initial_text=spec.initial_text,
        voice=spec.voice,
        camera=_resolve_camera(spec.camera),
        output=_resolve_output(spec.output or Output()),
        sampling=_resolve_sampling(spec.sampling or Sampling()),
        priority=spec.priority or 0,
        lifecycle=_resolve_lifecycle(spec.lifecycle or Lifecycle()),
        desired_state=spec.desired_state or DesiredState.RUNNING,
    )


def _window_preset(
    spec: SessionSpec, pool: PoolSpec | None
) -> tuple[str | None, WindowPolicy | None]:
    presets = (pool.window_presets if pool else None) or {}
    name = spec.window_preset or (pool.default_window_preset if pool else None)
    if name is None:
        return None, None
    if name not in presets:
        raise UnknownPresetError(
            Problem(
                path="spec.windowPreset",
                message=f"the pool has no window preset {name!r}",
                allowed=", ".join(sorted(presets)),
            )
        )
    return name, presets[name]


def _resolve_camera(camera: Camera | None) -> ResolvedCamera:
    if camera is None:
        return ResolvedCamera(frames_per_unit=0, high_resolution=False)
    named = _over(DEFAULT_CAMERA, camera)
    return ResolvedCamera(
        frames_per_unit=_known(named.frames_per_unit), high_resolution=_known(named.high_resolution)
    )


def _resolve_output(output: Output) -> ResolvedOutput:
    named = _over(DEFAULT_OUTPUT, output)
    return ResolvedOutput(
        modalities=_known(named.modalities), audio_format=_known(named.audio_format)
    )


def _resolve_sampling(sampling: Sampling) -> ResolvedSampling:
    named = _over(DEFAULT_SAMPLING, sampling)
    return ResolvedSampling(
        greedy=bool(sampling.greedy),
        temperature=_known(named.temperature),
        top_k=_known(named.top_k),
        top_p=_known(named.top_p),
        seed=sampling.seed,
    )


def _resolve_lifecycle(lifecycle: Lifecycle) -> ResolvedLifecycle:
    named = _over(DEFAULT_LIFECYCLE, lifecycle)
    return ResolvedLifecycle(
        idle_timeout_ms=duration_ms(_known(named.idle_timeout)),
        disconnect_grace_ms=duration_ms(_known(named.disconnect_grace)),
        max_duration_ms=duration_ms(_known(named.max_duration)),
        park_after_ms=duration_ms(_known(named.park_after)),
        ttl_after_finished_ms=duration_ms(_known(named.ttl_after_finished)),
        retention_ms=retention_ms(named),
    )


def retention_ms(lifecycle: Lifecycle | None) -> int:
    """How long the ledger outlives its last use: what is named, or the default, but never less than
    `LEAST_RETENTION_MS`."""
    named = None if lifecycle is None else lifecycle.retention
    return max(duration_ms(named or _known(DEFAULT_LIFECYCLE.retention)), LEAST_RETENTION_MS)


def _over(defaults: _Model, named: _Model) -> _Model:
    """The defaults with every field that `named` names put over them."""
    values = {field: getattr(named, field) for field in type(named).model_fields}
    return defaults.model_copy(update={k: v for k, v in values.items() if v is not None})


def _known(value: _Value | None) -> _Value:
    assert value is not None  # the defaults name every field that is asked for
    return value
