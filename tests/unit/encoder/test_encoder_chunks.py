"""Cutting PCM into chunks, and where the cache is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.stages.encoder.chunks import MAX_FEED_CHUNKS, PcmFault, chunks_per_cache, cut

pytestmark = pytest.mark.unit


@given(count=st.integers(1, MAX_FEED_CHUNKS), first=st.booleans())
def test_whole_chunks_are_cut_without_loss(count, first):
    pcm = bytes(2 * (16_000 * count + (560 if first else 0)))
    chunks = cut(pcm, first)
    assert not isinstance(chunks, PcmFault)
    assert [len(chunk) // 2 for chunk in chunks] == (
        [16_560] + [16_000] * (count - 1) if first else [16_000] * count
    )


@given(size=st.integers(0, 200_000), first=st.booleans())
def test_everything_else_is_refused(size, first):
    chunks = cut(bytes(size), first)
    whole = size - (1120 if first else 0)
    if whole > 0 and whole % 32_000 == 0:
        assert not isinstance(chunks, PcmFault)
        assert b"".join(chunks) == bytes(size)
    else:
        assert isinstance(chunks, PcmFault)


def test_each_fault_has_its_name():
    assert cut(b"", first=False) is PcmFault.EMPTY
    assert cut(bytes(32_001), first=False) is PcmFault.ODD_BYTES
    assert cut(bytes(31_998), first=False) is PcmFault.NOT_WHOLE
    assert cut(bytes(32_000), first=True) is PcmFault.NOT_WHOLE
    assert cut(bytes(33_120), first=False) is PcmFault.NOT_WHOLE
    assert cut(bytes(32_000 * 65), first=False) is PcmFault.TOO_LONG


@pytest.mark.parametrize(("positions", "chunks"), [(1500, 29), (103, 2), (102, 1), (50, 1)])
def test_chunks_that_a_position_table_holds(positions, chunks):
    assert chunks_per_cache(positions) == chunks


@given(positions=st.integers(50, 5_000))
def test_a_full_cache_fits_the_table_and_one_chunk_more_would_reach_it(positions):
    chunks = chunks_per_cache(positions)
    assert 50 * chunks <= positions
    assert 50 * chunks + 52 >= positions
    assert chunks == 1 or 50 * (chunks - 1) + 52 < positions
