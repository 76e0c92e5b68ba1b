"""What a pool's pods mount: the checkpoint, voices, the admin Secret, and room to write. Pure."""

from duplex_api.pool import Checkpoint
from duplex_api.resolve_pool import ResolvedPool
from duplex_operator.names import TLS_CERT_KEY, TLS_KEY_KEY, TOKEN_KEY, admin_secret_name
from duplex_operator.resources.pod_template import Manifest

CHECKPOINT_PATH = "/checkpoint"
VOICES_PATH = "/voices"
ADMIN_PATH = "/etc/duplex/admin"
RUNTIME_PATH = "/run/duplex"
CACHE_PATH = "/var/cache/duplex"
_TEMPORARY_PATH = "/tmp"
_SHARED_MEMORY_PATH = "/dev/shm"


def checkpoint_folder(checkpoint: Checkpoint) -> str:
    if checkpoint.path is not None:
        return checkpoint.path
    source = checkpoint.pvc or checkpoint.image_volume
    assert source is not None  # exactly one of the three
    inner = (source.path or "").strip("/")
    return f"{CHECKPOINT_PATH}/{inner}" if inner else CHECKPOINT_PATH


def mounts(spec: ResolvedPool) -> list[Manifest]:
    mounts = [
        {"name": "duplex-admin", "mountPath": ADMIN_PATH, "readOnly": True},
        {"name": "duplex-runtime", "mountPath": RUNTIME_PATH},
        {"name": "duplex-cache", "mountPath": CACHE_PATH},
        {"name": "duplex-temporary", "mountPath": _TEMPORARY_PATH},
        {"name": "duplex-shared-memory", "mountPath": _SHARED_MEMORY_PATH},
    ]
    if spec.checkpoint.path is None:
        mounts.append({"name": "duplex-checkpoint", "mountPath": CHECKPOINT_PATH, "readOnly": True})
    if spec.voices_claim is not None:
        mounts.append({"name": "duplex-voices", "mountPath": VOICES_PATH, "readOnly": True})
    return mounts


def volumes(pool_name: str, spec: ResolvedPool) -> list[Manifest]:
    found: list[Manifest] = [
        {
            "name": "duplex-admin",
            "secret": {
                "secretName": admin_secret_name(pool_name),
                # Mounted into one container alone, whose only user is not root.
                "defaultMode": 0o444,
                "items": [{"key": k, "path": k} for k in (TOKEN_KEY, TLS_CERT_KEY, TLS_KEY_KEY)],
            },
        },
        {"name": "duplex-runtime", "emptyDir": {}},
        {"name": "duplex-cache", "emptyDir": {}},
        {"name": "duplex-temporary", "emptyDir": {}},
        {
            "name": "duplex-shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": spec.shared_memory},
        },
    ]
    source = spec.checkpoint
    if source.pvc is not None:
        found.append(_claim("duplex-checkpoint", source.pvc.claim_name))
    elif source.image_volume is not None:
        image = {"reference": source.image_volume.reference}
        found.append({"name": "duplex-checkpoint", "image": image})
    if spec.voices_claim is not None:
        found.append(_claim("duplex-voices", spec.voices_claim))
    return found


def _claim(name: str, claim_name: str) -> Manifest:
    return {
        "name": name,
        "persistentVolumeClaim": {"claimName": claim_name, "readOnly": True},
    }
