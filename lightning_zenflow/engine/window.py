"""What is pending on the host for a matrix, under either rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zenflow.host.blocks import Blocks
from lightning_zenflow.host.commands import GradientScalars


@dataclass
class Window:
    """Under ``mean``: count and pending decay of the accumulator.

    Normally the same for every cold slot. A column demoted while gradients are pending starts later
    than its neighbours; then ``counts`` and ``decays`` hold each slot's own values.

    Attributes:
        count: gradients in the window, that is in the slots that have been cold throughout it.
        decay: product of the decoupled decay factors of their steps.
        counts: int64 ``[n_cold]`` or None.
        decays: float64 ``[n_cold]`` or None.
    """

    count: int = 0
    decay: float = 1.0
    counts: Tensor | None = None
    decays: Tensor | None = None

    def add(self, step_decay: float) -> None:
        """One more gradient in every slot."""
        self.count += 1
        self.decay *= step_decay
        if self.counts is not None and self.decays is not None:
            self.counts += 1
            self.decays *= step_decay

    def take(self, slots: Tensor, n_cold: int) -> tuple[Tensor, Tensor]:
        """Counts and decays of ``slots``, which leave; whatever enters these slots starts at zero."""
        if self.count == 0:
            return torch.zeros(len(slots), dtype=torch.int64), torch.ones(
                len(slots), dtype=torch.float64
            )
        if self.counts is None or self.decays is None:
            self.counts = torch.full((n_cold,), self.count, dtype=torch.int64)
            self.decays = torch.full((n_cold,), self.decay, dtype=torch.float64)
        taken = self.counts[slots], self.decays[slots]
        self.counts[slots] = 0
        self.decays[slots] = 1.0
        return taken

    def reset(self) -> None:
        """Nothing is pending any more."""
        self.count, self.decay, self.counts, self.decays = 0, 1.0, None, None


@dataclass(frozen=True)
class Kept:
    """A gradient that waits for its replay: where its scalars and its values lie."""

    slot: int
    scalars: GradientScalars
    blocks: Blocks


@dataclass
class KeptWindow:
    """Under ``replay``: the gradients that are not submitted yet.

    Attributes:
        gradients: in order.
        next: number of gradients kept so far; modulo the ring of slots, where the next one goes.
        arriving: blocks of a gradient that has been sent and not accepted.
        late: how many columns came in by a migration; their slots lie in the arena.
        late_from: how many of ``gradients`` are older than that migration.
    """

    gradients: list[Kept] = field(default_factory=list)
    next: int = 0
    arriving: Blocks | None = None
    late: int = 0
    late_from: int = 0

    def reset(self) -> None:
        """Nothing is pending any more; a gradient that is arriving stays."""
        self.gradients, self.late, self.late_from = [], 0, 0
