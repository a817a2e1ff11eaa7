"""Callbacks: the merge policy, and the stall numbers for the loggers."""

from __future__ import annotations

import math
import operator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_zenflow.engine import LedgerSummary, StallLedger
from lightning_zenflow.strategy import ZenFlowStrategy


def zenflow_strategy(trainer: pl.Trainer, who: str) -> ZenFlowStrategy:
    """The trainer's strategy, for a callback or bar that works with ZenFlow only.

    Raises:
        TypeError: the trainer runs another strategy.
    """
    if not isinstance(trainer.strategy, ZenFlowStrategy):
        raise TypeError(
            f"{who} works with strategy='zenflow' only, but this Trainer uses "
            f"{type(trainer.strategy).__name__}; pass strategy='zenflow' or remove the callback"
        )
    return trainer.strategy


def stall_metrics(part: LedgerSummary) -> dict[str, float]:
    """Means over the steps of ``part`` under the names used in loggers; times in milliseconds."""
    if part.steps == 0:
        return {}
    metrics = {
        "zenflow/step_ms": part.wall_seconds * 1e3 / part.steps,
        "zenflow/stall_ms": sum(part.stall_seconds.values()) * 1e3 / part.steps,
        "zenflow/stall_share": part.stall_share,
    }
    for cause, seconds in part.stall_seconds.items():
        metrics[f"zenflow/stall_{cause}_ms"] = seconds * 1e3 / part.steps
    if not math.isnan(part.hidden_share):
        metrics["zenflow/hidden_share"] = part.hidden_share
    return metrics


class GradientSyncCallback(Callback):
    """When the two halves are synchronised: every N optimizer steps, and wherever weights are read.

    The strategy adds one by itself. Give your own to set N in the callbacks' list instead of in the
    strategy; its N is then the strategy's ``update_interval``.

    At the end of every training epoch and of fit it flushes: all pending gradients are applied before
    any other callback reads, averages or saves the weights. It is therefore always put first among
    the callbacks. Validation inside an epoch does not flush and sees the live weights.

    Args:
        every_n_steps: optimizer steps in a window; None leaves it to the strategy.

    Raises:
        TypeError, ValueError: ``every_n_steps`` is not a whole number of at least 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None:
            if isinstance(every_n_steps, bool) or not hasattr(every_n_steps, "__index__"):
                raise TypeError(
                    f"every_n_steps must be a whole number or None, got {every_n_steps!r}; "
                    "give the optimizer steps between two merges, e.g. 4"
                )
            every_n_steps = operator.index(every_n_steps)
            if every_n_steps < 1:
                raise ValueError(
                    f"every_n_steps must be at least 1, got {every_n_steps!r}; "
                    "give the optimizer steps between two merges, e.g. 4"
                )
        self.every_n_steps = every_n_steps

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        zenflow_strategy(trainer, type(self).__name__)  # refuses any other strategy

    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        zenflow_strategy(trainer, type(self).__name__).release_gradients()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        zenflow_strategy(trainer, type(self).__name__).flush()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        zenflow_strategy(trainer, type(self).__name__).flush()


class StallMonitor(Callback):
    """Sends the ledger's numbers to all loggers, every ``log_every_n_steps`` optimizer steps.

    Each is the mean over the steps since the time before: a single step would show a boundary or not
    depending on how the two intervals divide. Names: ``zenflow/step_ms``, ``zenflow/stall_ms``,
    ``zenflow/stall_<cause>_ms``, ``zenflow/stall_share``, ``zenflow/hidden_share``. Added by the
    strategy; plain floats, so logging them never waits for the device.
    """

    def __init__(self) -> None:
        self._logged = StallLedger().summary()
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        self._logged = zenflow_strategy(trainer, type(self).__name__).ledger.summary()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._step or every == 0 or step % every:
            return
        now = zenflow_strategy(trainer, type(self).__name__).ledger.summary()
        metrics = stall_metrics(now.since(self._logged))
        self._step, self._logged = step, now
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=step - 1)  # the number Lightning gives this step
