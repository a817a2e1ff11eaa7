"""Where everything lies in the arena, and which lane owns which rows.

The layout is a pure function of the :class:`HostSpec`, which the trainer writes into the arena as
JSON: trainer and workers compute the same offsets and the same ownership from it, and nothing else
has to be sent.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch

ALIGN = 64  # one cache line: no two arrays share one
PAGE = 4096
QUEUE_DEPTH = 4  # commands a matrix may have posted and not done
LANE_WORDS = 8  # int64 statistics of a lane, one cache line
ERROR_BYTES = 8192  # room for a worker's traceback

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which ``dtype`` travels in the spec, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class HostMatrix:
    """The cold half of one matrix as the host sees it: ``[rows, n_cold]``, slot by slot.

    ``dtype`` is the parameter's dtype: gradients come and new values go back in it.
    """

    rows: int
    n_cold: int
    dtype: str

    @property
    def numel(self) -> int:
        return self.rows * self.n_cold

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class HostSpec:
    """All that a worker has to know to find its work.

    Attributes:
        matrices: the matrices with cold columns, in the engine's order.
        workers: number of worker processes.
        threads: lanes in each worker; a lane is a thread that owns chunks.
        chunk_elements: wanted elements of a chunk, a range of rows that fits the cache.
        rule: "mean" or "replay", what the workers do with the gradients of a window.
        window: S, the most gradients that one update replays.
        block_bytes: size of a gradient block (replay).
        blocks: number of gradient blocks (replay).
        looks_ahead: whether the values sent back are extrapolated, so that fp32 needs a copy too (replay).
        affinity: for each worker the CPUs it binds to, or an empty list for no binding.
        delay_us: upper bound of a random sleep before each chunk, for tests of the protocol; 0 off.
    """

    matrices: list[HostMatrix]
    workers: int
    threads: int
    chunk_elements: int
    rule: str = "mean"
    window: int = 1
    block_bytes: int = 0
    blocks: int = 0
    looks_ahead: bool = False
    affinity: list[list[int]] = field(default_factory=list)
    delay_us: int = 0

    @property
    def lanes(self) -> int:
        return self.workers * self.threads

    @property
    def replays(self) -> bool:
        return self.rule == "replay"

    @property
    def kept_slots(self) -> int:
        """Kept gradients of a matrix: one window open, one with the workers."""
        return 2 * self.window

    @property
    def factor_slots(self) -> int:
        """Steps whose clip factors the arena holds: a window's, and those of the one before it."""
        return max(8, 2 * self.window + 2) if self.replays else 8

    def chunks(self, matrix: HostMatrix) -> list[tuple[int, int]]:
        """The row ranges of a matrix; under replay each fits a gradient block."""
        limit = self.chunk_elements
        if self.replays:
            limit = self.block_bytes // matrix.torch_dtype.itemsize
        return cut_rows(matrix, limit)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostSpec:
        data = json.loads(text)
        data["matrices"] = [HostMatrix(**m) for m in data["matrices"]]
        return cls(**data)


@dataclass(frozen=True)
class Chunk:
    """Rows ``[start, stop)`` of one matrix: its chunk ``number``, in row order."""

    matrix: int
    start: int
    stop: int
    number: int = 0


