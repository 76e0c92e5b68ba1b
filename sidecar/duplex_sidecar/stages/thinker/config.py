"""Config file of the Thinker process: `--config` names a JSON file with these fields."""

from duplex_sidecar.stages.engine.settings import EngineSettings


class ThinkerSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of EngineSettings. element_type is also that of the rows in prompts and answers.

    bench_scripts: take `UnitRules.bench_script`, for measurements with random weights.
    decision_rows: hand out `ThinkerAnswer.decision_row`, for proofs of exactness.
    """

    bench_scripts: bool = False
    decision_rows: bool = False
