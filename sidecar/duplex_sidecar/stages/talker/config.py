"""Config file of the Talker process: `--config` names a JSON file with these fields."""

from duplex_sidecar.stages.engine.settings import EngineSettings


class TalkerSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of EngineSettings. Hidden rows of conditions may have any float element type: the class
    casts them to its own."""