def cut_rows(matrix: HostMatrix, chunk_elements: int) -> list[tuple[int, int]]:
    """Row ranges of about ``chunk_elements`` elements, at least one row each, evenly cut."""
    rows_per_chunk = max(1, chunk_elements // matrix.n_cold)
    pieces = -(-matrix.rows // rows_per_chunk)
    bounds = [matrix.rows * i // pieces for i in range(pieces + 1)]
    return list(itertools.pairwise(bounds))


def assign_chunks(spec: HostSpec) -> list[dict[int, list[Chunk]]]:
    """For each lane the chunks it owns, by matrix, in row order.

    A chunk goes to the lane with the fewest elements so far (the lowest on a tie), so that every
    lane has nearly the same work and a large matrix is spread over all of them.
    """
    load = [0] * spec.lanes
    owned: list[dict[int, list[Chunk]]] = [{} for _ in range(spec.lanes)]
    for index, matrix in enumerate(spec.matrices):
        for number, (start, stop) in enumerate(spec.chunks(matrix)):
            lane = min(range(spec.lanes), key=load.__getitem__)
            owned[lane].setdefault(index, []).append(Chunk(index, start, stop, number))
            load[lane] += (stop - start) * matrix.n_cold
    return owned


@dataclass(frozen=True)
class Region:
    """A typed array in the arena: byte ``offset`` and ``count`` elements of ``itemsize`` bytes."""

    offset: int
    count: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class MatrixRegions:
    """The arrays of one matrix. ``outgoing`` is absent where the master itself goes back."""

    master: Region
    exp_avg: Region
    exp_avg_sq: Region
    outgoing: Region | None
    own: dict[str, Region]  # those of the rule, by name

    def all(self) -> Iterator[Region]:
        """Every array that grows with the number of elements."""
        yield from (self.master, self.exp_avg, self.exp_avg_sq)
        if self.outgoing is not None:
            yield self.outgoing
        yield from (self.own[name] for name in ("accumulator", "staging") if name in self.own)


class ArenaLayout:
    """Offsets of the control area, of every matrix's arrays, and of the gradient blocks.

    Budget for a cold parameter: master and both moments in fp32 (12 bytes), the outgoing copy in the
    parameter's dtype, and under ``mean`` the accumulator in fp32 and one staged gradient (20 bytes in
    fp32 and bf16), under ``replay`` the kept gradients, (S + 1) / 2 of them and a share of one in flight
    if staggered (at S = 4 19.5 bytes in bf16). On top of it some bytes for each cold *column*, the padding
    to cache lines, and the control area.
    """

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self._cursor = 0
        text = len(spec.to_json().encode())
        self.header = self._take(16, 1)  # int64: bytes of JSON, arena bytes
        self.json = self._take(text, 1)
        count, lanes = len(spec.matrices), spec.lanes
        self.posted = self._take(count, 8)
        self.announced = self._take(count, 8)
        self.factors = self._take(spec.factor_slots, 4)
        self.done = [self._take(count, 8) for _ in range(lanes)]
        self.lane_words = self._take(lanes * LANE_WORDS, 8)
        self.commands = self._take(count * QUEUE_DEPTH, COMMAND_BYTES)
        self.errors = [self._take(ERROR_BYTES, 1) for _ in range(spec.workers)]
        self.control_bytes = self._cursor
        self.matrices = [self._place(matrix) for matrix in spec.matrices]
        self.blocks = self._take(spec.blocks * spec.block_bytes, 1)
        self.total_bytes = -(-max(self._cursor, 1) // PAGE) * PAGE

    def _take(self, count: int, itemsize: int) -> Region:
        offset = -(-self._cursor // ALIGN) * ALIGN
        self._cursor = offset + count * itemsize
        return Region(offset, count, itemsize)

    def _place(self, matrix: HostMatrix) -> MatrixRegions:
        n, wire = matrix.numel, matrix.torch_dtype.itemsize
        master, exp_avg, exp_avg_sq = (self._take(n, 4) for _ in range(3))
        if self.spec.replays:
            slots = self.spec.kept_slots
            own = {
                "records": self._take(slots, GRADIENT_BYTES),
                "blocks": self._take(slots * len(self.spec.chunks(matrix)), 4),
                "late": self._take(matrix.n_cold, 8),
            }
        else:
            own = {
                "accumulator": self._take(n, 4),
                "staging": self._take(n, wire),
                "inverse_count": self._take(matrix.n_cold, 4),  # read only if the command says so
                "decay": self._take(matrix.n_cold, 4),  # likewise
            }
        apart = wire != 4 or self.spec.looks_ahead
        outgoing = self._take(n, wire) if apart else None
        return MatrixRegions(master, exp_avg, exp_avg_sq, outgoing, own)

    @cached_property
    def cold_elements(self) -> int:
        """Cold parameters that the arena holds."""
        return sum(matrix.numel for matrix in self.spec.matrices)

    def overheads(self) -> Iterator[tuple[str, int]]:
        """Named bytes beyond the per-parameter budget, for the memory report."""
        columns = sum(8 * matrix.n_cold for matrix in self.spec.matrices)
        payload = sum(region.nbytes for regions in self.matrices for region in regions.all())
        tables = sum(
            regions.own[name].nbytes
            for regions in self.matrices
            for name in ("records", "blocks")
            if name in regions.own
        )
        named = self.control_bytes + columns + tables + payload + self.blocks.nbytes
        yield "control area", self.control_bytes
        yield "per-column factors", columns
        yield "records of kept gradients", tables
        yield "padding", self.total_bytes - named


COMMAND_BYTES = 136
GRADIENT_BYTES = 64
