"""CUDA streams as queues, and page-locked host memory. Needs nothing but torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow.device.base import Event, Queue


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaEvent:
    """A recorded ``torch.cuda.Event``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaQueue:
    """A stream. Without a stream of its own: whichever is current where it is used."""

    def __init__(self, device: torch.device, *, own: bool) -> None:
        self._device = device
        self._own: torch.cuda.Stream | None = None
        if own:
            self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> torch.cuda.Stream:
        """Autograd's threads run backward on the stream of the forward, so "current" is right there."""
        return self._own if self._own is not None else torch.cuda.current_stream(self._device)

    def run(self, work: Callable[[], object], nbytes: int = 0) -> None:
        if self._own is None:
            work()
            return
        with torch.cuda.stream(self._own):
            work()

    def record(self) -> Event:
        return CudaEvent(self.stream)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"a CUDA stream cannot wait for {event!r}")
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaQueues:
    """One CUDA device. See :class:`~lightning_zenflow.device.base.Queues`."""

    direct = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute: Queue = CudaQueue(device, own=False)
        self.down: Queue = CudaQueue(device, own=True)
        self.up: Queue = CudaQueue(device, own=True)
        self._pinned: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, queue: Queue) -> Tensor:
        # torch's allocator gives a block back to the stream that was current when it was made.
        if not isinstance(queue, CudaQueue):
            raise TypeError(f"{queue!r} is not a queue of {self.device}")
        with torch.cuda.stream(queue.stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def send_word(self, word: Tensor, values: Tensor) -> None:
        # The pinned copy is kept by torch's allocator until the stream has read it.
        on_device = values.pin_memory().to(self.device, non_blocking=True)
        word.copy_(on_device, non_blocking=True)

    def discard(self, tensor: Tensor) -> None:
        return

    def pin(self, address: int, nbytes: int) -> None:
        """``cudaHostRegister``; without it copies are still right, but make the host wait.

        Locking memory may be refused (``ulimit -l``, container limits): then one warning says so.
        """
        error = _cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) == 0:
            self._pinned.append(address)
            return
        self._clear_error()
        warnings.warn(
            f"the host arena ({nbytes:,} bytes) could not be page-locked (cudaHostRegister: error "
            f"{int(error)}): copies to and from {self.device} will make the trainer wait. Raise the "
            "limit of locked memory (`ulimit -l unlimited`, `--ulimit memlock=-1` for a container) or "
            "free host memory.",
            stacklevel=2,
        )

    def _clear_error(self) -> None:
        """The refused call left its error for the next check of torch's to find: take it here."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            torch.zeros(1, device=self.device)

    def close(self) -> None:
        for queue in (self.compute, self.down, self.up):
            queue.synchronize()
        while self._pinned:
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._pinned.pop()))
