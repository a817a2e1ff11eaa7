"""Queues of a device that does everything at once: the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zenflow.device.base import Event, Queue
from lightning_zenflow.host.commands import fence


class Passed:
    """An event of an inline queue: always in the past."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


PASSED = Passed()


class InlineQueue:
    """Does each piece of work as it is issued, in the issuing thread."""

    def run(self, work: Callable[[], object], nbytes: int = 0) -> None:
        work()

    def record(self) -> Event:
        return PASSED

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return


class InlineQueues:
    """The CPU. See :class:`~lightning_zenflow.device.base.Queues`."""

    direct = True

    def __init__(self) -> None:
        self.compute: Queue = InlineQueue()
        self.down: Queue = self.compute
        self.up: Queue = self.compute

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, queue: Queue) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def send_word(self, word: Tensor, values: Tensor) -> None:
        fence()  # the data above in the processor's order before the word that announces it
        word.copy_(values)

    def discard(self, tensor: Tensor) -> None:
        return

    def pin(self, address: int, nbytes: int) -> None:
        return

    def close(self) -> None:
        return
