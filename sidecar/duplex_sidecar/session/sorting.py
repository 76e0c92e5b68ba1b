"""A client's commands, each brought to where it waits for its turn: sound and frames to the input's
desk, what is said of replies to the commands' desk.
"""

from collections.abc import Callable
from contextlib import suppress

from duplex_sidecar.protocol.commands import (
    AcknowledgePlayback,
    AppendInput,
    CancelReply,
    ClearInput,
    Close,
    Command,
    CommitInput,
    Heartbeat,
    SetInputFormat,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Alive, Event, Failure, InputCleared
from duplex_sidecar.session.client_commands import CommandDesk
from duplex_sidecar.session.clients import Clients
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.input import InputDesk
from duplex_sidecar.session.mailbox import joined


class MailSorter:
    """Of one session; its task alone sorts. publish: to the client that is connected."""

    def __init__(
        self,
        clients: Clients,
        desk: InputDesk,
        commands: CommandDesk,
        durable: DurableSession,
        clock_s: Callable[[], float],
        publish: Callable[[Event], None],
    ) -> None:
        self._clients = clients
        self._desk = desk
        self._commands = commands
        self._durable = durable
        self._clock_s = clock_s
        self._publish = publish
        self._told_refusing = False
        self.closing = False
        """The client has said that it is the end."""
        self.last_input_s = clock_s()
        """When input came last, or the session was taken up."""

    def sort(self) -> None:
        """All that was said. What is refused, the client is told."""
        while run := self._clients.take():
            if len(run) > 1:
                # Pieces of sound that go on from each other cost as much as one. If they are
                # refused together, nothing has changed, and each is told by itself.
                with suppress(ClientError):
                    self._command(joined(run))
                    continue
            for command in run:
                try:
                    self._command(command)
                except ClientError as error:
                    self._publish(Failure(error.code, error.detail, error.param, command.event_id))

    def _command(self, command: Command) -> None:
        match command:
            case AppendInput():
                self._append(command)
            case CommitInput():
                self._desk.commit()
            case ClearInput():
                self._desk.clear()
                self._publish(InputCleared())
            case SetInputFormat():
                self._set_format(command)
            case CancelReply() | TruncateReply() | AcknowledgePlayback():
                self._commands.put(command)
            case Heartbeat():
                self._publish(Alive(command.event_id))
            case Close():
                self.closing = True

    def _set_format(self, command: SetInputFormat) -> None:
        numbered = self._commands.admits_format(command)
        self._publish(self._desk.set_format(command))
        if numbered:
            self._commands.put(command)

    def _append(self, command: AppendInput) -> None:
        if self.closing:
            raise ClientError(ErrorCode.OUT_OF_ORDER_EVENT, "input after session.close")
        if self._durable.refuses_input:
            raise ClientError(ErrorCode.LEDGER_UNAVAILABLE)
        self._desk.append(command)
        if command.audio or command.frames:
            self.last_input_s = self._clock_s()

    def tell_of_ledger(self) -> None:
        """That input is refused, once each time: a client that says nothing learns of it, too."""
        refusing = self._durable.refuses_input
        if refusing and not self._told_refusing:
            self._publish(
                Failure(ErrorCode.LEDGER_UNAVAILABLE, "input is refused until it is back")
            )
        self._told_refusing = refusing
