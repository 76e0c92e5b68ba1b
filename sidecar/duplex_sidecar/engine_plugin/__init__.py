"""General plugin of vLLM: makes the duplex Thinker and Talker models that a stock vLLM can serve.

Entry point group `vllm.general_plugins`, name `duplex`. vLLM calls `register` once in each of its
processes (front end, engine core, model inspection) before it resolves a model's architecture.
Importing this package costs nothing; torch and vllm are imported by its modules.
"""

from duplex_sidecar.checkpoint.engine_view import TALKER_ARCHITECTURE, THINKER_ARCHITECTURE
from duplex_sidecar.stages.family import die_with_stage

THINKER_PROCESSOR = "duplex_sidecar.engine_plugin.thinker_processor:ThinkerProcessor"
TALKER_PROCESSOR = "duplex_sidecar.engine_plugin.talker_processor:TalkerProcessor"
"""Values for the engine argument `logits_processors`."""
DECISION_ROWS_KEY = "decision_rows"
"""In the plugin's config: the Thinker publishes the hidden row of each unit's decision, too."""


def register() -> None:
    """Register both model classes, and tie this process's life to its stage process."""
    die_with_stage()
    from vllm import ModelRegistry

    # Strings instead of classes: the front end then never imports the kernels behind them.
    package = "duplex_sidecar.engine_plugin"
    ModelRegistry.register_model(THINKER_ARCHITECTURE, f"{package}.thinker_model:DuplexThinker")
    ModelRegistry.register_model(TALKER_ARCHITECTURE, f"{package}.talker_model:DuplexTalker")
