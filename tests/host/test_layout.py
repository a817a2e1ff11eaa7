"""The layout: nothing overlaps, every row has one owner, and the memory report adds up."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow.host.blocks import BlockPlan, plan_blocks
from lightning_zenflow.host.layout import (
    ALIGN,
    COMMAND_BYTES,
    ERROR_BYTES,
    GRADIENT_BYTES,
    LANE_WORDS,
    PAGE,
    QUEUE_DEPTH,
    ArenaLayout,
    HostMatrix,
    HostSpec,
    Region,
    assign_chunks,
    cut_rows,
    dtype_name,
)

DTYPES = ("float32", "bfloat16", "float16")

matrices = st.builds(
    HostMatrix, rows=st.integers(1, 70), n_cold=st.integers(1, 40), dtype=st.sampled_from(DTYPES)
)


@st.composite
def draw_spec(draw: st.DrawFn) -> HostSpec:
    found = draw(st.lists(matrices, min_size=1, max_size=6))
    chunk_elements, rule = draw(st.integers(1, 500)), draw(st.sampled_from(["mean", "replay"]))
    interval = draw(st.integers(1, 5))
    plan = BlockPlan(0, 0)
    if rule == "replay":
        phases = [draw(st.integers(0, interval - 1)) for _ in found]
        plan = plan_blocks(found, phases, interval=interval, lag=1, chunk_elements=chunk_elements)
    return HostSpec(
        matrices=found,
        workers=draw(st.integers(1, 4)),
        threads=draw(st.integers(1, 3)),
        chunk_elements=chunk_elements,
        rule=rule,
        window=interval,
        block_bytes=plan.nbytes,
        blocks=plan.count,
        looks_ahead=rule == "replay" and draw(st.booleans()),
        affinity=draw(st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=4)),
        delay_us=draw(st.integers(0, 1000)),
    )


specs = draw_spec()
over_specs = settings(derandomize=True, deadline=None, max_examples=150)


def regions(layout: ArenaLayout) -> list[Region]:
    """Every array that the layout places, control area included."""
    found = [layout.header, layout.json, layout.posted, layout.announced, layout.factors]
    found += [*layout.done, layout.lane_words, layout.commands, *layout.errors]
    for at in layout.matrices:
        found += [at.master, at.exp_avg, at.exp_avg_sq, *at.own.values()]
        found += [at.outgoing] if at.outgoing else []
    return [*found, layout.blocks] if layout.blocks.count else found


@over_specs
@given(specs)
def test_the_spec_survives_its_json(spec: HostSpec) -> None:
    assert HostSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_travel_by_name(name: str) -> None:
    matrix = HostMatrix(1, 1, name)
    assert matrix.torch_dtype is getattr(torch, name)
    assert dtype_name(matrix.torch_dtype) == name


@over_specs
@given(specs)
def test_no_two_arrays_share_a_cache_line(spec: HostSpec) -> None:
    layout = ArenaLayout(spec)
    placed = sorted(regions(layout), key=lambda region: region.offset)
    assert placed[0].offset == 0
    for region in placed:
        assert region.nbytes > 0
        assert region.offset % ALIGN == 0
    for one, other in itertools.pairwise(placed):
        assert one.offset + one.nbytes <= other.offset
        # No more padding than up to the next line.
        assert other.offset - (one.offset + one.nbytes) < ALIGN
    end = placed[-1].offset + placed[-1].nbytes
    assert end <= layout.total_bytes < end + PAGE
    assert layout.total_bytes % PAGE == 0


@over_specs
@given(specs)
def test_arrays_have_their_shapes(spec: HostSpec) -> None:
    layout = ArenaLayout(spec)
    assert layout.header.nbytes >= 16
    assert layout.json.nbytes == len(spec.to_json().encode())
    assert layout.posted.nbytes == 8 * len(spec.matrices)
    assert [region.nbytes for region in layout.done] == [8 * len(spec.matrices)] * spec.lanes
    assert layout.lane_words.nbytes == 8 * LANE_WORDS * spec.lanes
    assert layout.commands.nbytes == COMMAND_BYTES * QUEUE_DEPTH * len(spec.matrices)
    assert [region.nbytes for region in layout.errors] == [ERROR_BYTES] * spec.workers
    for matrix, at in zip(spec.matrices, layout.matrices, strict=True):
        n, wire = matrix.rows * matrix.n_cold, 4 if matrix.dtype == "float32" else 2
        for region in (at.master, at.exp_avg, at.exp_avg_sq):
            assert (region.count, region.itemsize) == (n, 4)
        assert (at.outgoing is None) == (wire == 4 and not spec.looks_ahead)
        if at.outgoing is not None:
            assert (at.outgoing.count, at.outgoing.itemsize) == (n, wire)
        shapes = {name: (at.own[name].count, at.own[name].itemsize) for name in at.own}
        if spec.rule == "mean":
            assert shapes == {
                "accumulator": (n, 4),
                "staging": (n, wire),
                "inverse_count": (matrix.n_cold, 4),
                "decay": (matrix.n_cold, 4),
            }
        else:
            slots = 2 * spec.window
            assert shapes == {
                "records": (slots, GRADIENT_BYTES),
                "blocks": (slots * len(spec.chunks(matrix)), 4),
                "late": (matrix.n_cold, 8),
            }
    assert layout.blocks.nbytes == spec.blocks * spec.block_bytes


@over_specs
@given(specs)
def test_every_chunk_fits_a_block(spec: HostSpec) -> None:
    for matrix in spec.matrices:
        for start, stop in spec.chunks(matrix):
            nbytes = (stop - start) * matrix.n_cold * matrix.torch_dtype.itemsize
            assert spec.rule == "mean" or nbytes <= spec.block_bytes


@over_specs
@given(specs)
def test_the_arrays_and_the_named_overheads_are_all(spec: HostSpec) -> None:
    layout = ArenaLayout(spec)
    elements = sum(matrix.rows * matrix.n_cold for matrix in spec.matrices)
    overheads = dict(layout.overheads())
    assert layout.cold_elements == elements
    payload = 0
    for matrix in spec.matrices:
        wire = 4 if matrix.dtype == "float32" else 2
        gradients = wire + 4 if spec.rule == "mean" else 0
        outgoing = wire if wire == 2 or spec.looks_ahead else 0
        payload += matrix.rows * matrix.n_cold * (12 + gradients + outgoing)
    payload += spec.blocks * spec.block_bytes
    assert sum(overheads.values()) + payload == layout.total_bytes
    assert min(overheads.values()) >= 0
    assert overheads["per-column factors"] == 8 * sum(matrix.n_cold for matrix in spec.matrices)
    # docs/arena.md: at most one line of padding between arrays, and the end of the last page.
    assert overheads["padding"] < ALIGN * 9 * len(spec.matrices) + PAGE


@over_specs
@given(specs)
def test_the_control_area_is_as_small_as_documented(spec: HostSpec) -> None:
    layout = ArenaLayout(spec)
    count, lanes = len(spec.matrices), spec.lanes
    documented = 600 * count + 8 * count * lanes + 4 * spec.factor_slots + 8192 * spec.workers
    text, lines = len(spec.to_json().encode()), 6 + 2 * lanes + spec.workers
    assert layout.control_bytes <= documented + text + ALIGN * lines


@over_specs
@given(specs)
def test_every_row_has_exactly_one_owner(spec: HostSpec) -> None:
    owners = assign_chunks(spec)
    assert len(owners) == spec.lanes
    rows: dict[int, list[int]] = {m: [] for m in range(len(spec.matrices))}
    for owned in owners:
        for matrix, chunks in owned.items():
            assert chunks, "a lane without chunks of a matrix must not be listed as its owner"
            assert [c.start for c in chunks] == sorted(c.start for c in chunks)
            for chunk in chunks:
                assert chunk.matrix == matrix
                rows[matrix] += range(chunk.start, chunk.stop)
    for index, matrix in enumerate(spec.matrices):
        assert sorted(rows[index]) == list(range(matrix.rows))


@over_specs
@given(specs)
def test_lanes_differ_by_less_than_a_chunk(spec: HostSpec) -> None:
    sizes = [
        [
            (chunk.stop - chunk.start) * spec.matrices[matrix].n_cold
            for matrix, chunks in owned.items()
            for chunk in chunks
        ]
        for owned in assign_chunks(spec)
    ]
    loads = [sum(lane) for lane in sizes]
    assert max(loads) - min(loads) <= max(size for lane in sizes for size in lane)


@over_specs
@given(specs)
def test_trainer_and_worker_agree_on_the_owners(spec: HostSpec) -> None:
    assert assign_chunks(HostSpec.from_json(spec.to_json())) == assign_chunks(spec)


@over_specs
@given(matrices, st.integers(1, 3000))
def test_rows_are_cut_evenly_into_chunks_of_the_wanted_size(
    matrix: HostMatrix, chunk_elements: int
) -> None:
    ranges = cut_rows(matrix, chunk_elements)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == matrix.rows
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    heights = [stop - start for start, stop in ranges]
    assert min(heights) >= 1
    assert max(heights) - min(heights) <= 1
    # A row is never cut, so a chunk may exceed the wish only where it is a single row.
    assert max(heights) == 1 or max(heights) * matrix.n_cold <= chunk_elements
    # As few as that allows.
    assert len(ranges) == -(-matrix.rows // max(1, chunk_elements // matrix.n_cold))
