"""Scenes with one misfortune each, recorded by outside observers and judged from their files by
`duplex history check`; together they are not vacuous."""

import asyncio
import sys
from pathlib import Path

import pytest
from support import last_run
from support.aof_witness import AofWitness

from duplex_sidecar.cli.history import check
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from support import scenes
from support.histories import Doors, World, short_leases

pytestmark = pytest.mark.fault
LEASE_MS, MARGIN_MS, RENEW_MS = 1_000, 200, 100
SCENE_S = 90.0
SCENES = (
    scenes.plain,
    scenes.zombie,
    scenes.broken_lease,
    scenes.late_arrival,
    scenes.lost_replies,
    scenes.death,
    scenes.one_way,
    scenes.slow_ledger,
    scenes.interrupted,
    scenes.interrupted_death,
    scenes.lost_replies_to_a_cut,
)


async def test_the_files_of_all_scenes_hold(
    valkey: EmbeddedValkey,
    witness: AofWitness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short_leases(monkeypatch, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, renew_ms=RENEW_MS)
    files: list[Path] = []
    async with Doors().open() as doors:
        for scene in SCENES:
            session = scene.__name__.replace("_", "-")
            async with World(doors, valkey.url, tmp_path, session, witness=witness) as world:
                async with asyncio.timeout(SCENE_S):
                    await scene(world, session)
                await world.finish(session)
            files.append(world.observer.write(tmp_path / f"{session}.jsonl"))
            last_run.add("scenes", [world.report()])
    status = check(*files, zombies=2, redos=1, resends=3, takeovers=4)
    assert status == 0, capsys.readouterr().out
    assert witness.differences(valkey.url, tmp_path / "copy") == []
    last_run.add("append_only_file", [], sessions={"scenes": len(witness.ends)})
