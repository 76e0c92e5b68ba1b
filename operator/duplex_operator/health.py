"""The operator's own port: alive, ready, and numbers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web

Gauges = Callable[[], Mapping[str, float]]
STALLED_AFTER_S = 60.0


@dataclass(slots=True)
class Health:
    """ready: the API server has answered of late, and whoever leads has listed everything and
    watches. oldest_s: how long the first dirty object has waited."""

    ready: Callable[[], bool]
    oldest_s: Callable[[], float]
    gauges: Gauges

    async def serve(self, host: str, port: int) -> web.AppRunner:
        """Listens until `cleanup` of what it returns."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return runner

    async def _healthz(self, _: web.Request) -> web.Response:
        """Not alive: work is there and none of it has been begun for a minute."""
        if self.oldest_s() > STALLED_AFTER_S:
            return web.Response(status=503, text="nothing has been looked at for a minute\n")
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.ready():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="not synchronised with the API server yet\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        text = "".join(metric_lines(self.gauges()))
        return web.Response(text=text, content_type="text/plain", charset="utf-8")


def metric_lines(gauges: Mapping[str, float]) -> Iterator[str]:
    """Prometheus' text format. Names may carry labels: `name{label="value"}`."""
    told: set[str] = set()
    for name, value in sorted(gauges.items()):
        family = name.partition("{")[0]
        if family not in told:
            told.add(family)
            kind = "counter" if family.endswith("_total") else "gauge"
            yield f"# TYPE {family} {kind}\n"
        yield f"{name} {value:g}\n"
