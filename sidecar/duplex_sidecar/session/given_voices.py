"""Voices that an operator hands over with a session, out of a Secret or ConfigMap.

Each is a file in this replica's own folder, under a name made of its content, where the stages look
for it when a session opens. Whoever places a session brings its voice along, so nothing here has to
outlive the replica.
"""

import threading
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from duplex_api.given_voices import given_voice_name, is_given
from duplex_api.session import SessionSpec
from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.voice import read_voice
from duplex_sidecar.checkpoint.voice_format import VOICE_SUFFIX
from duplex_sidecar.ledger.records import Opening
from duplex_sidecar.session.roster import Roster

SPARE_VOICES = 16
"""Kept beside those in use, for sessions that come back."""


class GivenVoices:
    """references: gets the length of each voice's clip, in samples at 16 kHz. in_use: names; of
    sessions that live here or are prepared. slots: so many more may be just being opened, and bring
    their voices before they live."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        config: Token2WavConfig,
        references: dict[str, int],
        in_use: Callable[[], Set[str]],
        slots: int = 0,
    ) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._config = config
        self._references = references
        self._in_use = in_use
        self._spare = SPARE_VOICES + slots
        self._lock = threading.Lock()
        self._newest: dict[str, None] = {}
        """Names; the one that was given last comes last."""

    def take(self, content: bytes) -> str:
        """Keep a voice file; returns its name. Reads and writes files: not for an event loop.

        Raises CheckpointError (unreadable, invalid_voice).
        """
        name = given_voice_name(content)
        with self._lock:
            if name not in self._newest:
                self._references[name] = self._write(name, content)
            self._newest.pop(name, None)
            self._newest[name] = None
            self._make_room(keep=name)
        return name

    def _write(self, name: str, content: bytes) -> int:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unchecked = self._folder / f"{name}.unchecked"
        unchecked.write_bytes(content)
        try:
            voice = read_voice(unchecked, name, self._checkpoint, self._config)
            samples = len(voice.reference_16khz)
            unchecked.rename(self._folder / f"{name}{VOICE_SUFFIX}")
        finally:
            unchecked.unlink(missing_ok=True)
        return samples

    def _make_room(self, keep: str) -> None:
        needed = self._in_use() | {keep}
        idle = [name for name in self._newest if name not in needed]
        for name in idle[: max(0, len(idle) - self._spare)]:
            del self._newest[name]
            self._references.pop(name, None)
            (self._folder / f"{name}{VOICE_SUFFIX}").unlink(missing_ok=True)


def given_voices_in_use(roster: Roster, expected: Iterable[SessionSpec]) -> Set[str]:
    """Of the sessions that live here, and of those that are to come."""
    names: set[str] = set()
    for terms in (*(entry.terms for entry in list(roster.live.values())), *expected):
        voice = terms.voice if isinstance(terms, Opening) else terms.voice and terms.voice.name
        if voice and is_given(voice):
            names.add(voice)
    return names
