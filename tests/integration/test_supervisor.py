"""The supervisor: starts, watches, restarts; nothing survives it. Small fake stages, and at the end
the real Thinker whose engine core is killed."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engine_kit import (
    ProcessTree,
    make_engine_checkpoint,
    random_rows,
    running,
    stage_spec,
    tensor,
    wait_until_gone,
)

from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    UnitRules,
    encode_rules,
    initial_state,
)
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import (
    Done,
    ElementType,
    Health,
    HealthReport,
    Ids,
    Rows,
    ThinkerClose,
    ThinkerFeed,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.supervisor import (
    RestartPolicy,
    StageReport,
    StageSpec,
    StageStartError,
    StageState,
    Supervisor,
)
from duplex_sidecar.stages.thinker.client import ThinkerClient
from duplex_sidecar.stages.thinker.config import ThinkerSettings

pytestmark = pytest.mark.integration

FAKE_STAGE = '''
"""A stage without a model. The config file holds one word: how it behaves."""
import asyncio, os, subprocess, sys, time
from duplex_sidecar.stages.envelope import Done, Health, HealthReport
from duplex_sidecar.stages.process_main import run_stage_process

CHILD = (
    "import time; from duplex_sidecar.stages.family import die_with_stage; "
    "die_with_stage(); time.sleep(600)"
)

class Service:
    def __init__(self, how):
        self.how = how
    async def handle(self, request):
        if isinstance(request, Health):
            if self.how == "hangs" and os.path.exists("hang"):
                await asyncio.sleep(600)
            return HealthReport("fake", {"answer": 42}, ())
        await asyncio.sleep(600)
        return Done()
    async def failed(self):
        while not os.path.exists("fail"):
            await asyncio.sleep(0.01)
        os.unlink("fail")
        return "told to fail"
    async def close(self):
        if self.how == "stubborn":
            time.sleep(600)

async def load(config):
    how = config.decode()
    print("loading", how, flush=True)
    if how == "broken":
        raise RuntimeError("no such weights")
    if how == "endless":
        await asyncio.sleep(600)
    subprocess.Popen([sys.executable, "-c", CHILD])
    return Service(how)

run_stage_process("fake", load)
'''

QUICK = RestartPolicy(
    ready_timeout_s=90.0,
    progress_interval_s=0.1,
    first_backoff_s=0.01,
    max_failed_starts=2,
    health_interval_s=0.1,
    health_timeout_s=20.0,
    stop_grace_s=20.0,
)
IMPATIENT = replace(QUICK, health_timeout_s=0.5, stop_grace_s=1.0)
"""For stages that do not answer, or do not leave."""


GONE_S = 60.0
"""Whatever was killed is not there any more, as soon as the system has come to it."""


def fake_spec(folder: Path, how: str, stage: str = "fake") -> StageSpec:
    script, config = folder / "stage.py", folder / f"{stage}.conf"
    script.write_text(FAKE_STAGE)
    config.write_text(how)
    socket = folder / f"{stage}.sock"
    argv = (sys.executable, str(script), "--socket", str(socket), "--config", str(config))
    return StageSpec(stage, argv, socket, folder / f"{stage}.log", os.environ)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake stages look for their signal files here."""
    monkeypatch.chdir(tmp_path)


def states(reports: Sequence[StageReport]) -> list[StageState]:
    """Transitions, progress left out."""
    found: list[StageState] = []
    for report in reports:
        if not found or found[-1] is not report.state:
            found.append(report.state)
    return found


async def until(supervisor: Supervisor, stage: str, state: StageState, generation: int) -> None:
    async with asyncio.timeout(180):
        while True:
            report = supervisor.report(stage)
            if report.state is state and report.generation == generation:
                return
            await asyncio.sleep(0.02)


async def until_generation(supervisor: Supervisor, stage: str, generation: int) -> None:
    await until(supervisor, stage, StageState.READY, generation)


def below(pid: int | None = None) -> list[int]:
    return ProcessTree(pid or os.getpid()).children()


