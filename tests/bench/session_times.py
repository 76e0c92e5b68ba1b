"""When a user's watch shows that sessions are placed and ready."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch  # pyright: ignore[reportMissingTypeStubs]
from urllib3.exceptions import HTTPError

from duplex_api.constants import API_GROUP, API_VERSION, SESSION_PLURAL

WATCH_S = 3_600
VERSION = API_VERSION.partition("/")[2]


class SessionTimes:
    """Of one namespace. Watches in a thread of its own, until the process ends."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        api = config.new_client_from_config(str(kubeconfig))
        self._objects: Any = client.CustomObjectsApi(api)
        self._where = (API_GROUP, VERSION, namespace, SESSION_PLURAL)
        self._seen: dict[tuple[str, str], float] = {}
        self._came = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with suppress(HTTPError):  # the server has ended
            self._follow()

    def _follow(self) -> None:
        stream: Any = watch.Watch().stream(
            self._objects.list_namespaced_custom_object, *self._where, timeout_seconds=WATCH_S
        )
        for event in stream:
            now = time.monotonic()
            name: str = event["object"]["metadata"]["name"]
            for condition in event["object"].get("status", {}).get("conditions", ()):
                if condition["status"] == "True":
                    with self._came:
                        self._seen.setdefault((name, condition["type"]), now)
                        self._came.notify_all()

    def create(self, session: dict[str, Any]) -> None:
        self._objects.create_namespaced_custom_object(*self._where, session)

    def delete(self, name: str) -> None:
        self._objects.delete_namespaced_custom_object(*self._where, name)

    def at(self, name: str, condition: str, within_s: float) -> float:
        """Monotonic seconds at which the condition was first seen True. Raises TimeoutError."""
        with self._came:
            if not self._came.wait_for(lambda: (name, condition) in self._seen, within_s):
                raise TimeoutError(f"session {name} is not {condition} within {within_s} s")
            return self._seen[name, condition]
