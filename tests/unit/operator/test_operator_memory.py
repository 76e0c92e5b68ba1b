"""Freed buffers go back to the system, also where what lives on was allocated between them."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

SCRIPT = """
import random, resource
from duplex_operator.memory import give_large_blocks_back

assert give_large_blocks_back()

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

random.seed(1)
before, buffers, kept = resident_mib(), [], []
for number in range(4_000):
    buffers.append(bytearray(256 * 1024))
    kept.append(bytes(2_000 + number % 3_000))
    if len(buffers) > 160:
        buffers.pop(random.randrange(len(buffers)))
buffers.clear()
print(resident_mib() - before)
"""


def test_holes_of_large_buffers_do_not_stay() -> None:
    """14 MiB live on; 40 MiB of buffers came and went between them."""
    done = subprocess.run(
        (sys.executable, "-c", SCRIPT), capture_output=True, text=True, timeout=180, check=True
    )
    assert float(done.stdout) < 25
