"""Voices that come with sessions: kept by content, checked, and let go when nobody speaks with
them."""

from pathlib import Path

import pytest

from duplex_api.given_voices import MAX_GIVEN_VOICE_BYTES, given_voice_name, is_given
from duplex_api.session import PoolRef, SessionSpec, Voice
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.voice import load_voice, save_voice, seeded_voice
from duplex_sidecar.checkpoint.voice_format import VOICE_NAME
from duplex_sidecar.session.given_voices import (
    SPARE_VOICES,
    GivenVoices,
    given_voices_in_use,
)
from duplex_sidecar.session.roster import Roster

pytestmark = pytest.mark.unit

CONFIG = tiny_config().token2wav


def voice_file(folder: Path, seed: int = 0, codes: int = 20) -> bytes:
    return save_voice(folder, seeded_voice("made", codes, seed, CONFIG)).read_bytes()


class Kept:
    """Voices, and who speaks with them."""

    def __init__(self, folder: Path, slots: int = 0) -> None:
        self.folder = folder
        self.known: dict[str, int] = {}
        self.used: set[str] = set()
        self.voices = GivenVoices(folder, folder, CONFIG, self.known, lambda: self.used, slots)

    def files(self) -> set[str]:
        return {path.stem for path in self.folder.iterdir()}


def test_the_stages_find_a_voice_that_was_given(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "given")
    content = voice_file(tmp_path, codes=150)
    assert len(content) < MAX_GIVEN_VOICE_BYTES
    name = kept.voices.take(content)
    assert name == given_voice_name(content) == kept.voices.take(content)
    assert is_given(name)
    assert VOICE_NAME.fullmatch(name)
    assert kept.known == {name: 6 * 16_000}
    loaded = load_voice(tmp_path, name, CONFIG, None, kept.folder)
    assert len(loaded.prompt_codes) == 150
    with pytest.raises(CheckpointError):
        load_voice(tmp_path, name, CONFIG)


@pytest.mark.parametrize("content", [b"", b"RIFF....WAVEfmt ", b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_voice_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    kept = Kept(tmp_path / "given")
    with pytest.raises(CheckpointError) as caught:
        kept.voices.take(content)
    assert caught.value.fault in (CheckpointFault.UNREADABLE, CheckpointFault.INVALID_VOICE)
    assert kept.files() == set()
    assert kept.known == {}


def test_voices_in_use_stay_and_the_oldest_others_go(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "given")
    spoken = kept.voices.take(voice_file(tmp_path, seed=1_000, codes=4))
    kept.used = {spoken}
    others = [
        kept.voices.take(voice_file(tmp_path, seed, codes=4)) for seed in range(SPARE_VOICES + 3)
    ]
    # The last one is being placed: it counts as in use.
    assert kept.files() == {spoken, *others[2:]} == set(kept.known)
    kept.used = set()
    kept.voices.take(voice_file(tmp_path, seed=2_000, codes=4))
    assert spoken not in kept.known


def test_the_voices_of_sessions_that_all_come_at_once_stay(tmp_path: Path) -> None:
    slots = 4
    kept = Kept(tmp_path / "given", slots)
    names = {
        kept.voices.take(voice_file(tmp_path, seed, codes=4))
        for seed in range(SPARE_VOICES + slots)
    }
    assert kept.files() == names


def test_a_session_that_is_to_come_needs_its_voice_already() -> None:
    given = given_voice_name(b"a voice")
    voices = (Voice(name=given), Voice(name="calm"), None)
    expected = [SessionSpec(pool_ref=PoolRef(name="p"), voice=voice) for voice in voices]
    assert given_voices_in_use(Roster(1), expected) == {given}
    assert given_voices_in_use(Roster(1), ()) == set()
