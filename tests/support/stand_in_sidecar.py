"""A sidecar as the operator meets it: the real admin API over a real socket, leases in a real
ledger server, and no engine behind it. What a client or a failure would do is a method here."""

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web
from redis.asyncio import Redis

from duplex_api.admin import ADMIN_VERSION, ADMIN_VERSION_HEADER
from duplex_operator.cancelling import raise_if_cancelled

LEASE_MS = 3_000
BEAT_S = 1.0
LOOK_S = 0.05

_ACQUIRE = """
local meta = redis.call('HMGET', KEYS[1], 'fence', 'phase', 'until', 'replica')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if meta[2] == 'erased' or meta[2] == 'ended' then return meta[2] end
local fence, same = tonumber(meta[1] or '0'), meta[4] == ARGV[2]
if same and fence == tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'until', now + ARGV[3], 'phase', 'open')
  return 'ok'
end
if tonumber(ARGV[1]) <= fence then return 'stale' end
if tonumber(meta[3] or '0') > now and not same then return 'held' end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'nonce', ARGV[2], 'replica', ARGV[2],
  'until', now + ARGV[3], 'phase', 'open', 'reason', '')
return 'ok'
"""


@dataclass(slots=True)
class StandInSession:
    uid: str
    manifest: dict[str, Any]
    token_sha256: str
    fence: int
    phase: str = "ready"
    reason: str = ""
    attached: bool = False
    units: int = 0
    rebuilds: int = 0
    voice_file: bytes = b""

    def line(self) -> dict[str, Any]:
        return {
            "kind": "session",
            "session": self.uid,
            "phase": self.phase,
            "reason": self.reason,
            "fence": self.fence,
            "attached": self.attached,
            "units": self.units,
            "rebuilds": self.rebuilds,
            "epoch": 0,
            "windowTokens": 100,
            "lastRebuild": None,
            "audio": {"underruns": 0, "longestGapMs": 0},
            "changed_ms": time.time_ns() // 1_000_000,
        }


@dataclass(slots=True)
class Calls:
    """What was asked of it, in order: (verb, uid or empty)."""

    made: list[tuple[str, str]] = field(default_factory=list)

    def count(self, verb: str, uid: str = "") -> int:
        return sum(v == verb and (not uid or u == uid) for v, u in self.made)


