"""The stall numbers: in the ledger, in the loggers and in the progress bar."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import rich
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_zenflow import StallMonitor, ZenFlowProgressBar
from lightning_zenflow.engine.ledger import CAUSES, StepRecord
from tests.strategy.models import (
    SYNCHRONOUS,
    WINDOWED,
    At,
    Regression,
    build,
    fit,
    loader,
    running,
    zenflow,
)

METRICS = {
    "zenflow/step_ms",
    "zenflow/stall_ms",
    "zenflow/stall_share",
    "zenflow/hidden_share",
    *(f"zenflow/stall_{cause}_ms" for cause in CAUSES),
}


class Records(Callback):
    """Keeps the ledger's record of every step."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        record = running(trainer).ledger.last
        if record is not None and record not in self.records[-1:]:  # none in micro-batches
            self.records.append(record)


# -- the ledger -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["replay", "mean"])
@pytest.mark.parametrize("schedule", ["window", "staggered"])
def test_ledger_and_memory_stay_readable_and_add_up(schedule: str, rule: str) -> None:
    kept = Records()
    settings = {**WINDOWED, "schedule": schedule, "cold_rule": rule}
    trainer = fit(build(), zenflow(**settings), max_epochs=2, callbacks=[kept])
    strategy: Any = trainer.strategy
    assert strategy.engine is None
    total = strategy.ledger.summary()
    assert total.steps == 16 == len(kept.records)
    assert [record.step for record in kept.records] == list(range(1, 17))
    assert set(total.stall_seconds) == set(CAUSES)
    for cause in CAUSES:
        by_step = sum(record.stall_seconds[cause] for record in kept.records)
        assert 0.0 <= by_step <= total.stall_seconds[cause] + 1e-9
        if cause != "flush":  # a flush belongs to no step; its copies are counted as such
            slack = 0.0 if cause != "copy" else total.wall_seconds
            assert total.stall_seconds[cause] <= by_step + slack + 1e-9
    assert 0.0 < sum(total.stall_seconds.values()) <= total.wall_seconds
    assert 0.0 <= total.stall_share <= 1.0
    assert 0.0 <= total.hidden_share <= 1.0
    # Five matrices; in each epoch two windows each, or partial ones besides where staggered.
    assert total.updates == 4 * 4 if schedule == "window" else total.updates > 4 * 4

    memory = strategy.host_memory
    cold = memory.cold_parameters
    numel = sum(p.numel() for p in build().parameters())
    assert 0 < cold == numel - memory.hot_parameters
    payload = memory.total_bytes - sum(memory.overheads.values())
    if rule == "mean":
        assert payload == 20 * cold
    else:  # fp32 with a preview: the outgoing copy too; blocks fit tiny matrices badly
        gradients = (payload - 16 * cold) / 4 / cold
        assert gradients >= (4.0 if schedule == "window" else 2.5)


class Slow(Regression):
    """Both kinds of step sleep, and the module adds up for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = self.validated = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        started = time.perf_counter()
        time.sleep(0.01)
        self.trained += time.perf_counter() - started
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        started = time.perf_counter()
        time.sleep(0.1)
        self.validated += time.perf_counter() - started


def test_wall_time_is_that_of_training_without_validation() -> None:
    """Before training (sanity check), inside an epoch and at its end."""
    times: list[float] = []
    module = build(Slow)

    def note(trainer: pl.Trainer, slow: Any) -> None:
        times.append(time.perf_counter())
        if trainer.global_step == 0:
            slow.validated = 0.0  # the sanity check's part

    trainer = fit(
        module,
        zenflow(**WINDOWED),
        val=loader(8, seed=2),
        val_check_interval=3,
        num_sanity_val_steps=2,
        max_epochs=2,
        callbacks=[At("on_train_start", note), At("on_train_end", note)],
    )
    assert module.validated > 0.5
    strategy: Any = trainer.strategy
    wall = strategy.ledger.summary().wall_seconds
    assert module.trained <= wall <= times[1] - times[0] - module.validated


class Stopper(Callback):
    """Stops the worker before the backward pass of one step; it goes on half a second later."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._timer: threading.Timer | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step + 1 == self._step:
            pool = running(trainer).pool
            assert pool is not None
            (pid,) = pool.pids
            os.kill(pid, signal.SIGSTOP)
            self._timer = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
            self._timer.start()

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self._timer is not None:
            self._timer.join()


@pytest.mark.parametrize(
    ("settings", "stopped", "waits", "cause"),
    [
        # The update of a step that waits for it.
        (SYNCHRONOUS, 5, 5, "update"),
        # Merged at the boundary 8; all before it was done when the worker stopped.
        ({**WINDOWED, "update_interval": 2, "update_lag": 1, "schedule": "window"}, 6, 7, "update"),
        # The gradient of step 5 is staged but not added when that of step 6 comes.
        ({**WINDOWED, "warmup_steps": 4, "update_interval": 8, "cold_rule": "mean"}, 5, 6, "ring"),
    ],
    ids=["synchronous", "late_merge", "ring"],
)
def test_a_slow_worker_is_attributed_to_the_step_and_cause(
    settings: dict[str, Any], stopped: int, waits: int, cause: str
) -> None:
    kept = Records()
    fit(build(), zenflow(**settings), callbacks=[Stopper(stopped), kept])
    slow = kept.records[waits - 1]
    assert slow.step == waits
    assert slow.stall_seconds[cause] >= 0.2
    others = [r.stall_seconds[c] for r in kept.records for c in CAUSES if (r, c) != (slow, cause)]
    assert max(others) < slow.stall_seconds[cause]
    assert slow.stall_share > 0.5
    assert slow.wall_seconds >= slow.stall_seconds[cause]


