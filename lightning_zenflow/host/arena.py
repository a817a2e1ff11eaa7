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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_zenflow.host.commands import RECORD
from lightning_zenflow.host.layout import (
    LANE_WORDS,
    QUEUE_DEPTH,
    ArenaLayout,
    HostSpec,
    MatrixRegions,
    Region,
)

_HEADER = struct.Struct("<qq")
_JSON_OFFSET = 64  # the header's cache line; see ArenaLayout

Int64Array = npt.NDArray[np.int64]


class MatrixArrays:
    """Views of one matrix's arrays: tensors ``[rows, n_cold]`` on the CPU, in the arena.

    Who writes what: ``staging``, ``inverse_count`` and ``decay`` the trainer; ``accumulator``,
    ``master``, ``exp_avg``, ``exp_avg_sq`` and ``outgoing`` the owning lanes, and the trainer only
    while no command of the matrix is open (set-up and migration).
    """

    def __init__(self, arena: Arena, rows: int, n_cold: int, dtype: torch.dtype, at: MatrixRegions):
        def view(region: Region, dtype: torch.dtype) -> Tensor:
            return arena.tensor(region, dtype).view(rows, n_cold)

        self.master = view(at.master, torch.float32)
        self.exp_avg = view(at.exp_avg, torch.float32)
        self.exp_avg_sq = view(at.exp_avg_sq, torch.float32)
        self.accumulator = view(at.accumulator, torch.float32)
        self.staging = view(at.staging, dtype)
        self.outgoing = self.master if at.outgoing is None else view(at.outgoing, dtype)
        self.inverse_count = arena.tensor(at.inverse_count, torch.float32)
        self.decay = arena.tensor(at.decay, torch.float32)


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
        self.posted = self._array(layout.posted, np.int64)
        self.posted_tensor = self.tensor(layout.posted, torch.int64)
        self.announced = self._array(layout.announced, np.int64)
        self.factors = self.tensor(layout.factors, torch.float32)
        self.done = [self._array(region, np.int64) for region in layout.done]
        self.lane_words = self._array(layout.lane_words, np.int64).reshape(lanes, LANE_WORDS)
        self.commands = self._array(layout.commands, RECORD).reshape(count, QUEUE_DEPTH)
        self.matrices = [
            MatrixArrays(self, matrix.rows, matrix.n_cold, matrix.torch_dtype, regions)
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

    def _array(self, region: Region, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._map, dtype=dtype, count=region.count, offset=region.offset)

    def tensor(self, region: Region, dtype: torch.dtype) -> Tensor:
        """A 1-d tensor over ``region``; it keeps the mapping alive."""
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
            self.done,
            self.lane_words,
            self.commands,
            self.matrices,
        )
        del self._map
