"""Which device operation waits for which: the only place where queues are ordered.

Three queues: *compute* (forward, backward, hot half), *down* (gradients to the arena) and *up* (merged
values from it). Everything that crosses from one to another goes through :meth:`Device._order`, under one
of the names in :data:`WAITS`; a test removes each in turn and must see the trajectory break.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zenflow._compat import version
from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device.base import (
    Columns,
    EagerStep,
    Event,
    HotState,
    Kernels,
    Queue,
    Queues,
)

WAITS = (
    "gradient ready",  # down reads a gradient after compute has made it
    "gradient free",  # compute reuses a gradient's memory after down has read it
    "parameter free",  # up writes a parameter after compute has done with its old values
    "merged",  # compute uses a parameter after up has written it
    "outgoing free",  # down announces the next host update after up has read the last one's result
    "factor ready",  # down sends the clip factor after compute has made it
    "preview ready",  # up previews a parameter after compute has made all that it reads
)

PIECE_BYTES = 16 << 20  # staged on the device at a time, for each direction
IN_FLIGHT_BYTES = 256 << 20  # gradients kept for the down queue while streaming


@dataclass
class Traffic:
    """Bytes that have crossed the bus, counted where the copies are issued."""

    down: int = 0
    up: int = 0


class _Held(NamedTuple):
    """Memory that another queue still reads: it must not be reused before ``event``."""

    tensor: Tensor
    event: Event
    version: int | None  # at hand-over; None where compute itself still writes it


Target = tuple[int, int, Tensor]
"""Rows ``[start, stop)`` of a gradient's cold columns, and where in the arena they go."""


