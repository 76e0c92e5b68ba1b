"""The REST resources that the operator knows, and their paths."""

from dataclasses import dataclass

from duplex_api.constants import API_GROUP, API_VERSION_NAME, POOL_PLURAL, SESSION_PLURAL


@dataclass(frozen=True, slots=True)
class Resource:
    """One REST resource. namespaced False: nodes."""

    base: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Of one object, or of the collection without a name; of all namespaces without one."""
        parts = [self.base]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


_OURS = f"/apis/{API_GROUP}/{API_VERSION_NAME}"
SESSIONS = Resource(_OURS, SESSION_PLURAL)
POOLS = Resource(_OURS, POOL_PLURAL)
PODS = Resource("/api/v1", "pods")
SECRETS = Resource("/api/v1", "secrets")
CONFIG_MAPS = Resource("/api/v1", "configmaps")
NODES = Resource("/api/v1", "nodes", namespaced=False)
EVENTS = Resource("/apis/events.k8s.io/v1", "events")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
PDBS = Resource("/apis/policy/v1", "poddisruptionbudgets")
