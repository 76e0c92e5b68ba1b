"""The checker sees what it is for: products built wrong, each in one way, are caught by it, and the
same scenes of the right product are not."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import last_run
from support.valkeys import primary_and_replica

from duplex_sidecar.history.verdict import Minimums, Report, Rule
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.server import Durability

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from support import mutants, scenes
from support.histories import Doors, World, short_leases

pytestmark = pytest.mark.fault
LEASE_MS, MARGIN_MS, RENEW_MS = 1_000, 200, 100
JUDGED_LEASE_MS, JUDGED_MARGIN_MS = 4_000, 2_000
SCENE_S = 90.0
ANYTHING = Minimums()


@dataclass(frozen=True)
class Mutant:
    """minimums: what the scene of the right product must have in it. durability: of the ledger."""

    patch: Callable[[pytest.MonkeyPatch], None]
    scene: scenes.Scene
    caught_by: Rule
    minimums: Minimums = ANYTHING
    durability: Durability = Durability.MEMORY


MUTANTS = (
    Mutant(
        mutants.no_fence,
        scenes.zombie,
        Rule.FENCE_OF_TWO_REPLICAS,
        Minimums(refused_zombie_writes=1, takeovers=1),
    ),
    Mutant(
        mutants.no_nonce,
        scenes.broken_lease,
        Rule.WRITE_AFTER_LOSS,
        Minimums(refused_zombie_writes=1, takeovers=1),
    ),
    Mutant(mutants.no_head_check, scenes.late_arrival, Rule.EXECUTED_TWICE, Minimums(resends=1)),
    Mutant(mutants.audio_before_journal, scenes.plain, Rule.EVENT_BEFORE_JOURNAL),
    Mutant(mutants.acknowledged_before_accept, scenes.plain, Rule.ACKNOWLEDGED_BEFORE_DURABLE),
    Mutant(
        mutants.trim_at_accept,
        scenes.death,
        Rule.LEDGER_UNREADABLE,
        Minimums(redos=1, takeovers=1),
    ),
    Mutant(
        mutants.sequence_reused,
        scenes.death,
        Rule.SEQUENCE_REUSED,
        Minimums(redos=1, takeovers=1),
    ),
    Mutant(mutants.deadline_from_the_reply, scenes.slow_renewal, Rule.SPOKE_WITHOUT_LEASE),
    Mutant(mutants.client_retries, scenes.lost_replies, Rule.HIDDEN_RETRY, Minimums(resends=1)),
    Mutant(mutants.numbers_not_kept, scenes.interrupted, Rule.COMMAND_BEFORE_DURABLE),
    Mutant(
        mutants.applied_again,
        scenes.interrupted_death,
        Rule.COMMAND_APPLIED_TWICE,
        Minimums(takeovers=1),
    ),
    Mutant(mutants.played_whatever_is_said, scenes.interrupted, Rule.PLAYED_BEYOND_COMMITTED),
    Mutant(
        mutants.wait_elsewhere,
        scenes.plain,
        Rule.WAIT_ELSEWHERE,
        durability=Durability.REPLICATED,
    ),
)


@pytest.fixture
def pair_url(tmp_path: Path) -> Iterator[str]:
    """A primary with its replica."""
    with primary_and_replica(tmp_path / "pair") as (primary, _):
        yield primary.url


@pytest.fixture
async def doors() -> AsyncIterator[Doors]:
    async with Doors().open() as doors:
        yield doors


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.patch.__name__)
async def test_a_product_built_wrong_is_caught(
    mutant: Mutant,
    doors: Doors,
    valkey: EmbeddedValkey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    name = mutant.patch.__name__
    # A machine that stands still for longer than the margin lets frames out late: judged where it
    # is the subject, and with a margin that is large.
    judges_lease = mutant.caught_by is Rule.SPOKE_WITHOUT_LEASE
    lease = {"lease_ms": JUDGED_LEASE_MS, "margin_ms": JUDGED_MARGIN_MS} if judges_lease else {}
    times = {"lease_ms": LEASE_MS, "margin_ms": MARGIN_MS} | lease
    short_leases(monkeypatch, renew_ms=RENEW_MS, **times)
    url = valkey.url
    if mutant.durability is Durability.REPLICATED:
        url = request.getfixturevalue("pair_url")

    async def judged(session: str) -> Report:
        world = World(doors, url, tmp_path, session, durability=mutant.durability, **lease)
        async with world:
            async with asyncio.timeout(SCENE_S):
                await mutant.scene(world, session)
            await world.finish(session)
        world.observer.write(tmp_path / f"{session}.jsonl")
        return world.report()

    right = await judged(f"{name}-right")
    last_run.add("mutants", [right])
    assert right.violations == ()
    assert mutant.minimums.missing(right.counts) == []
    started = time.monotonic()
    with monkeypatch.context() as patch:
        mutant.patch(patch)
        wrong = await judged(f"{name}-wrong")
    seconds = round(time.monotonic() - started, 2)
    rules = ", ".join(sorted(wrong.rules))
    last_run.add("mutants", [], caught={name: {"by": rules, "seconds": seconds}})
    assert mutant.caught_by in wrong.rules
