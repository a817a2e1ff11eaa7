"""A rich progress bar that shows where the step's time goes."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from lightning_zenflow.callbacks import zenflow_strategy
from lightning_zenflow.engine import StepRecord


class StallColumn(ProgressColumn):
    """``stall 1.2 ms 3% hidden 98%``, smoothed over steps, beside the training bar.

    Rendered by rich's refresh thread from a string that the training thread has replaced whole.
    """

    max_refresh = 0.25

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self.text = ""
        self.task_id: int | None = None

    def render(self, task: Task) -> Text:
        return Text(self.text if task.id == self.task_id else "", style="cyan")


class Smoothed:
    """Exponential means of a few steps' times, so that boundary steps do not make it flicker."""

    def __init__(self, weight: float = 0.1) -> None:
        self._weight = weight
        self._means: dict[str, float] = {}

    def add(self, record: StepRecord) -> None:
        waited = sum(s for cause, s in record.stall_seconds.items() if cause != "copy")
        values = {
            "wall": record.wall_seconds,
            "stall": sum(record.stall_seconds.values()),
            "waited": waited,
            "busy": record.host_busy_seconds,
        }
        for key, value in values.items():
            old = self._means.get(key, value)
            self._means[key] = old + self._weight * (value - old)

    def text(self) -> str:
        """The readout, or nothing before the first step."""
        if not self._means:
            return ""
        m = self._means
        share = m["stall"] / m["wall"] if m["wall"] > 0 else 0.0
        hidden = max(0.0, 1.0 - m["waited"] / m["busy"]) if m["busy"] > 0 else math.nan
        tail = "" if math.isnan(hidden) else f" hidden {hidden:.0%}"
        return f"stall {m['stall'] * 1e3:.1f} ms {share:.0%}{tail}"


class ZenFlowProgressBar(RichProgressBar):
    """Lightning's rich bar with a stall column. Works with ``strategy="zenflow"`` only.

    ``stall`` is the time the trainer waited in a step, in ms and as a share of the step; ``hidden``
    the share of the host's work that it did not wait for. Takes RichProgressBar's arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_column: StallColumn | None = None
        self._smoothed = Smoothed()
        self._seen: StepRecord | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zenflow_strategy(trainer, type(self).__name__)  # refuses any other strategy
        super().setup(trainer, pl_module, stage)

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        self._stall_column = StallColumn()
        return [*super().configure_columns(trainer), self._stall_column]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        record = zenflow_strategy(trainer, type(self).__name__).ledger.last
        if record is not None and record is not self._seen:
            self._seen = record
            self._smoothed.add(record)
            if self._stall_column is not None:
                self._stall_column.text = self._smoothed.text()
                self._stall_column.task_id = self.train_progress_bar_id
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
