"""What a real API server takes from whoever may make one object in one namespace."""

import asyncio
import json
from pathlib import Path

import pytest
from support.api_servers import ApiServer
from support.operators import login

from duplex_api.constants import API_VERSION, SESSION_KIND, SESSION_PLURAL
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.resources import SESSIONS
from duplex_operator.objects import read_session

pytestmark = pytest.mark.cluster

DEPTH = 3_000


def test_a_session_with_bottomless_managed_fields_blinds_nobody(
    api_server: ApiServer, api_namespace: str, tmp_path: Path
) -> None:
    entry = {
        "manager": "somebody",
        "operation": "Update",
        "apiVersion": API_VERSION,
        "fieldsType": "FieldsV1",
        "time": "2026-01-02T03:04:05Z",
        "fieldsV1": "DEEP",
    }
    body = {
        "apiVersion": API_VERSION,
        "kind": SESSION_KIND,
        "metadata": {"name": "odd", "managedFields": [entry]},
        "spec": {"poolRef": {"name": "pool"}},
    }
    deep = '{"f:a":' * DEPTH + "{}" + "}" * DEPTH
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(body).replace('"DEEP"', deep))
    path = f"/apis/{API_VERSION}/namespaces/{api_namespace}/{SESSION_PLURAL}"
    made = api_server.kubectl("create", "--raw", path, "-f", str(file))
    assert made.count("f:a") == DEPTH

    async def listed() -> list[str]:
        api = KubernetesApi(ApiConnection(login(api_server.kubeconfig)))
        try:
            found = await api.list(SESSIONS, api_namespace, read=read_session)
        finally:
            await api.connection.close()
        return [each.meta.key.name for each in found.items if each is not None]

    assert asyncio.run(listed()) == ["odd"]
