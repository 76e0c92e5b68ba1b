"""`duplex` with fake stages behind the real sidecar: the command line of the real one.

Everything is the product's own (settings, doors, admin API, feed, ledger, supervisor, sessions) but
the program of each stage's process: `fake_stage_process.py`. Its pods need neither torch nor vLLM,
so eight of them fit where two real ones do.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from duplex_sidecar import app
from duplex_sidecar.cli.main import main
from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.envelope import ElementType
from duplex_sidecar.stages.launch import stage_specs
from duplex_sidecar.stages.supervisor import StageSpec

STAGE_PROGRAM = Path(__file__).with_name("fake_stage_process.py")


def fake_specs(settings: SidecarSettings, element_type: ElementType) -> list[StageSpec]:
    """As the real ones, config files and sockets included."""
    return [_fake(spec) for spec in stage_specs(settings, element_type)]


def _fake(spec: StageSpec) -> StageSpec:
    return replace(spec, argv=(sys.executable, str(STAGE_PROGRAM), spec.stage, *_options(spec)))


def _options(spec: StageSpec) -> Sequence[str]:
    """Of the command line: what stands behind `-m MODULE`."""
    return spec.argv[spec.argv.index("-m") + 2 :]


if __name__ == "__main__":
    app.stage_specs = fake_specs
    main()
