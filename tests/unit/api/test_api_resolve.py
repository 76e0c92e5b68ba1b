"""A session's spec with its defaults."""

from typing import Any

import pytest

from duplex_api.durations import duration_ms
from duplex_api.pool import PoolSpec
from duplex_api.resolve import UnknownPresetError, resolve_session
from duplex_api.session import DesiredState, DuplexSession, Modality, SessionSpec
from duplex_api.window import WindowLimits, WindowMode

pytestmark = pytest.mark.unit


def spec(**fields: Any) -> SessionSpec:
    return SessionSpec.model_validate({"poolRef": {"name": "demo"}, **fields}, extra="forbid")


def pool(**fields: Any) -> PoolSpec:
    return PoolSpec.model_validate({"checkpoint": {"path": "model"}, "slots": 1, **fields})


PRESETS = {"short": {"mode": "context", "contextMaxUnits": 4}, "long": {"mode": "basic"}}


def test_a_bare_spec_has_every_default() -> None:
    resolved = resolve_session(spec(), None, WindowLimits())
    assert resolved.window.mode is WindowMode.OFF
    assert resolved.output.modalities == (Modality.AUDIO, Modality.TEXT)
    assert (resolved.sampling.temperature, resolved.sampling.top_k, resolved.sampling.top_p) == (
        0.7,
        20,
        0.8,
    )
    assert (resolved.sampling.greedy, resolved.sampling.seed) == (False, None)
    assert resolved.camera.frames_per_unit == 0
    assert resolved.lifecycle.retention_ms == duration_ms("24h")
    assert resolved.desired_state is DesiredState.RUNNING
    assert (resolved.priority, resolved.prompt, resolved.voice) == (0, None, None)


def test_no_ledger_is_kept_for_less_than_ten_seconds() -> None:
    for named, kept_ms in (("1s", 10_000), ("10s", 10_000), ("10s1ms", 10_001)):
        resolved = resolve_session(spec(lifecycle={"retention": named}), None, WindowLimits())
        assert resolved.lifecycle.retention_ms == kept_ms


def test_what_is_named_wins_field_by_field() -> None:
    resolved = resolve_session(
        spec(
            sampling={"topK": 5},
            lifecycle={"parkAfter": "10s"},
            camera={"framesPerUnit": 2},
            window={"contextMaxUnits": 7},
        ),
        pool(windowPresets=PRESETS, defaultWindowPreset="short"),
        WindowLimits(),
    )
    assert (resolved.sampling.top_k, resolved.sampling.top_p) == (5, 0.8)
    assert (resolved.lifecycle.park_after_ms, resolved.lifecycle.idle_timeout_ms) == (
        10_000,
        duration_ms("30m"),
    )
    assert (resolved.camera.frames_per_unit, resolved.camera.high_resolution) == (2, True)
    assert (resolved.window.mode, resolved.window.context_max_units) == (WindowMode.CONTEXT, 7)


def test_a_session_may_choose_another_preset() -> None:
    chosen = spec(windowPreset="long")
    full = pool(windowPresets=PRESETS, defaultWindowPreset="short")
    assert resolve_session(chosen, full, WindowLimits()).window.mode is WindowMode.BASIC


@pytest.mark.parametrize("of", [None, pool(windowPresets=PRESETS)])
def test_an_unknown_preset_is_named_with_the_known_ones(of: PoolSpec | None) -> None:
    with pytest.raises(UnknownPresetError) as caught:
        resolve_session(spec(windowPreset="x"), of, WindowLimits())
    (problem,) = caught.value.problems
    assert problem.path == "spec.windowPreset"
    assert problem.allowed == ("long, short" if of else "")


def test_objects_of_a_newer_release_are_read() -> None:
    session = DuplexSession.model_validate(
        {
            "metadata": {"name": "a", "newField": 1},
            "spec": {"poolRef": {"name": "demo"}, "newField": {"x": 1}},
            "status": {"phase": "Active", "placement": {"pod": "p", "podUID": "u", "fence": 3}},
        }
    )
    assert session.status is not None
    assert session.status.placement is not None
    assert session.status.placement.pod_uid == "u"
    wire = session.model_dump(mode="json", exclude_none=True)
    assert wire["status"]["placement"] == {"pod": "p", "podUID": "u", "fence": 3}
    assert wire["apiVersion"] == "duplex.dev/v1alpha1"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"checkpoint": {}}, "exactly one of pvc"),
        ({"checkpoint": {"path": "a", "pvc": {"claimName": "b"}}}, "exactly one of pvc"),
        ({"gpu": {"count": 1}}, "count belongs to resourceName"),
        ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "must not be above"),
        ({"allowedNamespaces": {"from": "Listed"}}, "names belong to"),
        ({"allowedNamespaces": {"from": "All", "names": ["a"]}}, "names belong to"),
        ({"defaultWindowPreset": "x"}, "one of windowPresets"),
        ({"sharedMemory": "16 GB"}, "sharedMemory"),
        ({"slots": 0}, "slots"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pool(**fields)
