"""A client that interrupts: it stops replies, takes back what it has not heard, acknowledges what
it has played, every time under a number, and says again what nobody has answered.

What it says follows from the events alone, and it says it when nothing else is under way: with the
same input it has the same conversation, whatever happens to those who run it.
"""

from typing import Any

from support.histories import Person, World
from websockets.asyncio.client import ClientConnection

SAMPLES_PER_MS = 24


class Interrupter(Person):
    """pending: what was said and not answered. applied: numbers that were answered so."""

    def __init__(self, world: World, session: str, *, client: str = "c") -> None:
        super().__init__(world, session, client=client)
        self.pending: dict[int, dict[str, Any]] = {}
        self.applied: set[int] = set()
        self.refused: list[str] = []
        self.truncated = 0
        self.cancelled = 0
        self._numbers = 0
        self._spoken_after: set[int] = set()
        self._item: str | None = None
        self._samples = 0
        self._open = False

    async def _greeted(self, socket: ClientConnection) -> None:
        await super()._greeted(socket)
        for event in list(self.pending.values()):
            await self._send(socket, event)

    async def _speak(self, socket: ClientConnection, units: int) -> None:
        while max(self.units_done, default=0) < units:
            done = max(self.units_done, default=0)
            if not self.pending and done >= self.sent_unit:
                if done not in self._spoken_after:
                    self._spoken_after.add(done)
                    for event in self._due(done):
                        self._numbers += 1
                        named = event | {
                            "client_sequence": self._numbers,
                            "event_id": f"command-{self._numbers}",
                        }
                        self.pending[self._numbers] = named
                        await self._send(socket, named)
                    continue
                await self.send_input(socket, done + 1)
            await self._hear(socket)

    def _due(self, unit: int) -> list[dict[str, Any]]:
        """What is said after that unit."""
        if self._item is None or not self._samples:
            return []
        heard_ms = self._samples // SAMPLES_PER_MS * (unit % 5) // 5
        cut = {
            "type": "conversation.item.truncate",
            "item_id": self._item,
            "content_index": 0,
            "audio_end_ms": heard_ms,
        }
        played = {"type": "playback.ack", "item_id": self._item, "played_samples": self._samples}
        if unit % 4 == 0:
            return [played]
        if self._open:
            return [{"type": "response.cancel"}, cut] if unit % 2 else [cut]
        return [cut] if unit % 2 else []

    async def _hear(self, socket: ClientConnection) -> dict[str, Any]:
        event = await super()._hear(socket)
        match event["type"]:
            case "response.created":
                self._item, self._samples, self._open = None, 0, True
            case "response.output_audio.delta":
                self._item = event["item_id"]
                samples = len(event["delta"].rstrip("=")) * 3 // 4 // 2
                self._samples = event["duplex"]["from_sample"] + samples
            case "response.done":
                self._open = False
                self.cancelled += event["response"]["status"] == "cancelled"
            case "conversation.item.truncated":
                self.truncated += event["duplex"]["taken_back_tokens"] > 0
            case "session.command_applied":
                number = event["duplex"]["client_sequence"]
                self.pending.pop(number, None)
                self.applied.add(number)
            case _:
                pass
        return event

    def _refused(self, error: dict[str, Any]) -> None:
        name = error["event_id"] or ""
        if not name.startswith("command-"):
            super()._refused(error)
            return
        if self.pending.pop(int(name.removeprefix("command-")), None) is not None:
            self.refused.append(error["code"])
