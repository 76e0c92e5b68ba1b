"""What is lost comes back, on one GPU: stage processes and a whole sidecar are killed (SIGKILL) in
the middle of replies, while sessions talk in real time.

    python -m tests.gpu.recover_full_shape CHECKPOINT RESULT.json [--graphs] [--sessions 2]
                                           [--losses thinker,...]

Two sidecars stand on one GPU and one Valkey; the client is the one of the demo, over the published
SDK. Each loss strikes conversations of 30 s in the middle of a unit of their second reply. A stage
has to come back in its sidecar and the client to notice nothing but lateness; behind a lost sidecar
the client has to go on at the other one, which is told of the death, as an operator would tell it.
Exit status 1, with a sentence for each, where anything is not as it has to be (`recovery_judge`).

CHECKPOINT is made first if it is not there (19 GB; less with --thinker-layers, which the result
says). What its units emit is said by a script (`full_shape`). `--tiny --device cpu` shows on any
machine that the program works.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.presets import FULL_LAYERS
from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.client.conversation import Conversation, ConversationFailed
from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LedgerError
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.stages.launch import STAGES
from tests.bench.processes import kill_at_once
from tests.bench.revision import revision
from tests.gpu.full_shape import (
    LISTENING_UNITS,
    MANIFEST,
    SPEAKING_UNITS,
    bench_script,
    conditions,
    make_checkpoint,
    print_logs,
    print_once,
    speech_like,
)
from tests.gpu.gpu_memory import Ebb, held_gib, used_gib
from tests.gpu.one_address import OneAddress
from tests.gpu.recovery_figures import rounded, told_of
from tests.gpu.recovery_judge import (
    GIVEN_BACK,
    Memory,
    Script,
    Struck,
    what_the_client_heard,
    what_the_ledger_holds,
    whether_a_new_epoch_began,
    whether_memory_came_back,
    which_chunks_came,
    who_answered,
)
from tests.support.sidecars import survivors

SIDECAR = "sidecar"
LOSSES = ("thinker", "code2wav", SIDECAR, "talker", "encoder")
"""In this order; what is left of them serves the next ones."""
LOSE_SOUND = ("code2wav", SIDECAR)
"""They take the stage-2 state with them."""
SECONDS = 30
HEARD_UNITS = LISTENING_UNITS + SPEAKING_UNITS + LISTENING_UNITS + 2
"""Answered when something is lost: the second reply has begun, and its next unit is under way."""
IN_FLIGHT_S = 0.05
"""A kill comes so long after the last slice of a unit."""
POLL_S = 0.005
LOG_LINES = 8
READY_S, LOSS_S, GONE_S = 420.0, 180.0, 60.0
MODEL_TOKENS = 4096
THINKER_SEAT_BYTES, TALKER_SEAT_BYTES = 768 * 2**20, 256 * 2**20
"""KV of one stream that is as long as it may be: 576 and 240 MiB, and some for its last answer."""
MOST_REBUILD_SEATS = 4


def gpu_settings(sessions: int, *, graphs: bool) -> dict[str, Any]:
    """Two sidecars share the device, and a stage that comes back finds the other seven on it."""
    seats = sessions + min(sessions, MOST_REBUILD_SEATS)
    return {
        "device": "cuda",
        "max_model_tokens": MODEL_TOKENS,
        "max_talker_tokens": MODEL_TOKENS,
        "thinker_kv_bytes": seats * THINKER_SEAT_BYTES,
        "talker_kv_bytes": seats * TALKER_SEAT_BYTES,
        "thinker_gpu_share": 0.2,
        "talker_gpu_share": 0.06,
        "cuda_graphs": graphs,
    }


@dataclass
class Caller:
    """One session and its client. resumed_at_s: monotonic."""

    session: str
    conversation: Conversation
    resumed_at_s: list[float] = field(default_factory=list[float])

    @classmethod
    def open(cls, sidecar: LocalSidecar, base_url: str, seed: int, seconds: int) -> "Caller":
        """A session on that sidecar, whose client dials base_url. Raises ApiError."""
        session, token = f"recover-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        sidecar.open_session(session, MANIFEST, token)
        resumed: list[float] = []

        def note(event: dict[str, Any]) -> None:
            if event["type"] == "session.resumed":
                resumed.append(time.monotonic())

        speech = speech_like(seconds, seed)
        conversation = Conversation(base_url, session, token, speech, on_event=note)
        return cls(session, conversation, resumed)

    @property
    def is_under_way(self) -> bool:
        """Whether the unit that is to be struck is here and all before it are answered."""
        talk = self.conversation.talk
        return HEARD_UNITS in talk.done_at_s and HEARD_UNITS + 1 in talk.sent_at_s


@dataclass
class House:
    """sessions: that talk at a time. serving: where they are opened. spare: the sidecar beside it,
    None once it serves."""

    url: str
    sessions: int
    script: Script
    serving: LocalSidecar
    spare: LocalSidecar | None

    async def load(self, callers: Sequence[Caller]) -> list[LoadedSession]:
        """Chains and blobs checked. Raises LedgerError."""
        reader = await LedgerReader.connect(self.url)
        try:
            return [await reader.load(caller.session) for caller in callers]
        finally:
            await reader.close()


@dataclass
class Loss:
    """at_s: of the kill, monotonic. replies: of each caller, how many it had then. first, then:
    replicas before and behind it."""

    what: str
    first: str
    then: str
    at_s: float
    replies: list[int]
    at_kill: list[LoadedSession]
    facts: dict[str, Any]
    memory: Memory | None
    violations: list[str]


async def lose(house: House, what: str) -> tuple[dict[str, Any], list[str]]:
    """Conversations in whose middle it is lost: what is to be told, and what was wrong."""
    async with OneAddress(house.serving.settings.port) as address:
        callers = [
            await asyncio.to_thread(
                Caller.open, house.serving, address.realtime_url, number, SECONDS
            )
            for number in range(house.sessions)
        ]
        talking = [asyncio.create_task(caller.conversation.run()) for caller in callers]
        try:
            async with asyncio.timeout(LOSS_S):
                if what == SIDECAR:
                    loss = await lose_sidecar(house, address, callers, talking)
                else:
                    loss = await lose_stage(house, what, callers, talking)
                await asyncio.gather(*talking)
        except (ConversationFailed, TimeoutError) as error:
            heard = [len(caller.conversation.talk.units) for caller in callers]
            return {"lost": what}, [f"{error or 'not over in time'}, after {heard} units"]
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
    ends = await house.load(callers)
    told, wrong = [], list(loss.violations)
    for number, (caller, end) in enumerate(zip(callers, ends, strict=True)):
        talk, at_kill = caller.conversation.talk, loss.at_kill[number]
        struck = Struck(talk, SECONDS, house.script, loss.replies[number], at_kill, end)
        wrong += [f"session {number + 1}: {text}" for text in judged(struck, loss)]
        told.append(told_of(struck, loss.at_s, loss.then, caller.resumed_at_s))
    facts = {"lost": what, **loss.facts, "sessions": told}
    if loss.memory is not None:
        facts["gpu_gib"] = rounded(asdict(loss.memory))
    return facts, wrong


Talking = Sequence["asyncio.Task[Any]"]


async def until_under_way(callers: Sequence[Caller], talking: Talking) -> None:
    """Until the unit that is to be struck is under way in all of them. Raises what a talk does."""
    while not all(caller.is_under_way for caller in callers):
        for task in talking:
            if task.done():
                await task
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(IN_FLIGHT_S)


async def lose_stage(house: House, stage: str, callers: Sequence[Caller], talking: Talking) -> Loss:
    """Kills its process; returns when it is ready again."""
    sidecar = house.serving
    process = sidecar.stage_process(stage)
    assert process is not None
    tree = [process, *process.children(recursive=True)]
    victim_gib = await asyncio.to_thread(held_gib, [one.pid for one in tree])
    violations: list[str] = []
    await until_under_way(callers, talking)
    before_gib = used_gib()
    replies = [len(caller.conversation.talk.replies) for caller in callers]
    with Ebb() as ebb:
        at_s = time.monotonic()
        process.kill()
        at_kill = await house.load(callers)
        lost_s = await until_ready(sidecar, at_s, wanted=False)
        ready_s = await until_ready(sidecar, at_s, wanted=True)
    if left := await asyncio.to_thread(survivors, tree, GONE_S):
        violations.append(f"{len(left)} processes of the killed stage are still there")
    heir = sidecar.stage_process(stage)
    if heir is None or heir.pid == process.pid:
        violations.append("no new process of the stage is there")
    facts = {"noticed_s": lost_s, "ready_again_s": ready_s}
    name = sidecar.settings.replica
    memory = seen_memory(before_gib, ebb, victim_gib, facts)
    if memory is not None:
        violations += whether_memory_came_back(memory, restarts=True)
    return Loss(stage, name, name, at_s, replies, at_kill, rounded(facts), memory, violations)


async def until_ready(sidecar: LocalSidecar, since_s: float, *, wanted: bool) -> float:
    """Seconds since then until its readiness is so."""
    while (await asyncio.to_thread(sidecar.readiness))[0] is not wanted:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return time.monotonic() - since_s


async def lose_sidecar(
    house: House, address: OneAddress, callers: Sequence[Caller], talking: Talking
) -> Loss:
    """Kills all its processes. The spare one, which is told of it, serves from then on."""
    victim, spare = house.serving, house.spare
    assert spare is not None
    tree = victim.tree()
    victim_gib = await asyncio.to_thread(held_gib, [one.pid for one in tree])
    await until_under_way(callers, talking)
    before_gib = used_gib()
    replies = [len(caller.conversation.talk.replies) for caller in callers]
    with Ebb() as ebb:
        at_s = time.monotonic()
        address.hold()
        await asyncio.to_thread(kill_at_once, victim, tree)
        loading = asyncio.create_task(house.load(callers))
        await asyncio.to_thread(spare.declare_dead, victim.settings.replica)
        told_s = time.monotonic() - at_s
        address.lead_to(spare.settings.port)
        at_kill = await loading
        left = await asyncio.to_thread(survivors, tree, GONE_S)
        if before_gib is not None and victim_gib is not None:
            # A process counts as gone before the last of its threads has let go of the device.
            await asyncio.to_thread(ebb.wait_for, before_gib - GIVEN_BACK * victim_gib, GONE_S)
    violations = [f"{len(left)} processes of the killed sidecar are still there"] if left else []
    house.serving, house.spare = spare, None
    facts: dict[str, Any] = {"processes": len(tree), "told_of_death_s": told_s}
    memory = seen_memory(before_gib, ebb, victim_gib, facts)
    if memory is not None:
        violations += whether_memory_came_back(memory, restarts=False)
    first, then = victim.settings.replica, spare.settings.replica
    return Loss(SIDECAR, first, then, at_s, replies, at_kill, rounded(facts), memory, violations)


def seen_memory(
    before_gib: float | None, ebb: Ebb, victim_gib: float | None, facts: dict[str, Any]
) -> Memory | None:
    """None without a GPU. Adds to the facts when the memory was given back."""
    after_gib, lowest_gib = used_gib(), ebb.lowest_gib
    if before_gib is None or lowest_gib is None or after_gib is None:
        return None
    if victim_gib is not None:
        facts["memory_back_s"] = ebb.below_after_s(before_gib - GIVEN_BACK * victim_gib)
    return Memory(before_gib, min(lowest_gib, after_gib), after_gib, victim_gib)


def judged(struck: Struck, loss: Loss) -> Iterator[str]:
    yield from what_the_client_heard(struck)
    yield from which_chunks_came(struck)
    yield from what_the_ledger_holds(struck)
    yield from who_answered(struck, loss.first, loss.then)
    if loss.what in LOSE_SOUND:
        yield from whether_a_new_epoch_began(struck)


async def warm_up(sidecars: Sequence[LocalSidecar], sessions: int) -> None:
    """Short conversations: kernels are chosen and loaded at first use."""
    callers = [
        await asyncio.to_thread(Caller.open, sidecar, sidecar.realtime_url, number, 12)
        for sidecar in sidecars
        for number in range(sessions)
    ]
    await asyncio.gather(*(caller.conversation.run() for caller in callers))


def recover(
    result: dict[str, Any],
    checkpoint: Path,
    losses: Sequence[str],
    sessions: int,
    settings: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Fills the result in as it goes. Raises SidecarFailed, ConversationFailed."""
    script = bench_script(load_vocabulary(checkpoint))
    names = ("one", "two") if SIDECAR in losses else ("one",)
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="dx-", ignore_cleanup_errors=True)
        work = Path(stack.enter_context(folder))
        valkey = EmbeddedValkey(work / "ledger")
        stack.callback(valkey.stop)
        valkey.start()
        usual: dict[str, Any] = {
            "cache_dir": str(work / "cache"),
            "slots": sessions,
            "rebuild_seats": min(sessions, MOST_REBUILD_SEATS),
        }
        sidecars: list[LocalSidecar] = []
        before_gib = used_gib()
        for name in names:
            sidecar = LocalSidecar.prepare(
                work / name,
                checkpoint=str(checkpoint),
                redis_url=valkey.url,
                replica=name,
                bench_script=script,
                **(usual | settings),
            )
            stack.callback(sidecar.stop)
            stack.callback(print_logs, sidecar, LOG_LINES)
            sidecar.start()
            sidecars.append(sidecar)
        began = time.monotonic()
        for sidecar in sidecars:
            sidecar.wait_ready(print_once(), timeout_s=READY_S)
        result["ready_s"] = round(time.monotonic() - began, 1)
        result["conditions"] = conditions(sidecars[0]) | {"sidecars": len(sidecars)}
        asyncio.run(warm_up(sidecars, sessions))
        if before_gib is not None:
            taken_gib = (used_gib() or 0.0) - before_gib
            result["gpu_gib_of_a_sidecar"] = round(taken_gib / len(sidecars), 2)
        spare = sidecars[1] if len(sidecars) > 1 else None
        house = House(valkey.url, sessions, script, sidecars[0], spare)
        for what in losses:
            try:
                facts, wrong = asyncio.run(lose(house, what))
            except (ApiError, LedgerError, OSError) as error:
                facts, wrong = {"lost": what}, [f"could not be held: {error}"]
            result["losses"].append(facts)
            result["violations"] += [f"{what}: {text}" for text in wrong]
            print(json.dumps(facts), *wrong, sep="\n", flush=True)
            save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--losses", default=",".join(LOSSES), help="some of: %(default)s")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--thinker-layers", type=int, default=FULL_LAYERS)
    parser.add_argument("--tiny", action="store_true", help="the tiny checkpoint")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    losses: list[str] = arguments.losses.split(",")
    if unknown := set(losses) - {*STAGES, SIDECAR}:
        parser.error(f"nothing is called {min(unknown)!r}")
    checkpoint: Path = arguments.checkpoint.absolute()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision(),
    }
    began = time.monotonic()
    if arguments.tiny:
        from duplex_sidecar.checkpoint.tiny import make_tiny

        make_tiny(checkpoint, cache_dir=default_cache_dir())
    else:
        make_checkpoint(checkpoint, layers=arguments.thinker_layers)
    result["checkpoint_make_s"] = round(time.monotonic() - began, 1)
    result["shapes"] = "tiny" if arguments.tiny else "8b"
    result["thinker_layers"] = read_config(checkpoint).thinker.num_hidden_layers
    result |= {"violations": [], "losses": []}
    settings = gpu_settings(arguments.sessions, graphs=arguments.graphs)
    if arguments.device == "cpu":
        settings = {"cache_dir": str(default_cache_dir())}

    def save() -> None:
        arguments.result.write_text(json.dumps(result, indent=2) + "\n")

    try:
        recover(result, checkpoint, losses, arguments.sessions, settings, save)
    finally:
        save()
        print(json.dumps(result, indent=2))
    print(*result["violations"], sep="\n")
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