class Device:
    """The device half's operations, each on its queue, in an order that keeps them apart.

    The host waits only in :meth:`column_scores` and :meth:`synchronize`, that is at a selection, at a
    flush, for a save and at the end.

    Args:
        queues: the device's queues.
        kernels: its arithmetic.
        piece_bytes: size of the staging for each direction, on the device.
        in_flight_bytes: gradients that may be kept alive for the down queue before compute waits
            for it (see :meth:`bound_gradients`).
    """

    def __init__(
        self,
        queues: Queues,
        kernels: Kernels,
        *,
        piece_bytes: int = PIECE_BYTES,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        self.queues = queues
        self.kernels = kernels
        self.traffic = Traffic()
        self._piece_bytes = piece_bytes
        self._in_flight_bytes = in_flight_bytes
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._staging: dict[str, Tensor] = {}

    # -- order ------------------------------------------------------------------------------------

    def _order(self, queue: Queue, event: Event, why: str) -> None:
        """``queue`` goes on after ``event``; ``why`` is one of :data:`WAITS`."""
        queue.wait(event)

    def now(self) -> Event:
        """Everything issued to compute so far: gradients made, parameters used."""
        return self.queues.compute.record()

    def on_compute(self, work: Callable[[], object]) -> None:
        """Issue ``work`` in compute's order (the dense half, clip factors)."""
        self.queues.compute.run(work)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor for use on compute."""
        return self.queues.empty(shape, dtype, self.queues.compute)

    def synchronize(self) -> None:
        """Make the host wait for all queues: arena and parameters may be read and changed then."""
        for queue in (self.queues.compute, self.queues.down, self.queues.up):
            queue.synchronize()

    # -- gradients --------------------------------------------------------------------------------

    def column_scores(self, grad: Tensor) -> Tensor:
        """Squared norm of each column, fp32 ``[cols]``. Waits for it: a selection needs the result."""
        out = self.empty(grad.shape[1])
        self.on_compute(partial(self.kernels.column_scores, grad, out))
        self.queues.compute.synchronize()
        return out

    def squared_norm(self, grad: Tensor, out: Tensor) -> None:
        """``out`` (fp32, one element) = sum of squares of ``grad``."""
        self.on_compute(partial(self.kernels.squared_norm, grad, out))

    def split_hot(self, grad: Tensor, columns: Columns) -> Tensor:
        """The hot columns' gradient, compact: fp32 ``[rows, n_hot]``."""
        out = self.empty(grad.shape[0], columns.hot.numel())
        self.on_compute(partial(self.kernels.split_hot, grad, columns, out))
        return out

    def send_cold(
        self, grad: Tensor, columns: Columns, targets: Sequence[Target], ready: Event
    ) -> None:
        """Send the cold columns' gradient to ``targets``, which lie in the arena.

        ``ready`` is a point of compute after the gradient was made. The gradient is kept alive until
        compute may reuse its memory: see :meth:`bound_gradients` and :meth:`release_gradients`.
        """
        down = self.queues.down
        self._order(down, ready, "gradient ready")
        for start, stop, target in targets:
            self.traffic.down += target.nbytes
            if self.queues.direct:
                split = partial(self.kernels.split_cold, grad, columns, start, stop, target)
                down.run(split, target.nbytes)
                continue
            for first, last in self._pieces(target):
                down.run(
                    partial(self._send_piece, grad, columns, start, target, first, last),
                    (last - first) * target.shape[1] * target.itemsize,
                )
        if not self.queues.direct:
            self._hold(grad, version(grad), down)

    def _send_piece(
        self,
        grad: Tensor,
        columns: Columns,
        offset: int,
        target: Tensor,
        first: int,
        last: int,
    ) -> None:
        piece = self._piece("down", target, last - first)
        self.kernels.split_cold(grad, columns, offset + first, offset + last, piece)
        target[first:last].copy_(piece, non_blocking=True)
        self.queues.discard(piece)

    def _hold(self, tensor: Tensor, version: int | None, queue: Queue) -> None:
        self._held.append(_Held(tensor, queue.record(), version))
        self._held_bytes += tensor.nbytes

    def bound_gradients(self, *, discard: bool) -> None:
        """Let go of gradients that have left; of the oldest in any case if too many are kept.

        Called after each gradient while streaming, so that device memory never holds all of them.
        For the oldest compute waits, which is what bounds the memory if the bus is slower.
        ``discard``: nobody else reads these gradients.
        """
        while self._held and (
            self._held_bytes > self._in_flight_bytes or self._held[0].event.done()
        ):
            self._release(discard)

    def release_gradients(self, *, discard: bool) -> None:
        """From here compute may overwrite every gradient given to :meth:`send_cold`."""
        while self._held:
            self._release(discard)

    def _release(self, discard: bool) -> None:
        held = self._held.popleft()
        self._held_bytes -= held.tensor.nbytes
        if held.version is not None and version(held.tensor) != held.version:
            raise RuntimeError(
                f"a gradient {list(held.tensor.shape)} was changed in place while it was leaving the "
                "device; call engine.release_gradients() before zero_grad(set_to_none=False) or "
                "whatever writes gradients in place"
            )
        self._order(self.queues.compute, held.event, "gradient free")
        if discard:
            self.on_compute(partial(self.queues.discard, held.tensor))

    def send_factor(self, word: Tensor, factor: Tensor) -> None:
        """Send the clip factor (one fp32 on the device, made by compute) to ``word`` in the arena."""
        self._order(self.queues.down, self.now(), "factor ready")
        self.traffic.down += word.nbytes
        self.queues.down.run(lambda: word.copy_(factor, non_blocking=True), word.nbytes)
        self._hold(factor, None, self.queues.down)

    def ring(self, posted: Tensor, numbers: Sequence[int]) -> None:
        """``posted[:] = numbers`` in the arena, once all that was sent before has arrived."""
        values = torch.tensor(numbers, dtype=torch.int64)
        self.queues.down.run(partial(self.queues.send_word, posted, values))

    # -- parameters -------------------------------------------------------------------------------

    def adamw_hot(
        self,
        param: Tensor,
        columns: Columns,
        state: HotState,
        grad: Tensor,
        scale: Tensor | None,
        step: int,
        hyper: AdamHyper,
        decay: float | Tensor,
    ) -> None:
        """One Adam update of the hot columns, see :class:`~.base.Kernels`."""
        self.on_compute(
            partial(self.kernels.adamw, param, columns, state, grad, scale, step, hyper, decay)
        )

    def track_squares(self, grad: Tensor, mean_squares: Tensor, beta2: float) -> None:
        """Update the columns' moving mean squares, fp32 ``[cols]``, see :class:`~.base.Kernels`."""
        self.on_compute(partial(self.kernels.track_squares, grad, mean_squares, beta2))

    def preview(
        self,
        param: Tensor,
        columns: Columns,
        grad: Tensor,
        mean_squares: Tensor,
        step: EagerStep,
        merged: Event | None,
    ) -> Event | None:
        """The eager step on the cold columns, see :class:`~.base.Kernels`.

        ``merged`` is the event of a merge of this parameter that compute has not waited for: then the
        step follows it on its queue, so that both overlap the next forward. Returns the event after
        which the parameter is whole, None if compute does the step itself.
        """
        work = partial(self.kernels.preview, param, columns, grad, mean_squares, step)
        if merged is None:
            self.on_compute(work)
            return None
        up = self.queues.up
        self._order(up, self.now(), "preview ready")
        up.run(work)
        if not self.queues.direct:
            self._hold(grad, version(grad), up)
        return up.record()

    def merge(self, param: Tensor, columns: Columns, values: Tensor, free: Event) -> Event:
        """Write ``values`` ``[rows, n_cold]`` of the arena into the cold columns of ``param``.

        ``free`` is a point of compute after the last use of the parameter's old values. Returns the
        event after which the parameter is whole (:meth:`await_merge`) and ``values`` may change
        (:meth:`await_outgoing`).
        """
        up = self.queues.up
        self._order(up, free, "parameter free")
        self.traffic.up += values.nbytes
        if self.queues.direct:
            merge = partial(self.kernels.merge, param, columns, 0, param.shape[0], values)
            up.run(merge, values.nbytes)
            return up.record()
        for start, stop in self._pieces(values):
            up.run(
                partial(self._merge_piece, param, columns, values, start, stop),
                (stop - start) * values.shape[1] * values.itemsize,
            )
        return up.record()

    def _merge_piece(
        self, param: Tensor, columns: Columns, values: Tensor, start: int, stop: int
    ) -> None:
        piece = self._piece("up", values, stop - start)
        piece.copy_(values[start:stop], non_blocking=True)
        self.kernels.merge(param, columns, start, stop, piece)
        self.queues.discard(piece)

    def await_merge(self, merged: Event) -> None:
        """Compute uses the merged parameter from here."""
        self._order(self.queues.compute, merged, "merged")

    def await_outgoing(self, merged: Event) -> None:
        """What is rung from here may make the workers overwrite the values that were merged."""
        self._order(self.queues.down, merged, "outgoing free")

    # -- staging ----------------------------------------------------------------------------------

    def _pieces(self, host: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of rows of about ``piece_bytes``, at least one row each."""
        rows = max(1, self._piece_bytes // max(1, host.shape[1] * host.itemsize))
        for start in range(0, host.shape[0], rows):
            yield start, min(start + rows, host.shape[0])

    def _piece(self, direction: str, host: Tensor, rows: int) -> Tensor:
        """``[rows, n_cold]`` of the direction's staging; called on its queue, which keeps its uses apart."""
        nbytes = rows * host.shape[1] * host.itemsize
        staging = self._staging.get(direction)
        if staging is None or staging.numel() < nbytes:
            queue = self.queues.down if direction == "down" else self.queues.up
            size = max(nbytes, self._piece_bytes)
            staging = self._staging[direction] = self.queues.empty((size,), torch.uint8, queue)
        return staging[:nbytes].view(host.dtype).view(rows, host.shape[1])

    def close(self) -> None:
        """Wait for everything and give device and page-locked memory back."""
        self.queues.close()
        self._held.clear()
        self._staging.clear()
