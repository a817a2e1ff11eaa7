"""The stall ledger: where the trainer waited, per optimizer step, by cause."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CAUSES = ("update", "ring", "selection", "flush", "copy")
"""Why the trainer waits.

- ``update``: a host update that is due to be merged is not done yet.
- ``ring``: the staging of a matrix still holds the previous gradient (back-pressure).
- ``selection``: columns that change side need their accumulators, which are not ready yet.
- ``flush``: finishing all pending work, at the end of an epoch or of fit.
- ``copy``: moving gradients into the arena, merged values out of it, migrating columns both ways.

All but ``copy`` are waits for the workers.
"""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Times in seconds; ``wall_seconds`` from the end of the step before."""

    step: int
    wall_seconds: float
    stall_seconds: dict[str, float]
    host_busy_seconds: float

    @property
    def stall_share(self) -> float:
        """Share of the step's wall time that the trainer waited, 0 to 1."""
        return _share(sum(self.stall_seconds.values()), self.wall_seconds)

    @property
    def hidden_share(self) -> float:
        """Share of the host's work that the trainer did not wait for; nan without host work."""
        return _hidden(self.stall_seconds, self.host_busy_seconds)


@dataclass(frozen=True)
class LedgerSummary:
    """Totals of a run, or of a part of it. ``host_busy_seconds`` is the lanes' mean working time."""

    steps: int
    wall_seconds: float
    stall_seconds: dict[str, float]
    host_busy_seconds: float
    updates: int

    def since(self, earlier: LedgerSummary) -> LedgerSummary:
        """What has been added after ``earlier``, a summary of the same ledger."""
        return LedgerSummary(
            self.steps - earlier.steps,
            self.wall_seconds - earlier.wall_seconds,
            {cause: s - earlier.stall_seconds[cause] for cause, s in self.stall_seconds.items()},
            self.host_busy_seconds - earlier.host_busy_seconds,
            self.updates - earlier.updates,
        )

    @property
    def stall_share(self) -> float:
        """Share of the wall time that the trainer waited, 0 to 1."""
        return _share(sum(self.stall_seconds.values()), self.wall_seconds)

    @property
    def hidden_share(self) -> float:
        """Share of the host's work that the trainer did not wait for; nan without host work."""
        return _hidden(self.stall_seconds, self.host_busy_seconds)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


def _hidden(stalls: dict[str, float], busy: float) -> float:
    # Copies are the trainer's own work, not a wait for the host's.
    waited = sum(seconds for cause, seconds in stalls.items() if cause != "copy")
    return max(0.0, 1.0 - waited / busy) if busy > 0.0 else math.nan


@dataclass
class StallLedger:
    """Collects stalls; the engine writes it, read-outs read :attr:`last` and :meth:`summary`."""

    last: StepRecord | None = None
    updates: int = 0
    _stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    _totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    _steps: int = 0
    _wall: float = 0.0
    _busy: float = 0.0
    _busy_seen: float = 0.0
    _since: float | None = None
    _wall_open: float = 0.0

    def start_clock(self) -> None:
        """Time from now on belongs to the next step (training starts, or goes on)."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop_clock(self) -> None:
        """Time from now on belongs to no step (validation)."""
        if self._since is not None:
            self._wall_open += time.perf_counter() - self._since
            self._since = None

    @contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Count the block's duration as a stall by ``cause`` (one of :data:`CAUSES`)."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stalls[cause] += time.perf_counter() - started

    def add(self, cause: str, seconds: float) -> None:
        """Count ``seconds`` as a stall by ``cause``."""
        self._stalls[cause] += seconds

    def close_step(self, step: int, host_busy_seconds: float) -> None:
        """End optimizer step ``step``.

        Args:
            step: its 1-based number.
            host_busy_seconds: working time of the lanes since they started (a running total).
        """
        self.last = self._settle(step, host_busy_seconds)
        self._steps += 1

    def close_flush(self, step: int, host_busy_seconds: float) -> None:
        """Count the time since the last step, a flush, into the totals without a new step."""
        self._settle(step, host_busy_seconds)

    def _settle(self, step: int, host_busy_seconds: float) -> StepRecord:
        running = self._since is not None
        self.stop_clock()
        wall, self._wall_open = self._wall_open, 0.0
        if running:
            self.start_clock()
        stalls, self._stalls = self._stalls, dict.fromkeys(CAUSES, 0.0)
        busy, self._busy_seen = host_busy_seconds - self._busy_seen, host_busy_seconds
        self._wall += wall
        self._busy += busy
        for cause, seconds in stalls.items():
            self._totals[cause] += seconds
        return StepRecord(step, wall, stalls, busy)

    def forget_workers(self) -> None:
        """New workers count their time from zero again."""
        self._busy_seen = 0.0

    def summary(self) -> LedgerSummary:
        """Totals so far, stalls since the last step included."""
        stalls = {cause: self._totals[cause] + self._stalls[cause] for cause in CAUSES}
        return LedgerSummary(self._steps, self._wall, stalls, self._busy, self.updates)
