"""``cold_rule="replay"``, ours: a window's gradients are kept, and each makes its own AdamW step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper, adam_step_
from lightning_zenflow.device import Device, Event, Target
from lightning_zenflow.engine.cold import ColdHalf, Why
from lightning_zenflow.engine.columns import Swap
from lightning_zenflow.engine.hot import Carried
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import Matrix
from lightning_zenflow.engine.migration import (
    read_demoted,
    read_slots,
    write_promoted,
    write_slots,
)
from lightning_zenflow.engine.window import Kept
from lightning_zenflow.host.arena import ReplayArrays
from lightning_zenflow.host.blocks import BlockAllocator, Blocks
from lightning_zenflow.host.commands import GradientScalars, Replay
from lightning_zenflow.host.pool import UpdaterPool


def _arrays(matrix: Matrix) -> ReplayArrays:
    assert isinstance(matrix.arrays, ReplayArrays)
    return matrix.arrays


@dataclass(frozen=True)
class Loan:
    """Blocks that are free again once command ``number`` of the matrix is done."""

    matrix: int
    number: int
    blocks: Blocks


class ReplayHalf(ColdHalf):
    """See :class:`~.cold.ColdHalf`. ``horizon``: steps that the values sent back look ahead."""

    def __init__(
        self, pool: UpdaterPool, device: Device, ledger: StallLedger, horizon: int
    ) -> None:
        super().__init__(pool, device, ledger)
        self.horizon = horizon
        self._blocks = BlockAllocator(pool.spec.blocks)
        self._loans: deque[Loan] = deque()

    # -- gradients --------------------------------------------------------------------------------

    def _targets(self, matrix: Matrix) -> Sequence[Target]:
        arrays, kept = _arrays(matrix), matrix.kept
        if kept.arriving is None:
            kept.arriving = self._take(len(arrays.chunks))
        return [
            (start, stop, arrays.block(int(number), stop - start))
            for (start, stop), number in zip(arrays.chunks, kept.arriving, strict=True)
        ]

    def _take(self, count: int) -> Blocks:
        """``count`` free blocks; waits for updates that hold some if need be.

        The pool has room for all that is kept and not submitted, so outstanding updates suffice.
        """
        if self._blocks.free < count:
            self._reclaim()
        while self._blocks.free < count and self._loans:
            loan = self._loans[0]
            self.ledger.add("ring", self._wait(loan.matrix, loan.number))
            self._reclaim()
        return self._blocks.take(count)

    def _reclaim(self) -> None:
        """Take back the blocks of all updates that are done."""
        still: deque[Loan] = deque()
        for loan in self._loans:
            if self.pool.is_done(loan.matrix, loan.number):
                self._blocks.give(loan.blocks)
            else:
                still.append(loan)
        self._loans = still

    def sent(self, matrix: Matrix) -> Tensor:
        return torch.cat([block for _, _, block in self._targets(matrix)])

    def accept(self, matrix: Matrix, hyper: AdamHyper, factor_slot: int) -> None:
        arrays, kept = _arrays(matrix), matrix.kept
        assert kept.arriving is not None
        slot = kept.next % len(arrays.records)
        scalars = GradientScalars(hyper, matrix.steps, factor_slot)
        arrays.records[slot] = scalars.record()
        arrays.blocks[slot] = kept.arriving
        kept.gradients.append(Kept(slot, scalars, kept.arriving))
        kept.next += 1
        kept.arriving = None

    def miss(self, matrix: Matrix, step: int, now: Event) -> None:
        """What is kept is submitted at the boundary all the same.

        It changes no master, and so no more than a window's gradients are ever kept.
        """
        if matrix.kept.gradients:
            self.merge(matrix, now)
            self.submit(matrix, step, "boundary")

    # -- updates ----------------------------------------------------------------------------------

    def submit(self, matrix: Matrix, step: int, why: Why) -> None:
        """One AdamW step for each kept gradient, in order, each with the scalars of its own step.

        With ``flush`` also without any, if the device shows a preview instead of the masters.
        """
        kept = matrix.kept
        gradients = kept.gradients
        if not gradients and not (why == "flush" and matrix.previewed):
            return
        reach = 0.0
        if why == "boundary" and gradients:
            last = gradients[-1].scalars.hyper
            reach = last.lr * sum(last.beta1**i for i in range(1, self.horizon + 1))
        command = Replay(
            first=gradients[0].slot if gradients else 0,
            count=len(gradients),
            reach=reach,
            late=kept.late,
            late_from=kept.late_from,
        )
        number = self._post_update(matrix, command, step, previews=reach > 0.0)
        if gradients:
            blocks = np.concatenate([gradient.blocks for gradient in gradients])
            self._loans.append(Loan(matrix.index, number, blocks))
            self.ledger.updates += 1
            matrix.updates += 1
        for gradient in gradients:
            if gradient.scalars.factor_slot >= 0:
                users = self._factor_users[gradient.scalars.factor_slot]
                users.append((matrix.index, number))
        kept.reset()

    def pending(self, matrix: Matrix) -> bool:
        outstanding = matrix.outstanding is not None
        return outstanding or matrix.previewed or bool(matrix.kept.gradients)

    # -- state ------------------------------------------------------------------------------------

    def exchange(self, matrix: Matrix, swap: Swap, hyper: AdamHyper) -> Carried | None:
        """A promoted column first takes the steps that it is owed; nothing is rescaled.

        A demoted column is up to date: the gradients kept before this step are not its own.
        """
        arrays, kept = _arrays(matrix), matrix.kept
        slots = swap.cold_slots.cpu()
        up = read_slots(matrix, slots)
        self._catch_up(matrix, up, slots)
        down = read_demoted(matrix, swap)
        write_promoted(matrix, swap, up)
        write_slots(matrix, slots, down)
        kept.late, kept.late_from = 0, 0
        if kept.gradients:
            arrays.late[: slots.numel()] = slots
            kept.late, kept.late_from = slots.numel(), len(kept.gradients)
        return None

    def _catch_up(
        self, matrix: Matrix, state: dict[str, Tensor], slots: Tensor | None = None
    ) -> None:
        """Replay the kept gradients of ``slots`` (of all by default) on a copy of their state."""
        arrays = _arrays(matrix)
        for gradient in matrix.kept.gradients:
            parts = [
                arrays.block(int(number), stop - start)
                for (start, stop), number in zip(arrays.chunks, gradient.blocks, strict=True)
            ]
            if slots is not None:
                parts = [part.index_select(1, slots) for part in parts]
            grad = torch.cat(parts).to(torch.float32)
            scalars = gradient.scalars
            if scalars.factor_slot >= 0:
                grad.mul_(self.pool.arena.factors[scalars.factor_slot])
            adam_step_(
                state["master"],
                grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                step=scalars.step,
                hyper=scalars.hyper,
            )

    def moments(self, matrix: Matrix, hyper: AdamHyper) -> tuple[Tensor, Tensor]:
        """Complete: kept gradients are replayed on a copy."""
        arrays = matrix.arrays
        if not matrix.kept.gradients:
            return arrays.exp_avg, arrays.exp_avg_sq
        names = ("master", "exp_avg", "exp_avg_sq")
        state = {name: getattr(arrays, name).clone() for name in names}
        self._catch_up(matrix, state)
        return state["exp_avg"], state["exp_avg_sq"]

    def forget(self, matrix: Matrix) -> None:
        super().forget(matrix)
        self._reclaim()
        for gradient in matrix.kept.gradients:
            self._blocks.give(gradient.blocks)
        matrix.kept.reset()
