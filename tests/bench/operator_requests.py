"""What an operator asks of the API server: for sessions, and without one."""

import re
from typing import Any

Json = dict[str, Any]

UPKEEP = ("leases", "duplexpools", "pods", "poddisruptionbudgets")
"""What the operator asks for whether one session comes or none: its Lease, pools and their pods.
Everything else is counted as asked for sessions."""
_REQUESTS = re.compile(
    r'^duplex_operator_api_requests_total\{verb="(\w+)",resource="(\w+)"\} (\S+)$', re.MULTILINE
)
_FLOWS = re.compile(
    r'^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="operator-(\w+)".*\} (\S+)$',
    re.MULTILINE,
)


def requests_for_sessions(page: str) -> dict[str, float]:
    """Of an operator's metrics page, by "verb resource"."""
    found = {f"{verb} {plural}": float(count) for verb, plural, count in _REQUESTS.findall(page)}
    return {key: count for key, count in found.items() if key.split()[1] not in UPKEEP}


def flow_schemas(account: str, namespace: str) -> list[Json]:
    """Flows of a ServiceAccount's own, by which the API server counts its requests."""
    return [
        _flow("upkeep", 500, [*UPKEEP, "duplexpools/status"], account, namespace),
        _flow("sessions", 501, ["*"], account, namespace),
    ]


def dispatched(page: str) -> dict[str, float]:
    """Of the API server's metrics page, by the flows of `flow_schemas`: `upkeep` and `sessions`."""
    found: dict[str, float] = {"upkeep": 0.0, "sessions": 0.0}
    for schema, count in _FLOWS.findall(page):
        found[schema] += float(count)
    return found


def _flow(name: str, precedence: int, resources: list[str], account: str, namespace: str) -> Json:
    subject = {"name": account, "namespace": namespace}
    rule = {
        "verbs": ["*"],
        "apiGroups": ["*"],
        "resources": resources,
        "clusterScope": True,
        "namespaces": ["*"],
    }
    return {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": f"operator-{name}"},
        "spec": {
            "matchingPrecedence": precedence,
            "priorityLevelConfiguration": {"name": "workload-low"},
            "distinguisherMethod": {"type": "ByUser"},
            "rules": [
                {
                    "subjects": [{"kind": "ServiceAccount", "serviceAccount": subject}],
                    "resourceRules": [rule],
                }
            ],
        },
    }
