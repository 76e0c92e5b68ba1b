"""What a sidecar is told by its environment, and what of it a pool's template may say otherwise.
Pure."""

from duplex_api.resolve_pool import ResolvedPool
from duplex_operator.names import (
    ADMIN_PORT,
    REDIS_URL_KEY,
    TLS_CERT_KEY,
    TLS_KEY_KEY,
    TOKEN_KEY,
    admin_secret_name,
)
from duplex_operator.resources.pod_template import Manifest
from duplex_operator.resources.pod_volumes import (
    ADMIN_PATH,
    CACHE_PATH,
    RUNTIME_PATH,
    VOICES_PATH,
    checkpoint_folder,
)

REALTIME_PORT = 8765

_THINKER_POSITION_BYTES = 147_456
_TALKER_POSITION_BYTES = 61_440
"""One position's KV at the 8B shape, in bfloat16."""
_THINKER_POSITIONS = 8_192 + 32
_TALKER_POSITIONS = 4_096 + 32

_SPEC_OR_SECRET = frozenset(
    (
        "DUPLEX_ADMIN_TOKEN",
        "DUPLEX_DRAIN_GRACE_S",
        "DUPLEX_OTLP_ENDPOINT",
        "DUPLEX_REPLICA",
        "DUPLEX_TRACE_SAMPLE_RATIO",
        "DUPLEX_VOICES_DIR",
    )
)
"""Variables that may be unset, and still are not the template's."""


def merged_environment(
    pool_name: str, spec: ResolvedPool, given: list[Manifest], durability: str
) -> list[Manifest]:
    """The operator's, then the template's, which may replace what is a default only.

    durability: the installation's; empty: the sidecar's own default.
    """
    named = {each.get("name") for each in given}
    defaults = [v for v in _default_environment(spec, durability) if v["name"] not in named]
    return [*_fixed_environment(pool_name, spec), *defaults, *given]


def protected_names(pool_name: str, spec: ResolvedPool) -> frozenset[str]:
    """Variables that a template may not name."""
    fixed = (str(each["name"]) for each in _fixed_environment(pool_name, spec))
    return frozenset(fixed) | _SPEC_OR_SECRET


def _fixed_environment(pool_name: str, spec: ResolvedPool) -> list[Manifest]:
    environment = [
        _field("POD_IP", "status.podIP"),
        _field("DUPLEX_POD_UID", "metadata.uid"),
        _field("DUPLEX_POD_NAME", "metadata.name"),
        variable("DUPLEX_ADVERTISE", f"$(POD_IP):{REALTIME_PORT}"),
        variable("DUPLEX_HOST", "0.0.0.0"),
        variable("DUPLEX_PORT", str(REALTIME_PORT)),
        variable("DUPLEX_ADMIN_PORT", str(ADMIN_PORT)),
        variable("DUPLEX_ADMIN_TOKEN_FILE", f"{ADMIN_PATH}/{TOKEN_KEY}"),
        variable("DUPLEX_TLS_CERT_FILE", f"{ADMIN_PATH}/{TLS_CERT_KEY}"),
        variable("DUPLEX_TLS_KEY_FILE", f"{ADMIN_PATH}/{TLS_KEY_KEY}"),
        {
            "name": "DUPLEX_REDIS_URL",
            "valueFrom": {
                "secretKeyRef": {"name": admin_secret_name(pool_name), "key": REDIS_URL_KEY}
            },
        },
        variable("DUPLEX_CHECKPOINT", checkpoint_folder(spec.checkpoint)),
        variable("DUPLEX_RUNTIME_DIR", RUNTIME_PATH),
        variable("DUPLEX_CACHE_DIR", CACHE_PATH),
        variable("DUPLEX_SLOTS", str(spec.slots)),
        variable("DUPLEX_REBUILD_SEATS", str(spec.rebuilds_at_once)),
    ]
    if spec.otlp_endpoint is not None:
        environment.append(variable("DUPLEX_OTLP_ENDPOINT", spec.otlp_endpoint))
    if spec.trace_sample_ratio is not None:
        ratio = repr(spec.trace_sample_ratio)
        environment.append(variable("DUPLEX_TRACE_SAMPLE_RATIO", ratio))
    if spec.voices_claim is not None:
        environment.append(variable("DUPLEX_VOICES_DIR", VOICES_PATH))
    return environment


def _default_environment(spec: ResolvedPool, durability: str) -> list[Manifest]:
    """What a template may say otherwise."""
    environment = [
        variable("HOME", CACHE_PATH),
        variable("DUPLEX_DEVICE", "cuda" if spec.gpu else "cpu"),
    ]
    if durability:
        environment.append(variable("DUPLEX_LEDGER_DURABILITY", durability))
    if spec.gpu:
        # The worst case of every seat, so that the engines never preempt.
        seats = spec.slots + spec.rebuilds_at_once
        thinker = seats * _THINKER_POSITIONS * _THINKER_POSITION_BYTES
        talker = seats * _TALKER_POSITIONS * _TALKER_POSITION_BYTES
        environment += [
            variable("DUPLEX_THINKER_KV_BYTES", str(thinker)),
            variable("DUPLEX_TALKER_KV_BYTES", str(talker)),
        ]
    return environment


def variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
