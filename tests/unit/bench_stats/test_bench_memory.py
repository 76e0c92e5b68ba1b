"""What counts as memory that a process keeps."""

import pytest

from tests.bench.measure_memory import FLAT_KIB_A_UNIT, LOOKS, Look, Track, at_rest
from tests.bench.stats import median_slope

pytestmark = pytest.mark.unit

KEPT_KIB, WORKED_IN_KIB = 350_000, 20_000


def followed(leak_kib: int, points: int = 40) -> Track:
    """A process looked at every third unit, mostly in the middle of one, later ones more often."""
    track = Track()
    for point in range(points):
        looks: list[Look] = []
        for number in range(LOOKS):
            unit = 3 * (point * LOOKS + number)
            busy = number != point % LOOKS and (number + point) % 4 < 1 + point // 15
            kib = KEPT_KIB + leak_kib * unit + WORKED_IN_KIB * busy
            looks.append((unit, {"code2wav": kib}, 1_000))
        track.add(looks)
    return track


@pytest.mark.parametrize("leak_kib", [0, 8])
def test_what_a_unit_works_in_is_not_what_is_kept(leak_kib: int) -> None:
    track = followed(leak_kib)
    slope = median_slope([float(unit) for unit in track.units], track.own_kib["code2wav"])
    assert slope is not None
    assert slope == pytest.approx(leak_kib, abs=FLAT_KIB_A_UNIT / 4)
    assert set(track.ledger_kib) == {1_000}


def test_a_process_that_ended_between_two_looks_has_the_looks_it_had() -> None:
    track = Track()
    track.add([(3, {"encoder": 9, "talker": 5}, 1), (6, {"encoder": 7}, 1)])
    assert (track.units, track.own_kib) == ([6], {"encoder": [7], "talker": [5]})


def test_at_rest_is_said_of_the_last_two_looks() -> None:
    assert not at_rest([{"encoder": 1}])
    assert at_rest([{"encoder": 1}, {"encoder": 100_000}, {"encoder": 100_100}])
    assert not at_rest([{"encoder": 1}, {"encoder": 100_000}])
