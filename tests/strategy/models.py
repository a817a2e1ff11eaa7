"""Tiny LightningModules, deterministic data, and the two Trainers that the strategy tests compare."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import ZenFlowEngine, ZenFlowStrategy

TOLERANCE = 2e-6
"""Largest absolute difference that counts as equal to AdamW in fp32."""

SYNCHRONOUS: dict[str, Any] = {
    "topk_ratio": 0.3,
    "update_interval": 1,
    "update_lag": 0,
    "select_interval": 1,
}
"""Settings under which ZenFlow is AdamW, with a new choice of hot columns at every step."""

WINDOWED: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 4}
"""Settings under which gradients are pending between steps (S = 4, L as the rule has it)."""

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


def adamw(module: nn.Module) -> Optimizer:
    """The optimizer of most tests."""
    return AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)


class Regression(pl.LightningModule):
    """A convolution, an embedding of the position, LayerNorm and two Linears; logs its losses.

    Args:
        optimizer: makes the optimizer; AdamW by default.
        scheduler: makes what goes under "lr_scheduler" in configure_optimizers' answer.
    """

    def __init__(
        self, optimizer: MakeOptimizer = adamw, scheduler: MakeScheduler | None = None
    ) -> None:
        super().__init__()
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self.conv = nn.Conv1d(2, 6, 3, padding=1)
        self.position = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(48, 10)
        self.head = nn.Linear(10, 3)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.view(len(x), 2, 8)).transpose(1, 2)
        y = self.norm(y + self.position(torch.arange(8)))
        return self.head(torch.tanh(self.hidden(y.flatten(1))))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        x = x.to(self.head.weight.dtype)
        return nn.functional.mse_loss(self(x).float(), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self)
        if self._make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._make_scheduler(optimizer)}


def build(kind: Callable[..., Any] = Regression, seed: int = 0, **settings: Any) -> Any:
    """A module whose weights depend on ``seed`` only."""
    torch.manual_seed(seed)
    return kind(**settings)


def samples(count: int = 32, seed: int = 1) -> TensorDataset:
    """Inputs of 16 numbers, and a smooth target that the model can learn."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=gen)
    mixing = torch.randn(16, 3, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, torch.sin(x @ mixing / 4))


def loader(count: int = 32, batch_size: int = 4, seed: int = 1) -> DataLoader[Any]:
    """``count / batch_size`` batches, always the same ones in the same order."""
    return DataLoader(samples(count, seed), batch_size=batch_size, shuffle=False)


def zenflow(**settings: Any) -> ZenFlowStrategy:
    """A strategy that offloads every matrix to one worker."""
    return ZenFlowStrategy(**{"num_workers": 1, "min_offload_numel": 0, **settings})


def make_trainer(strategy: Strategy | str, **settings: Any) -> pl.Trainer:
    """A silent Trainer on the CPU."""
    silent: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "max_epochs": 1,
    }
    return pl.Trainer(strategy=strategy, **{**silent, **settings})


@contextmanager
def isolated() -> Iterator[None]:
    """Lightning's variables and process group end with the block.

    A strategy with one device leaves ``LOCAL_RANK`` and a group of size 1 in the process; a later
    test with two devices would take itself for a launched rank.
    """
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*trailing underscore.*")
        try:
            yield
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def fit(
    module: pl.LightningModule,
    strategy: Strategy | str,
    *,
    data: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> pl.Trainer:
    """Train ``module``, on the 8 batches of :func:`loader` by default; returns the Trainer."""
    trainer = make_trainer(strategy, **settings)
    with isolated():
        trainer.fit(module, data if data is not None else loader(), val, ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the module's parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest absolute difference between two sets of weights."""
    assert left.keys() == right.keys()
    return max(float((left[n].double() - right[n].double()).abs().max()) for n in left)


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def pending(engine: ZenFlowEngine | None) -> bool:
    """Whether any gradient has not reached its weight yet."""
    assert engine is not None
    return any(engine.cold.pending(matrix) for matrix in engine.matrices)


def running(trainer: pl.Trainer) -> ZenFlowEngine:
    """The engine of a Trainer that is training."""
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.engine is not None
    return trainer.strategy.engine


class Trace(Callback):
    """Records every hook in order, and after each batch the weights, learning rates and step."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []
        self.global_steps: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.events.append("on_train_batch_end")
        self.weights.append(weights(pl_module))
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.global_steps.append(trainer.global_step)


def _recorder(name: str) -> Callable[..., None]:
    def record(self: Trace, *args: Any, **kwargs: Any) -> None:
        self.events.append(name)

    return record


for _name in dir(Callback):
    if (_name.startswith("on_") or _name in ("setup", "teardown")) and _name not in vars(Trace):
        setattr(Trace, _name, _recorder(_name))


class At(Callback):
    """Calls ``action(trainer, module)`` in one hook, e.g. ``At("on_train_batch_end", f)``."""

    def __init__(self, hook: str, action: Callable[[pl.Trainer, Any], Any]) -> None:
        assert hasattr(Callback, hook)
        self._action = action
        setattr(self, hook, self._call)

    def _call(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self._action(trainer, pl_module)