async def test_a_stage_comes_up_and_leaves_with_all_its_children(tmp_path: Path) -> None:
    before = set(below())
    async with running(fake_spec(tmp_path, "well"), policy=QUICK) as (supervisor, reports):
        assert supervisor.report("fake").state is StageState.READY
        assert states(reports) == [StageState.STARTING, StageState.READY]
        assert reports[-1].limits == {"answer": 42}
        assert reports[-1].elapsed_s > 0
        link = supervisor.link("fake")
        assert link.generation == 1
        assert (await link.call(Health(), HealthReport, 60)).stage == "fake"
        started = set(below()) - before
        assert len(started) == 2
        assert os.getpgid(min(started)) != os.getpgid(0)
    await wait_until_gone(list(started), GONE_S)
    assert states(reports)[-1] is StageState.STOPPED
    assert "loading well" in " ".join(supervisor.log_tail("fake"))
    assert not (tmp_path / "fake.sock").exists()
    with pytest.raises(StageError) as caught:
        await link.call(Health(), HealthReport, 60)
    assert caught.value.fault is StageFault.GONE


async def test_progress_is_reported_while_it_loads(tmp_path: Path) -> None:
    progress: list[StageReport] = []
    told = asyncio.Event()

    def on_report(report: StageReport) -> None:
        if report.reason == "loading endless":
            progress.append(report)
        if len(progress) >= 2:
            told.set()

    supervisor = Supervisor([fake_spec(tmp_path, "endless")], on_report, QUICK)
    starting = asyncio.create_task(supervisor.start())
    await told.wait()
    assert not starting.done()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert progress[-1].elapsed_s > progress[0].elapsed_s


async def test_a_stage_that_does_not_get_ready_is_given_up(tmp_path: Path) -> None:
    policy = RestartPolicy(ready_timeout_s=0.5, max_failed_starts=1, stop_grace_s=0.1)
    supervisor = Supervisor([fake_spec(tmp_path, "endless")], lambda _: None, policy)
    with pytest.raises(StageStartError, match=r"not ready within 0\.5 s"):
        await supervisor.start()


async def test_a_killed_stage_is_restarted_and_its_calls_fail_at_once(tmp_path: Path) -> None:
    before = set(below())
    async with running(fake_spec(tmp_path, "well"), policy=QUICK) as (supervisor, reports):
        link = supervisor.link("fake")
        first = set(below()) - before
        call = asyncio.create_task(link.call(ThinkerClose("s"), Done, 60))
        await asyncio.sleep(0.1)
        os.kill(min(first), signal.SIGKILL)
        with pytest.raises(StageError) as caught:
            await asyncio.wait_for(call, 30)
        assert caught.value.fault is StageFault.GONE
        await until_generation(supervisor, "fake", 2)
        # Its child went with it, without anybody having to sweep.
        await wait_until_gone(list(first), GONE_S)
        assert (await link.call(Health(), HealthReport, 60)).stage == "fake"
        assert states(reports) == [
            StageState.STARTING,
            StageState.READY,
            StageState.RESTARTING,
            StageState.READY,
        ]
        assert any("SIGKILL" in report.reason for report in reports)


async def test_a_stage_that_gives_itself_up_is_restarted(tmp_path: Path) -> None:
    async with running(fake_spec(tmp_path, "well"), policy=QUICK) as (supervisor, reports):
        (tmp_path / "fail").touch()
        await until_generation(supervisor, "fake", 2)
    (lost,) = [r for r in reports if "exited with status 70" in r.reason]
    assert "told to fail" in lost.reason


async def test_a_stage_that_hangs_is_restarted(tmp_path: Path) -> None:
    async with running(fake_spec(tmp_path, "hangs"), policy=IMPATIENT) as (supervisor, reports):
        (tmp_path / "hang").touch()
        await until(supervisor, "fake", StageState.RESTARTING, 1)
        (tmp_path / "hang").unlink()
        await until_generation(supervisor, "fake", 2)
    assert any("health failed 2 times" in report.reason for report in reports)


async def test_a_stage_that_cannot_load_fails_with_its_last_words(tmp_path: Path) -> None:
    before = set(below())
    reports: list[StageReport] = []
    specs = [fake_spec(tmp_path, "well", "one"), fake_spec(tmp_path, "broken", "two")]
    supervisor = Supervisor(specs, reports.append, QUICK)
    with pytest.raises(StageStartError) as caught:
        await supervisor.start()
    assert caught.value.stage == "two"
    assert "no such weights" in " ".join(caught.value.log_tail)
    assert StageState.FAILED in states([r for r in reports if r.stage == "two"])
    # The other one is stopped too.
    await wait_until_gone(list(set(below()) - before), GONE_S)


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    spec = fake_spec(tmp_path, "well")
    missing = StageSpec("fake", (str(tmp_path / "nothing"),), spec.socket, spec.log, {})
    supervisor = Supervisor([missing], lambda _: None, QUICK)
    with pytest.raises(StageStartError, match="cannot start"):
        await supervisor.start()


