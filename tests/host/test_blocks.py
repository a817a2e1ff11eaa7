"""The pool of gradient blocks: large enough for every schedule, no larger than it must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.engine.schedule import deal_phases
from lightning_zenflow.host.blocks import BlockAllocator, plan_blocks
from lightning_zenflow.host.layout import HostMatrix, cut_rows

matrices = st.builds(
    HostMatrix,
    rows=st.integers(1, 70),
    n_cold=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(matrices, min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(0, 2),
    st.integers(1, 3000),
    st.booleans(),
)
def test_there_is_room_for_what_the_schedule_keeps(
    found: list[HostMatrix], interval: int, lag: int, chunk_elements: int, staggered: bool
) -> None:
    """Counted step by step, with updates that give their blocks back as late as is harmless."""
    phases = deal_phases([m.numel for m in found], interval, staggered)
    plan = plan_blocks(found, phases, interval=interval, lag=lag, chunk_elements=chunk_elements)
    chunks = [cut_rows(m, plan.nbytes // m.torch_dtype.itemsize) for m in found]
    for matrix, ranges in zip(found, chunks, strict=True):
        for start, stop in ranges:
            assert (stop - start) * matrix.n_cold * matrix.torch_dtype.itemsize <= plan.nbytes
    kept, most = [0] * len(found), 0
    for step in range(1, 3 * interval + 1):
        kept = [n + 1 for n in kept]
        most = max(most, sum(n * len(c) for n, c in zip(kept, chunks, strict=True)))
        kept = [0 if (step + f) % interval == 0 else n for n, f in zip(kept, phases, strict=True)]
    assert plan.count >= most
    assert plan.count <= most + (sum(len(c) for c in chunks) if lag else 0)


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_equal_matrices_waste_nothing(interval: int) -> None:
    found = [HostMatrix(1024, 920, "bfloat16")] * 16
    phases = deal_phases([m.numel for m in found], interval, staggered=True)
    plan = plan_blocks(found, phases, interval=interval, lag=1, chunk_elements=524288)
    gradients = plan.nbytes * plan.count / (2 * 16 * 1024 * 920)
    assert gradients == pytest.approx((interval + 1) / 2 + 1 / interval, rel=0.01)


def test_blocks_are_handed_out_once() -> None:
    blocks = BlockAllocator(10)
    first, second = blocks.take(4), blocks.take(6)
    assert sorted([*first, *second]) == list(range(10))
    with pytest.raises(RuntimeError, match="1 gradient blocks wanted, 0 are free"):
        blocks.take(1)
    blocks.give(first)
    assert blocks.free == 4
    assert sorted(blocks.take(4)) == sorted(first)
    assert first.dtype == np.int32
