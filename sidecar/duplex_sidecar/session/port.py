"""What a door may ask of the sessions: attach a client, give commands, take events."""

from typing import Protocol

from duplex_sidecar.protocol.commands import Command
from duplex_sidecar.protocol.events import Event, Failure


class Attachment(Protocol):
    """One client connected to one session. At most one per session: a newer one replaces it."""

    @property
    def session(self) -> str: ...

    async def submit(self, command: Command) -> None:
        """Hand a command to the session; waits while its mailbox is full (back-pressure).

        Raises ClientError when the session refuses it at once or has ended."""
        ...

    def refuse(self, failure: Failure) -> None:
        """Tell the client, behind the events that wait for it, what was wrong with a message."""
        ...

    async def next_event(self) -> Event | None:
        """The next event for this client, or None after the last one."""
        ...

    async def detach(self) -> None:
        """The client is gone; the session goes on for its disconnect grace."""
        ...


class SessionPort(Protocol):
    async def attach(self, session: str, token: str, last_sequence: int | None) -> Attachment:
        """Attach a client by its token, on the session's replica or by recovery from the ledger.

        last_sequence: newest sequence the client has seen: everything after it is replayed first;
        None replays nothing. Raises ClientError: session_not_found (also for a wrong token),
        not_ready, resource_exhausted, ledger_unavailable.
        """
        ...
