"""Output files and their segments are shared among ranks: every segment is written by one, about equally many bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core import write
from nemo_optim_bridge.core.write import Segment, share_files


@given(
    st.lists(st.integers(0, 10 * write.SEGMENT_BYTES) | st.integers(0, 100), min_size=1, max_size=30),
    st.integers(1, 9),
)
def test_every_segment_has_one_writer(nbytes: list[int], num_ranks: int) -> None:
    writers = share_files(nbytes, num_ranks)
    assert len(writers) == len(nbytes)
    assert all(0 <= ranks[0] <= ranks[-1] < num_ranks for ranks in writers)
    assert all(len(ranks) == 1 for ranks, size in zip(writers, nbytes, strict=True) if size <= write.SEGMENT_BYTES)
    counts = [max(1, size // write.SEGMENT_BYTES) for size in nbytes]
    segments = [Segment(file, n, n + 1, 0, 0, count == 1) for file, count in enumerate(counts) for n in range(count)]
    taken = []
    for rank in range(num_ranks):
        mine = [file for file, ranks in enumerate(writers) if rank in ranks]
        own = [segment for segment in segments if segment.file in mine]
        taken += list(write._own_segments(own, writers, rank))
    assert sorted(taken, key=lambda s: (s.file, s.start)) == segments


@given(st.integers(1, 40), st.integers(1, 9))
def test_ranks_write_about_equally_many_bytes(count: int, num_ranks: int) -> None:
    writers = share_files([1000] * count, num_ranks)
    loads = [sum(rank in ranks for ranks in writers) for rank in range(num_ranks)]
    assert sum(loads) == count and max(loads) <= -(-count // num_ranks) + 1
