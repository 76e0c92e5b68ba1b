"""A sidecar's admin port as an operator sees it, without a sidecar: HTTPS, token, feed, drain."""

import asyncio
import json
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from duplex_operator.names import ADMIN_PORT


@dataclass
class FakeAdmin:
    """tokens: those that it takes. sessions: uid -> phase. Changes are told to all feeds."""

    pod_uid: str
    tokens: set[str]
    slots: int = 4
    sessions: dict[str, str] = field(default_factory=dict)
    draining: bool = False
    ledger_away: bool = False
    answers: bool = True
    graces_s: list[float] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def end(self, uid: str) -> None:
        self.sessions[uid] = "ended"
        await self.tell()

    def _allowed(self, request: web.Request) -> None:
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise web.HTTPUnauthorized
        if not self.answers:
            raise web.HTTPServiceUnavailable

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        self._allowed(request)
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(self._hello())
        while True:
            for uid, phase in sorted(self.sessions.items()):
                await stream.write(_line(kind="session", session=uid, phase=phase))
            await stream.write(_line(kind="pod", draining=self.draining, **self._readiness()))
            async with self.changed:
                await self.changed.wait()

    def _hello(self) -> bytes:
        return _line(
            kind="hello",
            replica=f"{self.pod_uid}-boot",
            podUID=self.pod_uid,
            slots=self.slots,
            freeSlots=self.slots - len(self.sessions),
            draining=self.draining,
            **self._readiness(),
        )

    def _readiness(self) -> dict[str, bool]:
        return {"ready": not self.ledger_away, "ledgerAway": self.ledger_away}

    async def _drain(self, request: web.Request) -> web.Response:
        self._allowed(request)
        self.graces_s.append((await request.json())["graceSeconds"])
        self.draining = True
        await self.tell()
        return web.json_response({})

    async def _delete(self, request: web.Request) -> web.Response:
        self._allowed(request)
        uid = request.match_info["uid"]
        self.ended.append((uid, (await request.json())["reason"]))
        await self.end(uid)
        return web.json_response({"ended": True})

    @asynccontextmanager
    async def serving(
        self, address: str, certificate_pem: str, key_pem: str
    ) -> AsyncIterator["FakeAdmin"]:
        """address: a loopback address of its own, since every sidecar has the same port."""
        app = web.Application()
        app.router.add_get("/admin/v1/feed", self._feed)
        app.router.add_post("/admin/v1/drain", self._drain)
        app.router.add_delete("/admin/v1/sessions/{uid}", self._delete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            context = served_with(certificate_pem, key_pem)
            site = web.TCPSite(runner, address, ADMIN_PORT, ssl_context=context)
            await site.start()
            yield self
        finally:
            await runner.cleanup()


def served_with(certificate_pem: str, key_pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
        certificate.write_text(certificate_pem)
        key.write_text(key_pem)
        context.load_cert_chain(certificate, key)
    return context


def _line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"
