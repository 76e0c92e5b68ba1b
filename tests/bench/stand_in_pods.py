"""python -m tests.bench.stand_in_pods: the pods of a measurement, in a process of their own.

Obeys one JSON object a line on its standard input, answers each with one.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.stand_in_pods import StandInPods

_OPEN_FILES = 65_536

Json = dict[str, Any]


async def obey(pods: StandInPods, order: Json, tasks: "list[asyncio.Task[None]]") -> Json:
    match order["do"]:
        case "count":
            return {"sessions": sum(len(pod.sessions) for pod in pods.pods.values())}
        case "attach":
            return {"attached": attach(pods)}
        case "talk":
            tasks.append(asyncio.create_task(talk(pods)))
            return {}
        case "kill":
            return await kill(pods, order["sessions"], delete=order["delete"])
        case other:
            raise ValueError(f"unknown order {other}")


def attach(pods: StandInPods) -> int:
    """A client to each session that has none."""
    attached = 0
    for pod in pods.pods.values():
        for uid, session in pod.sessions.items():
            if not session.attached:
                pod.attach(uid)
                attached += 1
    return attached


async def talk(pods: StandInPods) -> None:
    """Every session a unit a second, each at a moment of its own, until cancelled."""
    while True:
        began = time.monotonic()
        said = [(pod, uid) for pod in pods.pods.values() for uid in pod.sessions]
        random.shuffle(said)
        for number, (pod, uid) in enumerate(said):
            if uid in pod.sessions:
                pod.talk(uid, 1)
            if number % 50 == 0:
                await asyncio.sleep(max(0.0, began + number / len(said) - time.monotonic()))
        await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


async def kill(pods: StandInPods, sessions: int, *, delete: bool) -> Json:
    """The first pod with at least so many sessions: its process goes, and `delete`, its object.
    Returns its sessions' uids, and when it was killed (monotonic, of this machine)."""
    name = next(name for name, pod in pods.pods.items() if len(pod.sessions) >= sessions)
    uids = list(pods.pods[name].sessions)
    at_s = time.monotonic()
    await pods.end(name, delete=delete)
    return {"uids": uids, "at_s": at_s}


async def orders() -> AsyncIterator[Json]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield json.loads(line)


async def serve(kubeconfig: str, redis_url: str, namespace: str, slots: str) -> None:
    pods = StandInPods(Path(kubeconfig), redis_url, namespace, int(slots))
    tasks = [asyncio.create_task(pods.run())]
    try:
        async for order in orders():
            for task in tasks:
                if task.done():
                    task.result()
            print(json.dumps(await obey(pods, order, tasks)), flush=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pods.close()


def main() -> int:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, most), most))
    asyncio.run(serve(*sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