async def test_a_stage_that_does_not_want_to_leave_is_made_to(tmp_path: Path) -> None:
    before = set(below())
    async with running(fake_spec(tmp_path, "stubborn"), policy=IMPATIENT):
        started = set(below()) - before
    assert started
    await wait_until_gone(list(started), GONE_S)


async def test_a_long_log_is_put_aside_at_the_next_start(tmp_path: Path) -> None:
    spec = fake_spec(tmp_path, "well")
    spec.log.write_bytes(b"old line\n" * 600_000)
    async with running(spec, policy=QUICK):
        assert spec.log.stat().st_size < 10_000
        assert spec.log.with_suffix(".log.1").exists()


SIDECAR = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from duplex_sidecar.stages.supervisor import StageSpec, Supervisor
import os

async def main():
    folder = Path(sys.argv[2])
    argv = (sys.executable, str(folder / "stage.py"),
            "--socket", str(folder / "fake.sock"), "--config", str(folder / "fake.conf"))
    spec = StageSpec("fake", argv, folder / "fake.sock", folder / "fake.log", os.environ)
    supervisor = Supervisor([spec], lambda report: None)
    await supervisor.start()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_death_of_the_sidecar_leaves_no_orphan(tmp_path: Path) -> None:
    fake_spec(tmp_path, "well")
    here = str(Path(__file__).parent)
    sidecar = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SIDECAR, here, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert sidecar.stdout is not None
    assert await asyncio.wait_for(sidecar.stdout.readline(), 180) == b"ready\n"
    family = below(sidecar.pid)
    assert len(family) == 2
    sidecar.kill()
    await sidecar.wait()
    await wait_until_gone(family, GONE_S)


async def test_the_death_of_the_engine_core_restarts_the_thinker(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    make_engine_checkpoint(tmp_path / "checkpoint")
    settings = ThinkerSettings(
        checkpoint=str(tmp_path / "checkpoint"),
        device=Device.CPU,
        element_type=ElementType.FLOAT32,
        context_tokens=480,
        seats=2,
        kv_bytes=8 * 1024 * 1024,
        runtime_dir=str(tmp_path / "run"),
        cache_dir=str(request.config.cache.mkdir("stage-caches")),
    )
    unit = load_vocabulary(tmp_path / "checkpoint").unit
    before = set(below())
    async with running(stage_spec("thinker", settings)) as (supervisor, reports):
        thinker = ThinkerClient(supervisor.link("thinker"))
        first = await thinker.feed(_feed("a", unit, position=0))
        family = set(below()) - before
        core = _engine_core(family)
        # One feed is under way while the core dies.
        long = asyncio.create_task(thinker.feed(_feed("b", unit, position=0, ids=400)))
        await asyncio.sleep(0)
        os.kill(core, signal.SIGKILL)
        with pytest.raises(StageError) as caught:
            await asyncio.wait_for(long, 60)
        assert caught.value.fault is StageFault.GONE
        await wait_until_gone(list(family), GONE_S)
        await until(supervisor, "thinker", StageState.RESTARTING, 1)
        await until_generation(supervisor, "thinker", 2)
        position = 11 + len(first.emitted_ids) - 1
        with pytest.raises(StageError) as caught:
            await thinker.feed(_feed("a", unit, position=position))
        assert caught.value.fault is StageFault.UNKNOWN_STREAM
        again = await thinker.feed(_feed("a", unit, position=0))
        assert again.emitted_ids == first.emitted_ids
        # The death of the stage process itself takes the core along.
        family = set(below()) - before
        os.kill(min(family), signal.SIGKILL)
        await wait_until_gone(list(family), GONE_S)
    assert StageState.RESTARTING in states(reports)
    await wait_until_gone(list(set(below()) - before), GONE_S)


def _engine_core(family: set[int]) -> int:
    (core,) = [pid for pid in family if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return core


def _feed(stream: str, unit: int, *, position: int, ids: int = 1) -> ThinkerFeed:
    rules = UnitRules(
        policy=initial_state(seeded_text=False),
        is_speech=True,
        force_listen=False,
        max_tokens=None,
        sampling=GREEDY_SAMPLING,
        seed=stream,
    )
    return ThinkerFeed(
        session=stream,
        stream=stream,
        unit=position,
        opens=position == 0,
        position=position,
        parts=(Ids((unit,) * ids), Rows(tensor(random_rows(10, 1)))),
        rules=encode_rules(rules),
    )