def test_a_slow_worker_at_the_end_is_a_flush() -> None:
    kept = Records()
    settings = {**WINDOWED, "warmup_steps": 7}
    trainer = fit(build(), zenflow(**settings), callbacks=[Stopper(8), kept])
    strategy: Any = trainer.strategy
    assert strategy.ledger.summary().stall_seconds["flush"] >= 0.2
    assert kept.records[-1].stall_seconds["flush"] == 0.0


# -- loggers ----------------------------------------------------------------------------------------


def test_loggers_get_the_means_at_log_every_n_steps(tmp_path: Path) -> None:
    loggers = [
        CSVLogger(tmp_path, name="csv", version=""),
        TensorBoardLogger(tmp_path, name="tb", version=""),
    ]
    kept = Records()
    fit(
        build(),
        zenflow(**SYNCHRONOUS),
        accumulate_grad_batches=2,
        max_epochs=3,
        logger=loggers,
        log_every_n_steps=3,
        callbacks=[kept],
    )
    with open(tmp_path / "csv" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["zenflow/step_ms"]]
    assert rows[0].keys() >= METRICS
    # 12 optimizer steps, 0-based as Lightning's own metrics are.
    assert [int(row["step"]) for row in rows] == [2, 5, 8, 11]
    for row in rows:
        parts = sum(float(row[f"zenflow/stall_{cause}_ms"]) for cause in CAUSES)
        assert float(row["zenflow/stall_ms"]) == pytest.approx(parts)
        assert 0.0 <= float(row["zenflow/stall_share"]) <= 1.0
        assert 0.0 <= float(row["zenflow/hidden_share"]) <= 1.0
    wall = sum(record.wall_seconds for record in kept.records[:3])
    assert float(rows[0]["zenflow/step_ms"]) == pytest.approx(1e3 * wall / 3)

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert set(events.Tags()["scalars"]) >= METRICS
    scalars = events.Scalars("zenflow/step_ms")
    assert [event.step for event in scalars] == [2, 5, 8, 11]
    assert [event.value for event in scalars] == pytest.approx(
        [float(row["zenflow/step_ms"]) for row in rows], rel=1e-5
    )


def test_nothing_is_logged_with_log_every_n_steps_0(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(build(), zenflow(**WINDOWED), logger=logger, log_every_n_steps=0)
    assert "zenflow" not in (tmp_path / "metrics.csv").read_text()


# -- the progress bar -------------------------------------------------------------------------------


@pytest.fixture
def screen() -> Iterator[io.StringIO]:
    """What a terminal 160 wide would show; the bar changes rich's global console for it."""
    yield io.StringIO()
    rich.reconfigure()


def test_progress_bar_shows_the_stall_beside_the_training_bar(screen: io.StringIO) -> None:
    bar = ZenFlowProgressBar(
        console_kwargs={"file": screen, "force_terminal": True, "width": 160, "color_system": None}
    )
    shown: list[str] = []

    def capture(trainer: pl.Trainer, module: Any) -> None:
        assert bar.progress is not None
        screen.seek(0)
        screen.truncate()
        bar.progress.refresh()
        shown.append(screen.getvalue())

    fit(
        build(),
        zenflow(**SYNCHRONOUS),
        val=loader(8, seed=2),
        num_sanity_val_steps=0,
        enable_progress_bar=True,
        callbacks=[bar, At("on_train_batch_start", capture), At("on_validation_end", capture)],
    )
    last = shown[7]
    (line,) = (line for line in last.splitlines() if "Epoch 0" in line)
    before, _, readout = line.partition(" stall ")
    assert "7/8" in before
    value, unit, share, word, hidden = readout.split()[:5]
    assert float(value) > 0.0
    assert (unit, word) == ("ms", "hidden")
    assert 0 <= int(share.removesuffix("%")) <= 100
    assert 0 <= int(hidden.removesuffix("%")) <= 100
    assert "stall" not in shown[0], "nothing is known before the first step"


def test_progress_bar_without_cold_half(screen: io.StringIO) -> None:
    """k = 1: nothing waits, and there is no host work of which a share could be hidden."""
    bar = ZenFlowProgressBar(
        console_kwargs={"file": screen, "force_terminal": True, "width": 160, "color_system": None}
    )
    fit(build(), zenflow(topk_ratio=1.0), enable_progress_bar=True, callbacks=[bar])
    assert "stall 0.0 ms 0%" in screen.getvalue()
    assert "hidden" not in screen.getvalue()


@pytest.mark.parametrize("callback", [ZenFlowProgressBar, StallMonitor])
def test_other_strategies_are_refused(callback: type[Callback]) -> None:
    name = callback.__name__
    with pytest.raises(
        TypeError, match=rf"^{name} works with strategy='zenflow' only.*DDPStrategy"
    ):
        fit(build(), "ddp", enable_progress_bar=True, callbacks=[callback()])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r'cold_rule="replay": .* steps ahead; [\d,]+ cold parameters .* updater processes: 1'),
        ({"cold_rule": "mean"}, r'ZenFlow: cold_rule="mean", the paper\'s: .* merged 4 later; '),
        (
            {"topk_ratio": 1.0},
            r"ZenFlow: nothing is offloaded, all [\d,]+ parameters .*topk_ratio=1\.0",
        ),
    ],
)
def test_fit_says_what_is_offloaded(
    settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(build(), zenflow(**settings), max_steps=1)
    assert re.search(said, caplog.text), caplog.text
