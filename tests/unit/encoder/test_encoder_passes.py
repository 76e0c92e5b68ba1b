"""Inputs that wait together go as one pass: in order, bounded, and a bad one fails alone."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from duplex_sidecar.stages.encoder.passes import Passes, Worker

pytestmark = pytest.mark.unit


class Device:
    """Doubles numbers, refuses negative ones, and stands still while it is told to."""

    def __init__(self, *, open_gate: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.probes = 0
        self.begun = threading.Event()
        self.gate = threading.Event()
        if open_gate:
            self.gate.set()

    def work(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        self.begun.set()
        assert self.gate.wait(5)
        if any(number < 0 for number in numbers):
            raise ValueError(f"{min(numbers)} is negative")
        return [2 * number for number in numbers]

    async def probe(self) -> None:
        await asyncio.sleep(0)
        self.probes += 1


@pytest.fixture
async def worker():
    worker = Worker("test")
    yield worker
    await worker.stop()


async def begun(device: Device) -> None:
    """A first pass is under way, and holds the worker."""
    assert await asyncio.to_thread(device.begun.wait, 5)


async def test_what_comes_during_a_pass_goes_as_the_next_one_in_order(worker):
    device = Device(open_gate=False)
    passes = Passes(worker, device.work, 3, device.probe)
    first = asyncio.create_task(passes.through(0))
    await begun(device)
    later = [asyncio.create_task(passes.through(number)) for number in range(1, 8)]
    await asyncio.sleep(0)
    device.gate.set()
    assert await asyncio.gather(first, *later) == [2 * number for number in range(8)]
    assert device.batches == [[0], [1, 2, 3], [4, 5, 6], [7]]


async def test_one_that_fails_fails_alone_and_is_looked_into(worker):
    device = Device()
    passes = Passes(worker, device.work, 4, device.probe)
    answers = await asyncio.gather(
        *(passes.through(number) for number in (1, -2, 3, 4)), return_exceptions=True
    )
    assert [answers[0], *answers[2:]] == [2, 6, 8]
    assert str(answers[1]) == "-2 is negative"
    assert device.batches == [[1, -2, 3, 4], [1], [-2], [3], [4]]
    assert device.probes == 1
    assert await passes.through(5) == 10


async def test_a_pass_without_an_answer_for_each_is_a_failed_one(worker):
    device = Device()
    passes = Passes(worker, lambda numbers: [0] * (len(numbers) // 2), 2, device.probe)
    answers = await asyncio.gather(passes.through(1), passes.through(2), return_exceptions=True)
    assert all(isinstance(answer, ValueError) for answer in answers)


async def test_what_nobody_waits_for_any_more_is_not_computed(worker):
    device = Device(open_gate=False)
    passes = Passes(worker, device.work, 8, device.probe)
    first = asyncio.create_task(passes.through(0))
    await begun(device)
    gone, stays = (asyncio.create_task(passes.through(number)) for number in (1, 2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    device.gate.set()
    assert await asyncio.gather(first, stays) == [0, 4]
    assert device.batches == [[0], [2]]


async def test_two_queues_of_one_worker_take_turns_and_fill_up_while_they_wait(worker):
    """A pass is filled when its turn has come: what comes while the other queue computes goes
    along."""
    one, other = Device(open_gate=False), Device()
    ones = Passes(worker, one.work, 2, one.probe)
    others = Passes(worker, other.work, 8, other.probe)
    asked = [asyncio.create_task(ones.through(number)) for number in range(5)]
    await begun(one)
    answers = [asyncio.create_task(others.through(0))]
    await asyncio.sleep(0)
    answers += [asyncio.create_task(others.through(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    one.gate.set()
    done, _ = await asyncio.wait(answers, timeout=5)
    assert len(done) == 3
    assert other.batches == [[0, 1, 2]]
    # The other queue waited for the pass under way, not for the whole of this one.
    assert len(one.batches) < 3
    await asyncio.gather(*asked)
