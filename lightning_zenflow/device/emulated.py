"""A device made of threads: queues that really run beside the trainer, on a machine without a GPU.

Two uses. With random delays and poison it makes every missing event wait visible (the racing device of
the tests). With bandwidths it is an accelerator for read-outs and benchmarks: its copies take the time
that they would take on a bus, without using the CPU meanwhile.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zenflow.device.base import Event, Queue
from lightning_zenflow.device.inline import InlineQueue
from lightning_zenflow.host.commands import fence


class ThreadEvent:
    """Set when the queue's thread gets there; carries the error if the queue has broken down."""

    def __init__(self, owner: ThreadQueue) -> None:
        self._owner = owner
        self.flag = threading.Event()

    def done(self) -> bool:
        return self.flag.is_set()

    def synchronize(self) -> None:
        self.flag.wait()
        self._owner.check()


class ThreadQueue:
    """A queue whose work is done in order by a thread of its own.

    Args:
        name: for the thread and messages.
        bytes_per_second: how fast copies are; None for as fast as the CPU does them.
        delay: called before each piece of work, to sleep or not.
    """

    def __init__(
        self,
        name: str,
        *,
        bytes_per_second: float | None = None,
        delay: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._rate = bytes_per_second
        self._delay = delay
        self._error: BaseException | None = None
        self._free_at = 0.0
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._work), name=f"zenflow-{name}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._work.put, None)

    def run(self, work: Callable[[], object], nbytes: int = 0) -> None:
        self.check()
        self._work.put(lambda: self._do(work, nbytes))

    def _do(self, work: Callable[[], object], nbytes: int) -> None:
        if self._error is not None:
            return  # broken down: later work would use what the failed one has not made
        if self._delay is not None:
            self._delay()
        started = max(time.perf_counter(), self._free_at)
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self._error = error
        if self._rate is not None and nbytes:
            # A copy that was issued early enough starts when the bus is free, not when we wake up.
            self._free_at = started + nbytes / self._rate
            time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def record(self) -> Event:
        event = ThreadEvent(self)
        self._work.put(event.flag.set)
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, ThreadEvent):
            event.synchronize()  # of an inline queue: passed
            return
        self._work.put(event.flag.wait)

    def synchronize(self) -> None:
        self.record().synchronize()

    def check(self) -> None:
        """Raise what has gone wrong in the thread."""
        if self._error is not None:
            raise RuntimeError(f"the emulated queue {self.name!r} has failed") from self._error

    def close(self) -> None:
        """Do what is left, then end the thread."""
        self._end()
        self._thread.join()


def _serve(
    owner: weakref.ref[ThreadQueue], work: queue.SimpleQueue[Callable[[], object] | None]
) -> None:
    while True:
        item = work.get()
        if item is None:
            return
        item()
        del item  # or the thread would keep the queue, and itself, alive


class EmulatedQueues:
    """The queues of a device that is emulated by threads, with memory apart from the host's.

    Args:
        down_bytes_per_second: bandwidth to the host; None for no model of time.
        up_bytes_per_second: bandwidth from the host.
        seed: if given, the queues race: random delays, one queue much slower than the others, and
            memory that is not needed any more is overwritten with NaN.
        compute_thread: run the hot half in a thread too, as a GPU would. Whoever uses parameters
            must then synchronise with ``compute`` before; a Trainer does not.
    """

    direct = False

    def __init__(
        self,
        *,
        down_bytes_per_second: float | None = None,
        up_bytes_per_second: float | None = None,
        seed: int | None = None,
        compute_thread: bool = False,
    ) -> None:
        self._poison = seed is not None
        slow = None if seed is None else random.Random(seed).choice(["compute", "down", "up"])

        def delay(name: str) -> Callable[[], None] | None:
            return None if seed is None else _delay(f"{seed} {name}", name == slow)

        self.down: Queue = ThreadQueue(
            "down", bytes_per_second=down_bytes_per_second, delay=delay("down")
        )
        self.up: Queue = ThreadQueue("up", bytes_per_second=up_bytes_per_second, delay=delay("up"))
        self.compute: Queue = (
            ThreadQueue("compute", delay=delay("compute")) if compute_thread else InlineQueue()
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, queue: Queue) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.discard(tensor)
        return tensor

    def send_word(self, word: Tensor, values: Tensor) -> None:
        fence()
        word.copy_(values)

    def discard(self, tensor: Tensor) -> None:
        if self._poison:
            # Not counted as a change: a real device would not write, but someone else would.
            data = tensor.data
            data.fill_(float("nan") if data.is_floating_point() else 0x7F)

    def pin(self, address: int, nbytes: int) -> None:
        return

    def close(self) -> None:
        for each in (self.compute, self.down, self.up):
            if isinstance(each, ThreadQueue):
                each.close()


def _delay(seed: str, slow: bool) -> Callable[[], None]:
    """Sleeps now and then; nearly always, and for longer, on a slow queue."""
    dice = random.Random(seed)

    def sleep() -> None:
        if dice.random() < (0.5 if slow else 0.1):
            time.sleep(dice.random() * (1e-3 if slow else 1e-4))

    return sleep
