"""What the operator's objects are called in Kubernetes: labels, finalizers, headers, fields."""

from duplex_api.constants import API_GROUP

FIELD_MANAGER = "duplex-operator"
SESSION_FINALIZER = f"{API_GROUP}/session"

LABEL_NAME = "app.kubernetes.io/name"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_POOL = f"{API_GROUP}/pool"
LABEL_OCCUPIED = f"{API_GROUP}/occupied"
LABEL_VOICE = f"{API_GROUP}/voice"
ANNOTATION_TEMPLATE_HASH = f"{API_GROUP}/template-hash"
ANNOTATION_CHECKPOINT_HASH = f"{API_GROUP}/checkpoint-hash"
ANNOTATION_ATTEMPT = f"{API_GROUP}/attempt"
"""How many pods in a row broke before this one. Spaces out replacements."""
ANNOTATION_MARK = f"{API_GROUP}/mark"
ANNOTATION_MARKED_AT = f"{API_GROUP}/marked-at"
ANNOTATION_IDLE_SINCE = f"{API_GROUP}/idle-since"
ANNOTATION_SERVED_BY = f"{API_GROUP}/served-by"
"""On a pool's admin Secret: the release that serves the pool."""

PRODUCT = "duplex"
COMPONENT_SIDECAR = "sidecar"
SIDECAR_CONTAINER = "duplex-sidecar"

POD_SELECTOR = f"{LABEL_MANAGED_BY}={FIELD_MANAGER},{LABEL_COMPONENT}={COMPONENT_SIDECAR}"
"""The pods that this operator made, as a label selector."""
COMPONENT_TOKEN = "session-token"
TOKEN_SELECTOR = f"{LABEL_MANAGED_BY}={FIELD_MANAGER},{LABEL_COMPONENT}={COMPONENT_TOKEN}"
"""The Secrets with clients' tokens that this operator made."""

ADMIN_PORT = 8766

TOKEN_KEY = "token"
CA_KEY = "ca.crt"
TLS_CERT_KEY = "tls.crt"
TLS_KEY_KEY = "tls.key"
REDIS_URL_KEY = "redis-url"
"""Keys of Secrets."""


def token_secret_name(session_name: str) -> str:
    return f"{session_name}-token"


def admin_secret_name(pool_name: str) -> str:
    return f"{pool_name}-admin"


def admin_server_name(pool_namespace: str, pool_name: str) -> str:
    """The name in the certificate of a pool's admin ports. Pods are dialled by address, so this,
    not the address, is what the certificate is checked against."""
    return f"{pool_name}.{pool_namespace}.pools.{API_GROUP}"
