"""What a client has said and the session's task has not heard yet.

A slice of audio that closes no unit wakes nobody: it waits for the slices behind it, and they are
taken as one. How a client slices its audio never changes an output, so only the cost differs.
"""

from collections import deque

from duplex_sidecar.protocol.commands import AppendInput, Command

MAILBOX_COMMANDS = 64
_MAX_JOINED_BYTES = 1024 * 1024


class Mailbox:
    """Commands of one client in their order, at most `MAILBOX_COMMANDS`."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._audio_bytes = 0

    @property
    def full(self) -> bool:
        return len(self._commands) >= MAILBOX_COMMANDS

    def put(self, command: Command, missing_bytes: int) -> bool:
        """Whether the session has to look now: something else than sound came, or the sound that
        waits reaches `missing_bytes` (what the next unit lacks), or there is no more room."""
        self._commands.append(command)
        if not isinstance(command, AppendInput) or command.frames:
            return True
        self._audio_bytes += len(command.audio)
        return self._audio_bytes >= missing_bytes or self.full

    def take(self, sample_bytes: int) -> list[Command]:
        """The oldest command, and if it is an append those behind it that only go on from it; empty
        when nothing waits. sample_bytes: of one sample in the present input format."""
        if not self._commands:
            return []
        first = self._commands.popleft()
        run: list[Command] = [first]
        if isinstance(first, AppendInput):
            held_bytes = len(first.audio)
            while (following := self._following(first, held_bytes, sample_bytes)) is not None:
                self._commands.popleft()
                run.append(following)
                held_bytes += len(following.audio)
            self._audio_bytes = max(0, self._audio_bytes - held_bytes)
        return run

    def clear(self) -> None:
        """Forget what nobody has heard."""
        self._commands.clear()
        self._audio_bytes = 0

    def _following(
        self, first: AppendInput, held_bytes: int, sample_bytes: int
    ) -> AppendInput | None:
        """The next command, if it goes on where the run of `held_bytes` ends."""
        following = self._commands[0] if self._commands else None
        if not isinstance(following, AppendInput) or following.frames:
            return None
        # A piece of no whole number of samples is refused by itself: two of them are no good one.
        if held_bytes % sample_bytes or len(following.audio) % sample_bytes:
            return None
        if held_bytes + len(following.audio) > _MAX_JOINED_BYTES:
            return None
        if first.from_sample is None or following.from_sample is None:
            goes_on = first.from_sample is following.from_sample
        else:
            goes_on = following.from_sample == first.from_sample + held_bytes // sample_bytes
        same = (first.is_speech, first.force_listen) == (
            following.is_speech,
            following.force_listen,
        )
        return following if goes_on and same else None


def joined(run: list[Command]) -> Command:
    """A run of `Mailbox.take` as one command."""
    first = run[0]
    if len(run) == 1 or not isinstance(first, AppendInput):
        return first
    pieces = [one.audio for one in run if isinstance(one, AppendInput)]
    return AppendInput(
        audio=b"".join(pieces),
        frames=first.frames,
        from_sample=first.from_sample,
        is_speech=first.is_speech,
        force_listen=first.force_listen,
        event_id=first.event_id,
    )
