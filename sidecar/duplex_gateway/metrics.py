"""Numbers of this gateway, as a Prometheus page. Labels are enums only."""

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

PROMETHEUS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class CallEnd(StrEnum):
    """How a call ended, from the gateway's side."""

    CLIENT_LEFT = "client_left"
    SESSION_OVER = "session_over"
    TAKEN_OVER = "taken_over"
    REFUSED = "refused"
    SLOW_CLIENT = "slow_client"
    WAITED_TOO_LONG = "waited_too_long"
    SHUTDOWN = "shutdown"
    FAILED = "failed"


class Metrics:
    def __init__(self, held_bytes: Callable[[], int]) -> None:
        """held_bytes: asked for each page."""
        self._registry = CollectorRegistry()
        held = Gauge(
            "duplex_gateway_held_bytes",
            "Input that is not whole or not durable, output that is not taken, of all calls",
            registry=self._registry,
        )
        held.set_function(held_bytes)
        self._live = Gauge(
            "duplex_gateway_calls", "Calls that are held now", registry=self._registry
        )
        self._ended = Counter(
            "duplex_gateway_calls_ended",
            "Calls by how they ended",
            ["end"],
            registry=self._registry,
        )
        self._moves = Counter(
            "duplex_gateway_moves",
            "Calls that went on over another connection",
            registry=self._registry,
        )
        self._move_time = Histogram(
            "duplex_gateway_move_seconds",
            "From the loss of a connection to the greeting of the next one",
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60, 300),
            registry=self._registry,
        )
        self._failed = Counter(
            "duplex_gateway_failed_attempts",
            "Attempts with a wrong token or session",
            registry=self._registry,
        )
        self._overflows = Counter(
            "duplex_gateway_input_refused",
            "Messages refused because too much input was held",
            registry=self._registry,
        )
        self._wakes = Counter(
            "duplex_gateway_wakes", "Entries added to the wake stream", registry=self._registry
        )
        for end in CallEnd:
            self._ended.labels(end.value)

    def calls(self, count: int) -> None:
        self._live.set(count)

    def call_ended(self, end: CallEnd) -> None:
        self._ended.labels(end.value).inc()

    def moved(self, elapsed_s: float) -> None:
        self._moves.inc()
        self._move_time.observe(elapsed_s)

    def failed_attempt(self) -> None:
        self._failed.inc()

    def input_refused(self) -> None:
        self._overflows.inc()

    def woke(self) -> None:
        self._wakes.inc()

    def page(self) -> bytes:
        """For `/metrics`, of type PROMETHEUS_CONTENT_TYPE."""
        return generate_latest(self._registry)
