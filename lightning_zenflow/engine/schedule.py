"""When a matrix's windows end: one phase for all, or phases dealt out over the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zenflow.config import ZenFlowConfig


@dataclass(frozen=True)
class Schedule:
    """The calendar of optimizer steps (1-based) that all matrices share."""

    interval: int  # S
    lag: int  # L
    select_every: int  # R
    warmup: int  # W

    @classmethod
    def from_config(cls, config: ZenFlowConfig) -> Schedule:
        return cls(config.update_interval, config.lag, config.select_every, config.warmup_steps)

    def warming_up(self, step: int) -> bool:
        """Whether ``step`` is a synchronous one."""
        return step <= self.warmup

    def is_boundary(self, step: int, phase: int) -> bool:
        """Whether a window of a matrix with ``phase`` ends with ``step`` (after warm-up)."""
        return step > self.warmup and (step - self.warmup + phase) % self.interval == 0

    def merge_due(self, step: int, submitted: int) -> bool:
        """Whether an update submitted at step ``submitted`` is merged at ``step`` at the latest.

        ``>=`` and not ``==``: a matrix without gradient at ``submitted + lag`` is left alone at that
        step, as AdamW would, and merges when it next takes part.
        """
        return step >= submitted + self.lag

    def selection_due(self, step: int, phase: int, last: int | None) -> bool:
        """Whether hot columns are chosen anew at ``step``; ``last`` is the step of the last time."""
        if self.warming_up(step):
            return False
        if last is None:
            return True
        return self.is_boundary(step, phase) and step - last >= self.select_every


def deal_phases(sizes: Sequence[int], interval: int, staggered: bool) -> list[int]:
    """A phase for each matrix: all 0, or such that each phase holds about 1/S of the elements.

    Largest first, each to the phase with the fewest elements so far (the lowest on a tie).
    """
    if not staggered:
        return [0] * len(sizes)
    load = [0] * interval
    phases = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        phase = min(range(interval), key=load.__getitem__)
        phases[index] = phase
        load[phase] += sizes[index]
    return phases
