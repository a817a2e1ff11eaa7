"""GradientSyncCallback: who sets the interval, and who reads flushed weights; other callbacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from lightning_zenflow import GradientSyncCallback, StallMonitor
from tests.strategy.models import (
    SYNCHRONOUS,
    TOLERANCE,
    WINDOWED,
    At,
    Regression,
    build,
    distance,
    fit,
    isolated,
    loader,
    pending,
    running,
    same_bits,
    weights,
    zenflow,
)

# -- the interval -----------------------------------------------------------------------------------


def all_hot(**settings: Any) -> Any:
    """k = 1: no workers to start, where only the callbacks are looked at."""
    return zenflow(topk_ratio=1.0, **settings)


def interval_of(strategy: Any, *callbacks: Callback) -> tuple[int, list[type]]:
    """The engine's S, and the callbacks' types in their order, as a fit with them has it."""
    found: list[Any] = []

    def note(trainer: pl.Trainer, module: Any) -> None:
        found.append(running(trainer).schedule.interval)
        found.append([type(c) for c in trainer.callbacks])

    fit(
        build(),
        strategy,
        callbacks=[At("on_train_start", note), *callbacks],
        max_steps=1,
    )
    return found[0], found[1]


def test_added_by_default_and_first() -> None:
    interval, order = interval_of(all_hot())
    assert interval == 4
    assert order[0] is GradientSyncCallback
    assert order.count(GradientSyncCallback) == order.count(StallMonitor) == 1


@pytest.mark.parametrize(
    ("settings", "every", "expected"),
    [
        ({}, 6, 6),  # the callback replaces the default
        ({"update_interval": 3}, 3, 3),  # the same value twice
        ({"update_interval": 3}, None, 3),  # the callback leaves it to the strategy
        ({"update_lag": 2}, 2, 2),
    ],
)
def test_users_callback_sets_the_interval(
    settings: dict[str, Any], every: int | None, expected: int
) -> None:
    own = GradientSyncCallback(every_n_steps=every)
    interval, order = interval_of(all_hot(**settings), own)
    assert interval == expected
    assert order[0] is GradientSyncCallback
    assert order.count(GradientSyncCallback) == 1


@pytest.mark.parametrize("given", [4, 8])
def test_contradicting_explicit_intervals_are_refused(given: int) -> None:
    """Also where the strategy's value happens to be the default."""
    with pytest.raises(ValueError, match=rf"every_n_steps=5.*update_interval={given}.*[Rr]emove"):
        fit(
            build(),
            zenflow(update_interval=given),
            callbacks=[GradientSyncCallback(every_n_steps=5)],
        )


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^2 GradientSyncCallbacks.*update interval: keep one"):
        fit(build(), zenflow(), callbacks=[GradientSyncCallback(4), GradientSyncCallback(4)])


