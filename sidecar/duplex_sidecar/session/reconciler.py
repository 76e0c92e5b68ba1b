"""Ends what a stage still holds for sessions that are not here any more.

A close that got no answer, or a session that was dropped in a hurry, can leave a stream behind,
which holds a seat and KV for ever. So what the stages hold is compared with the sessions of this
replica each few seconds; what twice in a row belongs to nobody is closed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass

from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.stages.envelope import EncoderClose, TalkerClose, ThinkerClose, WaveClose
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.stages.interface import Stage

log = logging.getLogger(__name__)

PERIOD_S = 5.0


def session_of_stream(stream: str) -> str:
    """Streams are called `session/fence/number` (`session.streams`), encoder states and vocoder
    streams by their session."""
    return stream.split("/", 1)[0]


def orphans(streams: Set[str], sessions: Set[str], suspects: Set[str]) -> tuple[set[str], set[str]]:
    """(what to close now, whom to suspect): streams of no session, close those suspected before."""
    homeless = {stream for stream in streams if session_of_stream(stream) not in sessions}
    return homeless & suspects, homeless - suspects


@dataclass
class _Watched:
    name: str
    stage: Stage
    close: Callable[[str], Awaitable[None]]
    suspects: set[str]


class Reconciler:
    """sessions: the ids that run on this replica now, those being opened included."""

    def __init__(self, stages: StageSet, sessions: Callable[[], Set[str]]) -> None:
        self._sessions = sessions
        self._watched = [
            _Watched(
                "encoder", stages.encoder, lambda s: stages.encoder.close(EncoderClose(s)), set()
            ),
            _Watched(
                "thinker", stages.thinker, lambda s: stages.thinker.close(ThinkerClose(s)), set()
            ),
            _Watched("talker", stages.talker, lambda s: stages.talker.close(TalkerClose(s)), set()),
            _Watched(
                "code2wav", stages.code2wav, lambda s: stages.code2wav.close(WaveClose(s)), set()
            ),
        ]

    async def run(self) -> None:
        """Until cancelled; what goes wrong with one look is logged, and the next one comes."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
            except Exception:
                log.exception("streams cannot be compared")

    async def look(self) -> None:
        """One comparison. A stage that does not answer is looked at again next time."""
        for watched in self._watched:
            try:
                held = set((await watched.stage.health()).streams)
                close, watched.suspects = orphans(held, self._sessions(), watched.suspects)
                for stream in sorted(close):
                    fields = {"stage": watched.name, "session": session_of_stream(stream)}
                    log.warning("stream of no session closed", extra={"fields": fields})
                    await watched.close(stream)
            except StageError:
                watched.suspects = set()
