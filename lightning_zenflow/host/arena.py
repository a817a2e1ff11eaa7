"""One shared region made with ``memfd_create``: no name, no size limit of /dev/shm, no leak.

The kernel frees it when the last process that holds the descriptor or a mapping is gone, however
that process ended. Contract: docs/arena.md.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_zenflow.host.commands import GRADIENT_RECORD, RECORD
from lightning_zenflow.host.layout import (
    LANE_WORDS,
    QUEUE_DEPTH,
    ArenaLayout,
    HostMatrix,
    HostSpec,
    MatrixRegions,
    Region,
)

_HEADER = struct.Struct("<qq")
_JSON_OFFSET = 64  # the header's cache line; see ArenaLayout

Int64Array = npt.NDArray[np.int64]


class MatrixArrays:
    """Views of one matrix's arrays: tensors ``[rows, n_cold]`` on the CPU, in the arena.

    Who writes what: ``master``, ``exp_avg``, ``exp_avg_sq`` and ``outgoing`` the owning lanes, and the
    trainer only while no command of the matrix is open (set-up and migration).
    """

    def __init__(self, arena: Arena, matrix: HostMatrix, at: MatrixRegions):
        self._arena = weakref.proxy(arena)
        self._shape = (matrix.rows, matrix.n_cold)
        wire = matrix.torch_dtype
        self.master = self._view(at.master, torch.float32)
        self.exp_avg = self._view(at.exp_avg, torch.float32)
        self.exp_avg_sq = self._view(at.exp_avg_sq, torch.float32)
        self.outgoing = self.master if at.outgoing is None else self._view(at.outgoing, wire)

    def _view(self, region: Region, dtype: torch.dtype) -> Tensor:
        view: Tensor = self._arena.tensor(region, dtype)
        return view.view(self._shape)


class MeanArrays(MatrixArrays):
    """Under ``mean``. The trainer writes ``staging``, ``inverse_count`` and ``decay``, lanes ``accumulator``."""

    def __init__(self, arena: Arena, matrix: HostMatrix, at: MatrixRegions):
        super().__init__(arena, matrix, at)
        self.accumulator = self._view(at.own["accumulator"], torch.float32)
        self.staging = self._view(at.own["staging"], matrix.torch_dtype)
        self.inverse_count = arena.tensor(at.own["inverse_count"], torch.float32)
        self.decay = arena.tensor(at.own["decay"], torch.float32)


class ReplayArrays(MatrixArrays):
    """Under ``replay``. The trainer writes all that is added here.

    Attributes:
        chunks: row ranges, in order.
        records: for each kept slot the scalars, :data:`~.commands.GRADIENT_RECORD`.
        blocks: int32 ``[kept slots, chunks]``: where the gradient of a chunk lies.
        late: int64 ``[n_cold]``: slots that came in a migration (a command says how many).
    """

    def __init__(self, arena: Arena, matrix: HostMatrix, at: MatrixRegions):
        super().__init__(arena, matrix, at)
        spec = arena.layout.spec
        self._dtype = matrix.torch_dtype
        self._block_bytes = spec.block_bytes
        self.chunks = spec.chunks(matrix)
        self.records = arena.array(at.own["records"], GRADIENT_RECORD)
        blocks = arena.array(at.own["blocks"], np.int32)
        self.blocks = blocks.reshape(spec.kept_slots, len(self.chunks))
        self.late = arena.tensor(at.own["late"], torch.int64)

    def block(self, number: int, rows: int) -> Tensor:
        """Block ``number`` as the gradient ``[rows, n_cold]`` of a chunk."""
        start, cols = number * self._block_bytes, self._shape[1]
        data: Tensor = self._arena.blocks[start : start + rows * cols * self._dtype.itemsize]
        return data.view(self._dtype).view(rows, cols)


class Arena:
    """The mapping and its typed views. ``fd`` is what a worker inherits.

    Raises:
        OSError: the kernel refused the region (message names the bytes asked for).
    """

    def __init__(self, layout: ArenaLayout, fd: int) -> None:
        self.layout = layout
        self.fd = fd
        self._map = mmap.mmap(fd, layout.total_bytes)
        self._closer = weakref.finalize(self, os.close, fd)
        spec = layout.spec
        count, lanes = len(spec.matrices), spec.lanes
        self.posted = self.array(layout.posted, np.int64)
        self.posted_tensor = self.tensor(layout.posted, torch.int64)
        self.announced = self.array(layout.announced, np.int64)
        self.factors = self.tensor(layout.factors, torch.float32)
        self.blocks = self.tensor(layout.blocks, torch.uint8)
        self.done = [self.array(region, np.int64) for region in layout.done]
        self.lane_words = self.array(layout.lane_words, np.int64).reshape(lanes, LANE_WORDS)
        self.commands = self.array(layout.commands, RECORD).reshape(count, QUEUE_DEPTH)
        arrays = ReplayArrays if spec.replays else MeanArrays
        self.matrices: list[MatrixArrays] = [
            arrays(self, matrix, regions)
            for matrix, regions in zip(spec.matrices, layout.matrices, strict=True)
        ]

    @classmethod
    def create(cls, spec: HostSpec) -> Arena:
        """A new, zeroed arena that holds ``spec``; pages are taken when first touched."""
        layout = ArenaLayout(spec)
        fd = os.memfd_create("zenflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.total_bytes)
            # Sealed: nobody can shrink it under a mapping, which would be a SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            arena = cls(layout, fd)
        except OSError as error:
            os.close(fd)
            raise OSError(
                error.errno,
                f"the host arena of {layout.total_bytes} bytes for {layout.cold_elements} cold "
                f"parameters could not be mapped ({error.strerror}); free host memory, raise "
                "topk_ratio, or raise min_offload_numel so that fewer parameters are offloaded",
            ) from error
        text = spec.to_json().encode()
        arena._map[: _HEADER.size] = _HEADER.pack(len(text), layout.total_bytes)
        arena._map[_JSON_OFFSET : _JSON_OFFSET + len(text)] = text
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """The arena behind a descriptor that this process has inherited."""
        with mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as head:
            length, _ = _HEADER.unpack(head[: _HEADER.size])
        text = os.pread(fd, length, _JSON_OFFSET).decode()
        return cls(ArenaLayout(HostSpec.from_json(text)), fd)

    def array(self, region: Region, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A 1-d array over ``region``."""
        return np.frombuffer(self._map, dtype=dtype, count=region.count, offset=region.offset)

    def tensor(self, region: Region, dtype: torch.dtype) -> Tensor:
        """A 1-d tensor over ``region``; it keeps the mapping alive."""
        if region.count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=region.count, offset=region.offset)

    def write_error(self, worker: int, text: str) -> None:
        """Leave a worker's last words where the trainer finds them (cut to fit, end kept)."""
        region = self.layout.errors[worker]
        data = text.encode()[-(region.count - 8) :]
        self._map[region.offset + 8 : region.offset + 8 + len(data)] = data
        self._map[region.offset : region.offset + 8] = struct.pack("<q", len(data))

    def read_error(self, worker: int) -> str:
        """What the worker left, or an empty string."""
        region = self.layout.errors[worker]
        (length,) = struct.unpack("<q", self._map[region.offset : region.offset + 8])
        return self._map[region.offset + 8 : region.offset + 8 + length].decode(errors="replace")

    @property
    def address(self) -> int:
        """Where the mapping starts in this process, for page-locking."""
        return int(self.posted_tensor.data_ptr()) - self.layout.posted.offset

    def discard(self, matrix: int) -> None:
        """Give the pages of a matrix's state back at once; it reads as zero from here."""
        at = self.layout.matrices[matrix]
        for region in at.all():
            start = -(-region.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (region.offset + region.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                self._map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def allocated_bytes(self) -> int:
        """Bytes of the region as the kernel has it (``fstat`` size of the descriptor)."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Give the descriptor and all views back; the memory goes with the last view elsewhere."""
        if not self._closer.alive:
            return
        self._closer()
        self.fd = -1
        del (
            self.posted,
            self.posted_tensor,
            self.announced,
            self.factors,
            self.blocks,
            self.done,
            self.lane_words,
            self.commands,
            self.matrices,
        )
        del self._map
