"""The model that this replica serves, as far as a session has to know it. Torch-free."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duplex_api.given_voices import is_given
from duplex_sidecar.checkpoint.config import CONFIG_NAME, CheckpointConfig, read_config
from duplex_sidecar.checkpoint.layout import TOKENIZER_NAME
from duplex_sidecar.checkpoint.report import require_complete
from duplex_sidecar.checkpoint.tokenizer import load_vocabulary, read_tokenizer
from duplex_sidecar.checkpoint.voice import voice_references
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.envelope import ElementType

_SAMPLED_BYTES = 1024 * 1024
DEFAULT_VOICE = "default"


@dataclass(frozen=True)
class ServedModel:
    """fingerprint: names the checkpoint; a session never moves to another one. max_model_tokens,
    max_talker_tokens: the contract's limits here, at most what the checkpoint allows. references:
    length of each voice's reference clip, in samples at 16 kHz; absent or 0: it has none. given:
    the same of the voices that came with sessions; it grows and shrinks with them."""

    config: CheckpointConfig
    vocabulary: Vocabulary
    encode: Callable[[str], Sequence[int]]
    fingerprint: str
    max_model_tokens: int
    max_talker_tokens: int
    voices: frozenset[str]
    references: Mapping[str, int] = field(default_factory=dict[str, int])
    given: dict[str, int] = field(default_factory=dict[str, int])
    bench_script: tuple[tuple[int, ...], ...] = ()

    def has_voice(self, name: str) -> bool:
        return name in self.given if is_given(name) else name in self.voices

    def reference_samples(self, voice: str) -> int:
        return (self.given if is_given(voice) else self.references).get(voice, 0)

    @property
    def element_type(self) -> ElementType:
        return ElementType(self.config.element_type)


def load_model(settings: SidecarSettings) -> ServedModel:
    """Read what the sidecar needs of a checkpoint. Raises CheckpointError with the first findings
    when it is missing, incomplete or of another shape (weights that are made up are not looked at).
    """
    folder = Path(settings.checkpoint)
    config = read_config(folder) if settings.load_dummy_weights else require_complete(folder)
    tokenizer = read_tokenizer(folder)
    voices_dir = Path(settings.voices_dir) if settings.voices_dir else None
    references = voice_references(folder, voices_dir, config.token2wav)
    return ServedModel(
        config=config,
        vocabulary=load_vocabulary(folder),
        encode=tokenizer.encode,
        fingerprint=fingerprint_of(folder),
        max_model_tokens=min(settings.max_model_tokens, config.thinker.max_position_embeddings),
        max_talker_tokens=min(settings.max_talker_tokens, config.talker.max_position_embeddings),
        voices=frozenset(references),
        references=references,
        bench_script=settings.bench_script,
    )


def fingerprint_of(folder: Path) -> str:
    """sha256 over config and tokenizer and, of each weight file, its size and both ends: reading
    all of 18 GB at each start would cost more than the rest of the start."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, TOKENIZER_NAME):
        digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()[:32]
