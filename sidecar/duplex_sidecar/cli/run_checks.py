"""What `duplex run` can know before it starts anything: half a minute later a sidecar would say the
same."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from duplex_api.ledger_address import without_login
from duplex_api.manifest import load_manifests
from duplex_api.resolve import UnknownPresetError
from duplex_api.window import WindowConfigError
from duplex_sidecar.checkpoint.voice import load_voice
from duplex_sidecar.checkpoint.voice_format import VOICE_SUFFIX
from duplex_sidecar.ledger.errors import LedgerError
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.session.model import load_model
from duplex_sidecar.session.opening import (
    UnservedManifestError,
    require_both_modalities,
    resolve_served,
)
from duplex_sidecar.settings import SidecarSettings

_ANY_LEDGER = "redis://localhost"
"""Nothing that is looked at here depends on it."""


class NotRunnable(Exception):
    """The text says why, to a person."""


def require_ledger(url: str) -> None:
    """Raises NotRunnable when nothing answers there that can be a ledger."""

    async def look() -> None:
        await (await Ledger.connect(url)).close()

    try:
        asyncio.run(look())
    except LedgerError as error:
        text = f"the ledger at {without_login(url)} cannot be used: {error.reason}"
        raise NotRunnable(text) from error


def require_servable(manifest: str, places: Mapping[str, str]) -> None:
    """manifest: a text that `read_manifest` has taken. places: settings of the sidecar that is to
    serve it, its folders.

    Raises NotRunnable for what it would refuse, CheckpointError for a checkpoint or a voice that is
    not there or cannot be used."""
    rest = {"redis_url": _ANY_LEDGER, "runtime_dir": places["cache_dir"]}
    settings = msgspec.convert({**places, **rest}, SidecarSettings)
    manifests = load_manifests(manifest)
    session = manifests.only_session()
    model = load_model(settings)
    voice = session.spec.voice.name if session.spec.voice else None
    voices_dir = Path(settings.voices_dir)
    if voice and settings.voices_dir and (voices_dir / f"{voice}{VOICE_SUFFIX}").exists():
        # Of the sidecar's there is no more than that it left it out.
        load_voice(Path(settings.checkpoint), voice, model.config.token2wav, voices_dir)
    try:
        resolved = resolve_served(session, manifests.pool_of(session), model)
        require_both_modalities(resolved)
    except (UnknownPresetError, UnservedManifestError, WindowConfigError) as error:
        problems = "\n".join(str(problem) for problem in error.problems)
        raise NotRunnable(f"the session cannot be served:\n{problems}") from error
