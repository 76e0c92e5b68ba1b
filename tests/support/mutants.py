"""Ways to build the product wrong, each a patch that exists in tests alone."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from duplex_sidecar.ledger import scripts, store
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.client_record import AppliedCommand, ClientRecord
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.lease import boottime_ms
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.commands import AcknowledgePlayback
from duplex_sidecar.protocol.events import InputAccepted
from duplex_sidecar.session import assembly, client_commands, unit
from duplex_sidecar.session.conversation import Speech
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.unit import UnitRunner

Patch = pytest.MonkeyPatch
BEFORE_IT_IS_DURABLE_S = 0.01


def rewrite(patch: Patch, old: str, new: str, *, only: ScriptName | None = None) -> None:
    """Another text in the scripts that hold `old`, or in that one alone."""
    source = scripts.source

    def changed(name: ScriptName) -> str:
        text = source(name)
        return text.replace(old, new) if only in (None, name) else text

    texts = {name: source(name) for name in ScriptName if only in (None, name)}
    assert any(old in text for text in texts.values()), f"{old!r} is in no script"
    digests = {name: _sha1(changed(name)) for name in ScriptName}
    patch.setattr(scripts, "source", changed)
    patch.setattr(scripts, "sha1", digests.__getitem__)


def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def no_fence(patch: Patch) -> None:
    """An acquisition gets the number that is there, and no script compares it."""
    rewrite(patch, "fence + step", "fence", only=ScriptName.ACQUIRE)
    rewrite(patch, "meta.fence ~= ARGV[1] or ", "")


def no_nonce(patch: Patch) -> None:
    """Scripts compare the fence alone."""
    rewrite(patch, " or meta.nonce ~= ARGV[2]", "")


def no_head_check(patch: Patch) -> None:
    """A write goes on whatever the chain's end is."""
    begin = "if meta.head ~= ARGV[4] or meta.open ~= '' or "
    rewrite(patch, begin, "if false and ", only=ScriptName.ACCEPT)


def trim_at_accept(patch: Patch) -> None:
    """Rows leave when the next unit comes, not when it is answered."""
    trim = "trim_units(KEYS[5], tonumber(meta.window_floor), tonumber(ARGV[5]))\n"
    end = "local index = text(tonumber(meta.index) + 1)\n"
    rewrite(patch, end, trim + end, only=ScriptName.ACCEPT)


def deadline_from_the_reply(patch: Patch) -> None:
    """The owner counts its lease from when the renewal came back."""
    renew = Ledger.renew

    async def late(self: Ledger, lease: Any) -> Any:
        renewed = await renew(self, lease)
        deadline_ms = boottime_ms() + store.LEASE_MS - store.MARGIN_MS
        return type(renewed)(**{**_fields(renewed), "deadline_ms": deadline_ms})

    patch.setattr(Ledger, "renew", late)


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def audio_before_journal(patch: Patch) -> None:
    """Events leave, then they are journaled."""
    announce, journal = unit.announce, DurableSession.journal
    publish = _publisher(patch, "_speak")
    announced: list[Any] = []

    def remembering(*arguments: Any, **more: Any) -> Any:
        batch, events, after = announce(*arguments, **more)
        announced[:] = events
        return batch, events, after

    async def hasty(self: DurableSession, batch: Any) -> None:
        for event in announced:
            publish(event)
        await asyncio.sleep(BEFORE_IT_IS_DURABLE_S)
        await journal(self, batch)

    patch.setattr(unit, "announce", remembering)
    patch.setattr(DurableSession, "journal", hasty)


def acknowledged_before_accept(patch: Patch) -> None:
    accept = DurableSession.accept
    publish = _publisher(patch, "run")

    async def hasty(self: DurableSession, draft: Any, *arguments: Any, **more: Any) -> None:
        place = draft.input
        publish(InputAccepted(draft.seq, place.client_from_samples, place.client_to_samples))
        await asyncio.sleep(BEFORE_IT_IS_DURABLE_S)
        await accept(self, draft, *arguments, **more)

    patch.setattr(DurableSession, "accept", hasty)


def _publisher(patch: Patch, method: str) -> Callable[[Any], None]:
    """Publishes as the runner does whose method of that name was called last."""
    original = getattr(UnitRunner, method)
    runners: list[UnitRunner] = []

    async def watched(self: UnitRunner, *arguments: Any, **more: Any) -> Any:
        runners[:] = [self]
        return await original(self, *arguments, **more)

    patch.setattr(UnitRunner, method, watched)
    return lambda event: runners[0]._publish(event)


def sequence_reused(patch: Patch) -> None:
    """A successor numbers its events from a little earlier on, and nobody refuses that."""
    replace = assembly.structs.replace

    class Structs:
        @staticmethod
        def replace(struct: Any, **changes: Any) -> Any:
            if "last_sequence" in changes:
                changes["last_sequence"] = max(0, changes["last_sequence"] - 3)
            return replace(struct, **changes)

    patch.setattr(assembly, "structs", Structs)
    rewrite(
        patch,
        "if tonumber(ARGV[5]) ~= last + 1 then",
        "last = tonumber(ARGV[5]) - 1\nif false then",
        only=ScriptName.JOURNAL,
    )


def client_retries(patch: Patch) -> None:
    """The client library sends again by itself, ten times at once."""
    send = Connection._send

    async def stubborn(self: Connection, *arguments: Any, **more: Any) -> Any:
        for _ in range(10):
            try:
                return await send(self, *arguments, **more)
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                failed = error
        raise failed

    patch.setattr(Connection, "_send", stubborn)


def wait_elsewhere(patch: Patch) -> None:
    """The confirmation of the replicas is asked for on another connection than the write's."""
    confirmed = Connection._confirmed

    async def elsewhere(self: Connection, command: bytes, key: str) -> Any:
        if not self._wait:
            return await confirmed(self, command, key)
        node = self._nodes.holding(key)
        other = await node.pool.get_connection()
        try:
            answer = (await self._send(command, node))[0]
            await other.send_packed_command(self._wait)
            await other.read_response()
        finally:
            await node.pool.release(other)
        return answer

    patch.setattr(Connection, "_confirmed", elsewhere)


def numbers_not_kept(patch: Patch) -> None:
    """A command is applied, and its number is not written with it."""
    patch.setattr(client_commands, "encode_client_record", lambda record: "")


def applied_again(patch: Patch) -> None:
    """Nobody asks whether a command was applied before."""

    def then(self: ClientRecord, command: AppliedCommand) -> ClientRecord:
        return ClientRecord((*self.applied, command))

    patch.setattr(client_commands, "is_new", lambda record, command: True)
    patch.setattr(ClientRecord, "then", then)


def played_whatever_is_said(patch: Patch) -> None:
    """What a client acknowledges counts, twice as much even, and the journal is trimmed for it."""

    def twice(command: AcknowledgePlayback, speech: Speech) -> tuple[int, int]:
        return command.turn, 2 * command.played_samples

    patch.setattr(client_commands, "_played", twice)
    rewrite(patch, "samples > of_it", "false", only=ScriptName.CLIENT)