class StandInSidecar:
    """Listens on `host`:`port` from `start` to `stop` or `die`."""

    def __init__(
        self, redis_url: str, pod_uid: str, token: str, host: str, *, slots: int = 2, boot: int = 1
    ) -> None:
        self.pod_uid = pod_uid
        self.host = host
        self.slots = slots
        self.replica = f"{pod_uid}-{boot}"
        self.sessions: dict[str, StandInSession] = {}
        self.calls = Calls()
        self.ready = True
        self.draining = False
        self.refuse: dict[str, tuple[int, str]] = {}
        """Verb -> (status, code): answered instead of obeying."""
        self.prepared: dict[str, StandInSession] = {}
        self.hand_overs_together: asyncio.Barrier | None = None
        """So many orders to hand over wait for each other."""
        self.keeps: set[str] = set()
        """Sessions that it does not end when told to, and says so."""
        self.broken: set[str] = set()
        """Replicas and pods that it was told are dead."""
        self._token = token
        self._redis: Redis = Redis.from_url(redis_url, protocol=2, decode_responses=True)
        self._feeds: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._runner: web.AppRunner | None = None
        self._beats: asyncio.Task[None] | None = None
        self._looks: asyncio.Task[None] | None = None
        self._speaks = asyncio.Event()
        self._speaks.set()

    async def start(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_put("/admin/v1/sessions/{uid}", self._put)
        app.router.add_delete("/admin/v1/sessions/{uid}", self._delete)
        app.router.add_post("/admin/v1/sessions/{uid}/park", self._park)
        app.router.add_post("/admin/v1/sessions/{uid}/prepare", self._prepare)
        app.router.add_post("/admin/v1/sessions/{uid}/hand-over", self._hand_over)
        app.router.add_post("/admin/v1/drain", self._drain)
        app.router.add_post("/admin/v1/dead-replicas", self._dead)
        app.router.add_post("/admin/v1/erase/{uid}", self._erase)
        app.router.add_get("/admin/v1/feed", self._feed)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, port, ssl_context=tls).start()
        self._beats = asyncio.create_task(self._beat())
        self._looks = asyncio.create_task(self._look())

    async def die(self) -> None:
        """The process is gone: sockets closed, leases run out by themselves."""
        self._speaks.set()
        for task in (self._beats, self._looks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for queue in self._feeds:
            queue.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._redis.aclose()

    # What clients and failures do

    def attach(self, uid: str) -> None:
        session = self.sessions[uid]
        session.attached, session.phase = True, "active"
        self._say(self.line(session))

    def talk(self, uid: str, units: int) -> None:
        session = self.sessions[uid]
        session.units += units
        self._say(self.line(session))

    async def end(self, uid: str, reason: str) -> None:
        await self._over(uid, "ended", reason)

    async def park(self, uid: str, reason: str) -> None:
        await self._over(uid, "parked", reason)

    def hang(self) -> None:
        """Nothing is said, answered or renewed any more, though the sockets stay open."""
        self._speaks.clear()

    async def resume(self) -> None:
        """It was only held up: it renews what is still its own, and goes on."""
        for uid, session in list(self.sessions.items()):
            found = self._redis.hmget(_meta(uid), "replica", "fence")
            if await cast("Awaitable[list[str | None]]", found) != [
                self.replica,
                str(session.fence),
            ]:
                del self.sessions[uid]
                session.phase, session.reason = "gone", "lease_lost"
                self._say(self.line(session))
        await self._renew()
        self._speaks.set()

    # The admin API

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given, f"Bearer {self._token}"):
            return _refuse(401, "unauthorized")
        if request.headers.get(ADMIN_VERSION_HEADER) != ADMIN_VERSION:
            return _refuse(400, "unsupported_version")
        verb = request.path.removeprefix("/admin/v1/")
        uid = request.match_info.get("uid", "")
        name = f"{request.method} {verb.replace(uid, '*') if uid else verb}"
        self.calls.made.append((name, uid))
        if name in self.refuse:
            return _refuse(*self.refuse[name])
        await self._speaks.wait()
        return await self.obey(request, handler)

    async def obey(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """What another release answers otherwise."""
        return cast(web.StreamResponse, await handler(request))

    async def _put(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        body = await request.json()
        session = self.sessions.get(uid)
        fence = int(body["fence"])
        if session is not None and session.manifest != json.loads(body["manifest"]):
            return _refuse(409, "manifest_conflict")
        if session is None and (self.draining or not self.ready):
            return _refuse(503, "draining" if self.draining else "not_ready")
        if session is None and self.free_slots <= 0:
            return _refuse(429, "no_slot")
        if session is None and body.get("resume"):
            known = cast("Awaitable[int]", self._redis.exists(_meta(uid)))
            if not await known:
                return _refuse(410, "ledger_lost")

        def acquire() -> Awaitable[str]:
            arguments = (_meta(uid), str(fence), self.replica, str(LEASE_MS))
            return cast("Awaitable[str]", self._redis.eval(_ACQUIRE, 1, *arguments))

        verdict = await acquire()
        if verdict == "held" and await self._break_lease(uid):
            verdict = await acquire()
        elif verdict == "held":
            verdict = await self._wait_for_lease(uid, acquire)
        if verdict != "ok":
            code = {"stale": "stale_fence", "held": "not_ready"}.get(verdict, f"session_{verdict}")
            return _refuse({"stale": 409, "held": 503}.get(verdict, 410), code)
        if session is None:
            session = StandInSession(uid, json.loads(body["manifest"]), body["tokenHash"], fence)
            session.voice_file = base64.b64decode(body.get("voiceFile", ""))
            self.sessions[uid] = session
        session.fence, session.token_sha256 = fence, body["tokenHash"]
        self.prepared.pop(uid, None)  # whichever way it came
        await self._offer_token(uid, body["tokenHash"])
        self._say(self.line(session))
        return web.json_response({"session": uid, "phase": session.phase, "fence": fence})

    async def _wait_for_lease(self, uid: str, acquire: Callable[[], Awaitable[str]]) -> str:
        """As the real one: until it has run out, or until its owner renews it."""

        async def until_ms() -> int:
            found = cast("Awaitable[str | None]", self._redis.hget(_meta(uid), "until"))
            return int(await found or 0)

        first_ms, verdict = await until_ms(), "held"
        while verdict == "held" and await until_ms() <= first_ms:
            await asyncio.sleep(LOOK_S)
            verdict = await acquire()
        return verdict

    async def _offer_token(self, uid: str, token_sha256: str) -> None:
        """As the real one: what lets in does so until somebody talks under another one."""
        current = await cast("Awaitable[str | None]", self._redis.hget(_meta(uid), "token"))
        lets_in = current in (None, token_sha256)
        tokens = {"token": token_sha256 if lets_in else current} | {
            "token_offered": "" if lets_in else token_sha256
        }
        await cast("Awaitable[int]", self._redis.hset(_meta(uid), mapping=tokens))

    async def hear_under(self, uid: str, token_sha256: str) -> None:
        """A client's message came under this token."""
        tokens = {"token": token_sha256, "token_offered": ""}
        await cast("Awaitable[int]", self._redis.hset(_meta(uid), mapping=tokens))

    async def _delete(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        if uid not in self.sessions:
            return _refuse(404, "session_not_found")
        if uid in self.keeps:
            return web.json_response({"ended": False})
        body = await request.json()
        await self._over(uid, "ended", str(body.get("reason", "")))
        return web.json_response({"ended": True})

    async def _park(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        if uid not in self.sessions:
            return _refuse(404, "session_not_found")
        await self._over(uid, "parked", "requested")
        return web.json_response({"parked": True})

    async def _prepare(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        body = await request.json()
        if self.draining or not self.ready:
            return _refuse(503, "draining" if self.draining else "not_ready")
        fence = int(body["fence"])
        if uid not in self.sessions:
            manifest = json.loads(body["manifest"])
            session = StandInSession(uid, manifest, body["tokenHash"], fence)
            session.voice_file = base64.b64decode(body.get("voiceFile", ""))
            self.prepared[uid] = session
        return web.json_response({"prepared": True, "fence": fence, "units": 0})

    async def _hand_over(self, request: web.Request) -> web.Response:
        """Its last write makes the lease the target's, which looks for that."""
        uid = request.match_info["uid"]
        body = await request.json()
        if self.hand_overs_together is not None:
            await self.hand_overs_together.wait()
        session = self.sessions.pop(uid, None)
        if session is None:
            return _refuse(404, "session_not_found")
        target, fence = str(body["target"]), int(body["fence"])
        until = time.time_ns() // 1_000_000 + LEASE_MS
        fields = {"fence": str(fence), "nonce": target, "replica": target, "until": str(until)}
        await cast("Awaitable[int]", self._redis.hset(_meta(uid), mapping=fields))
        session.phase, session.reason = "gone", "handed_over"
        self._say(self.line(session))
        return web.json_response({"handedOver": True, "fence": fence})

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for uid, session in list(self.prepared.items()):
                found = self._redis.hmget(_meta(uid), "replica", "fence")
                holder = await cast("Awaitable[list[str | None]]", found)
                if holder == [self.replica, str(session.fence)]:
                    self.sessions[uid] = self.prepared.pop(uid)
                    self._say(self.line(session))

    async def _drain(self, _: web.Request) -> web.Response:
        self.draining = True
        self._say(self._pod_line())
        for uid in list(self.sessions):
            await self._over(uid, "parked", "drain")
        return web.json_response({"draining": True})

    async def _dead(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.broken.add(body.get("podUID") or body["replica"])
        return web.json_response({})

    async def _break_lease(self, uid: str) -> bool:
        """As the real one: a lease is broken when its session comes up, if its holder is known to
        be dead by then."""
        holder = await cast("Awaitable[str | None]", self._redis.hget(_meta(uid), "replica"))
        if not any((holder or "").startswith(dead) for dead in self.broken):
            return False
        await cast("Awaitable[int]", self._redis.hset(_meta(uid), "until", "0"))
        return True

    async def _erase(self, request: web.Request) -> web.Response:
        uid = request.match_info["uid"]
        self.sessions.pop(uid, None)
        await self._redis.delete(_meta(uid))
        await cast("Awaitable[int]", self._redis.hset(_meta(uid), "phase", "erased"))
        return web.json_response({"erased": True})

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(100_000)
        queue.put_nowait(self.hello())
        for session in self.sessions.values():
            queue.put_nowait(self.line(session))
        queue.put_nowait({"kind": "beat"})
        self._feeds.add(queue)
        try:
            while (line := await queue.get()) is not None:
                await self._speaks.wait()
                await response.write(json.dumps(line).encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self._feeds.discard(queue)
        return response

    # Inside

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.sessions)

    def hello(self) -> dict[str, Any]:
        return {
            "kind": "hello",
            "replica": self.replica,
            "podUID": self.pod_uid,
            "version": "0.1.0",
            "modelName": "tiny",
            "slots": self.slots,
            "freeSlots": self.free_slots,
            "draining": self.draining,
            "ready": self.ready,
            "understands": ["resume"],
            "aFieldOfTheNextRelease": 1,
        }

    def line(self, session: StandInSession) -> dict[str, Any]:
        return session.line()

    def _pod_line(self) -> dict[str, Any]:
        return {
            "kind": "pod",
            "ready": self.ready,
            "draining": self.draining,
            "freeSlots": self.free_slots,
        }

    def _say(self, line: dict[str, Any]) -> None:
        for queue in self._feeds:
            queue.put_nowait(line)

    async def _over(self, uid: str, phase: str, reason: str) -> None:
        session = self.sessions.pop(uid)
        session.phase, session.reason = phase, reason
        fields = {"phase": phase, "reason": reason, "until": "0", "nonce": ""}
        await cast("Awaitable[int]", self._redis.hset(_meta(uid), mapping=fields))
        self._say(self.line(session))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._speaks.wait()
            self._say({"kind": "beat"})
            await self._renew()
            raise_if_cancelled()

    async def _renew(self) -> None:
        until = time.time_ns() // 1_000_000 + LEASE_MS
        async with self._redis.pipeline(transaction=False) as pipeline:
            for uid in self.sessions:
                pipeline.hset(_meta(uid), "until", str(until))
            await pipeline.execute()


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _meta(uid: str) -> str:
    return f"duplex:{{{uid}}}:meta"


def _refuse(status: int, code: str) -> web.Response:
    body = {"error": {"code": code, "message": f"refused: {code}"}}
    return web.json_response(body, status=status)