def test_interval_below_an_explicit_lag_is_refused() -> None:
    with pytest.raises(ValueError, match="update_interval=2, got 3; lower it"):
        fit(build(), zenflow(update_lag=3), callbacks=[GradientSyncCallback(2)])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-4, ValueError),
        (True, TypeError),
        (4.0, TypeError),
        ("4", TypeError),
        ([4], TypeError),
    ],
)
def test_wrong_every_n_steps(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        GradientSyncCallback(every_n_steps=value)
    message = str(caught.value)
    assert message.startswith("every_n_steps must be")
    assert repr(value) in message
    assert "e.g. 4" in message


@pytest.mark.parametrize("callback", [GradientSyncCallback(), GradientSyncCallback(4)])
def test_other_strategies_are_refused(callback: Callback) -> None:
    with pytest.raises(
        TypeError, match=r"GradientSyncCallback works with strategy='zenflow' only.*"
    ):
        fit(build(), "ddp", callbacks=[callback])


def test_stays_one_and_first_over_two_fits() -> None:
    """The interval adopted in a first fit is not a contradiction in the second."""
    seen: list[tuple[int, type]] = []

    def note(trainer: pl.Trainer, module: Any) -> None:
        seen.append((running(trainer).schedule.interval, type(trainer.callbacks[0])))

    callbacks = [At("on_train_start", note), GradientSyncCallback(3)]
    trainer = fit(build(), all_hot(), callbacks=callbacks, limit_train_batches=2)
    count = len(trainer.callbacks)
    trainer.fit_loop.max_epochs = 2
    with isolated():
        trainer.fit(build(), loader())
    assert seen == [(3, GradientSyncCallback)] * 2
    assert len(trainer.callbacks) == count


# -- flushed weights --------------------------------------------------------------------------------


class Reader(Callback):
    """Reads the weights in on_train_epoch_end; was anything pending before, is anything then?"""

    def __init__(self) -> None:
        self.pending_in_batch: list[bool] = []
        self.pending_at_end: list[bool] = []
        self.read: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.pending_in_batch.append(pending(running(trainer)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.pending_at_end.append(pending(running(trainer)))
        self.read.append(weights(pl_module))


class LastReader(Checkpoint):
    """The same, but last: Lightning calls checkpoint callbacks after the module's own hook."""

    def __init__(self) -> None:
        self.read: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.read.append(weights(pl_module))


class ReadsToo(Regression):
    """The module reads its weights in its own hook, between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[dict[str, Tensor]] = []
        self.started_with: list[dict[str, Tensor]] = []

    def on_train_epoch_start(self) -> None:
        self.started_with.append(weights(self))

    def on_train_epoch_end(self) -> None:
        self.read.append(weights(self))


def test_flushed_before_the_first_callback_reads() -> None:
    first, last, module = Reader(), LastReader(), build(ReadsToo)
    fit(
        module,
        zenflow(**WINDOWED),
        val=loader(8, seed=2),
        max_epochs=3,
        limit_train_batches=7,
        enable_checkpointing=True,
        callbacks=[first, last, GradientSyncCallback()],
    )
    assert [first.pending_in_batch[i] for i in (6, 13, 20)] == [True] * 3
    assert first.pending_at_end == [False] * 3
    later = [*module.started_with[1:], weights(module)]
    for epoch in range(3):
        assert same_bits(first.read[epoch], module.read[epoch])
        assert same_bits(first.read[epoch], last.read[epoch])
        assert same_bits(first.read[epoch], later[epoch]), "weights changed after they were read"


def test_flush_moves_the_weights_of_the_last_batch() -> None:
    """What the flush adds is the gradient of the open windows: cold columns only."""
    before: dict[str, Tensor] = {}
    cold: dict[str, Tensor] = {}

    def note(trainer: pl.Trainer, module: Any) -> None:
        before.update(weights(module))
        cold.update({m.name: m.columns.cold.clone() for m in running(trainer).matrices})

    module = build()
    fit(
        module,
        zenflow(**WINDOWED),
        limit_train_batches=7,
        callbacks=[At("on_train_batch_end", note)],
    )
    after = weights(module)
    for name, value in before.items():
        changed = (after[name] != value).flatten(1) if value.ndim > 1 else after[name] != value
        if name not in cold:
            assert not changed.any(), name
            continue
        columns = set(changed.any(0).nonzero().flatten().tolist())
        assert columns == set(cold[name].tolist()), name


def stop_inside(trainer: pl.Trainer, module: Any) -> None:
    trainer.should_stop = trainer.global_step >= 5


@pytest.mark.parametrize(
    ("limits", "callbacks"),
    [({"max_steps": 5, "max_epochs": -1}, []), ({}, [At("on_train_batch_end", stop_inside)])],
    ids=["max_steps", "should_stop"],
)
def test_flushed_when_fit_stops_inside_an_epoch(
    limits: dict[str, Any], callbacks: list[Callback]
) -> None:
    reader, ends = Reader(), []
    end = At("on_train_end", lambda trainer, module: ends.append(pending(running(trainer))))
    module = build()
    trainer = fit(module, zenflow(**WINDOWED), callbacks=[reader, end, *callbacks], **limits)
    assert trainer.global_step == 5
    assert reader.pending_in_batch[-1]
    assert ends == [False]
    assert same_bits(reader.read[-1], weights(module))


def test_flushed_at_the_end_of_fit_even_without_the_callback() -> None:
    """A tuner may replace the callbacks: the strategy then flushes by itself."""

    def remove(trainer: pl.Trainer, module: Any) -> None:
        trainer.callbacks[:] = [c for c in trainer.callbacks if type(c) is not GradientSyncCallback]

    ends = []
    for callbacks in ([], [At("on_train_start", remove)]):
        module, reader = build(), Reader()
        fit(module, zenflow(**WINDOWED), limit_train_batches=6, callbacks=[*callbacks, reader])
        assert reader.pending_at_end == [bool(callbacks)]
        ends.append(weights(module))
    assert same_bits(*ends)


# -- averaging --------------------------------------------------------------------------------------


def mean(snapshots: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([s[n] for s in snapshots]).mean(0) for n in snapshots[0]}


def test_stochastic_weight_averaging_averages_flushed_weights() -> None:
    """It reads at the start of the epochs 1, 2, 3: what the epochs 0, 1, 2 ended with."""
    reader, module = Reader(), build()
    swa = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)
    fit(
        module,
        zenflow(**WINDOWED),
        max_epochs=4,
        limit_train_batches=6,
        callbacks=[swa, reader],
    )
    assert all(reader.pending_in_batch[5::6])
    assert distance(weights(module), mean(reader.read[:3])) <= 1e-6
    assert distance(reader.read[0], reader.read[2]) > 1e-3


def test_exponential_moving_average_of_flushed_weights() -> None:
    """Read at the end of every epoch, and left in the module at the end of fit."""
    reader, module = Reader(), build()
    ema = EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0)
    fit(
        module,
        zenflow(**WINDOWED),
        val=loader(8, seed=2),
        max_epochs=3,
        limit_train_batches=6,
        callbacks=[ema, reader],
    )
    first, second, third = reader.read
    expected = {n: 0.25 * first[n] + 0.25 * second[n] + 0.5 * third[n] for n in first}
    assert distance(weights(module), expected) <= 1e-6
    assert distance(first, third) > 1e-3


def test_averaged_weights_in_mid_epoch_validation_do_not_disturb_training() -> None:
    """WeightAveraging swaps the weights for each validation; windows are open meanwhile."""
    ends = []
    for val in (None, loader(8, seed=2)):
        reader, module = Reader(), build()
        ema = EMAWeightAveraging(decay=0.5)
        fit(
            module,
            zenflow(**WINDOWED),
            val=val,
            val_check_interval=3,
            max_epochs=2,
            callbacks=[ema, reader],
        )
        assert any(reader.pending_in_batch)
        ends.append(reader.read)
    assert same_bits(ends[0][1], ends[1][1])


# -- Lightning's other callbacks --------------------------------------------------------------------


def exponential(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}


def with_callbacks(strategy: Any, root: Path) -> tuple[Any, ...]:
    """Four of Lightning's callbacks in one run, and what each of them did."""
    stopping = EarlyStopping("val_loss", patience=0, min_delta=0.0, mode="max")
    saving = ModelCheckpoint(
        root, filename="{epoch}-{step}", monitor="val_loss", save_top_k=-1, save_last=True
    )
    rates = LearningRateMonitor("step")
    logger = CSVLogger(root, name="", version="")
    module = build(scheduler=exponential)
    trainer = fit(
        module,
        strategy,
        val=loader(8, seed=2),
        max_epochs=6,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[stopping, saving, rates, GradientAccumulationScheduler({0: 2, 2: 3})],
    )
    rows = (root / "metrics.csv").read_text().splitlines()
    lrs = [row.split(",") for row in rows]
    column = next(i for i, name in enumerate(lrs[0]) if name.startswith("lr-"))
    names = sorted(path.name for path in root.glob("*.ckpt"))
    return (
        module,
        (trainer.global_step, trainer.current_epoch, stopping.stopped_epoch, stopping.wait_count),
        names,
        [row[column] for row in lrs[1:] if row[column]],
        Path(saving.last_model_path),
    )


def test_stopping_saving_monitoring_and_accumulating_callbacks_equal_ddp(tmp_path: Path) -> None:
    ref = with_callbacks("ddp", tmp_path / "ddp")
    ours = with_callbacks(zenflow(**SYNCHRONOUS), tmp_path / "zenflow")
    assert ours[1:4] == ref[1:4]
    assert "last.ckpt" in ours[2]
    assert len(set(ours[3])) > 4
    assert distance(weights(ours[0]), weights(ref[0])) <= TOLERANCE


def test_last_checkpoint_holds_the_flushed_weights(tmp_path: Path) -> None:
    reader = Reader()
    saving = ModelCheckpoint(tmp_path, save_last=True)
    module = build()
    fit(
        module,
        zenflow(**WINDOWED),
        limit_train_batches=6,
        enable_checkpointing=True,
        callbacks=[saving, reader],
    )
    assert reader.pending_in_batch[-1]
    saved = torch.load(saving.last_model_path, weights_only=True)
    assert same_bits(saved["state_dict"], weights(module))
    assert saved["optimizer_states"][0]["state"][0]["step"] == 6


class Custom(GradientSyncCallback):
    """A user's subclass."""


@pytest.mark.parametrize("make", [Custom, lambda: Custom(4)])
def test_a_subclass_is_adopted(make: Callable[[], Callback]) -> None:
    _, order = interval_of(all_hot(), make())
    assert order[0] is Custom
    assert GradientSyncCallback not in order


def test_returned_by_configure_callbacks() -> None:
    class Configuring(Regression):
        def configure_callbacks(self) -> list[Callback]:
            return [GradientSyncCallback(3)]

    seen: list[int] = []
    note = At("on_train_start", lambda t, m: seen.append(running(t).schedule.interval))
    trainer = fit(build(Configuring), all_hot(), callbacks=[note], max_steps=1)
    assert seen == [3]
    assert isinstance(trainer.callbacks[0], GradientSyncCallback)
