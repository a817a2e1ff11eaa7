"""Gradients that leave during backward, through the Trainer: the same weights, and less memory."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_zenflow import ZenFlowStrategy
from tests.strategy.models import isolated

WIDTH = 24


class Deep(pl.LightningModule):
    """Twenty layers of two matrices each; counts the bytes of gradients alive in a step."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(self.head(x), y) * 30.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        gen = torch.Generator().manual_seed(1)
        x = torch.randn(64, WIDTH, generator=gen)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def fit(module: pl.LightningModule, *callbacks: Callback, **options: Any) -> pl.Trainer:
    strategy = {
        key: options.pop(key)
        for key in ("stream_gradients", "topk_ratio", "select_interval")
        if key in options
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.pop("max_steps", 14),
        strategy=ZenFlowStrategy(
            min_offload_numel=100,
            num_workers=1,
            update_interval=2,
            preview=False,
            **strategy,
        ),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with isolated():
        trainer.fit(module)
    return trainer


def distance(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_streaming_and_retained_gradients_train_alike(clip: float | None) -> None:
    torch.manual_seed(0)
    streamed = Deep(4)
    retained = copy.deepcopy(streamed)
    trainer = fit(streamed, stream_gradients=True, gradient_clip_val=clip)
    fit(retained, stream_gradients=False, gradient_clip_val=clip)
    assert trainer.gradient_clip_val == clip, "the trainer's setting is its own"
    assert distance(streamed, retained) <= (2e-6 if clip else 0.0)
    if clip:
        free = copy.deepcopy(retained)
        fit(free, stream_gradients=False)
        assert distance(free, retained) > 1e-4, "the clipping did nothing"


class LiveGradients(Callback):
    """The most bytes of ``.grad`` alive at any moment of a step, and of all gradients together."""

    def __init__(self) -> None:
        self.peak = self.whole = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.params = list(pl_module.parameters())
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._measure)

    def _measure(self, param: Tensor) -> None:
        live = sum(p.grad.nbytes for p in self.params if p.grad is not None)
        self.peak = max(self.peak, live + self._hot(param))
        self.whole = sum(p.nbytes for p in self.params)

    def _hot(self, param: Tensor) -> int:
        """The compact hot gradients that the engine keeps until the step."""
        assert self.engine is not None
        arrivals = self.engine._stream.arrivals.values()
        return sum(a.hot_grad.nbytes for a in arrivals if a.hot_grad is not None)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, ZenFlowStrategy)
        self.engine: Any = trainer.strategy.engine


def test_at_no_moment_is_more_than_15_percent_of_the_gradient_alive() -> None:
    live = LiveGradients()
    trainer = fit(Deep(20), live, stream_gradients=True, topk_ratio=0.05, max_steps=6)
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.retained_because is None
    assert 0 < live.peak < 0.15 * live.whole


class LooksAtGradients(Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert all(p.grad is not None for p in pl_module.parameters())


class NormHook(Deep):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert all(p.grad is not None for p in self.parameters())


class OwnClipping(Deep):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        assert all(p.grad is not None for p in self.parameters())


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "reason"),
    [
        (Deep, (), {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Deep, (), {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "'value'"),
        (Deep, (LooksAtGradients(),), {}, "LooksAtGradients.on_after_backward"),
        (NormHook, (), {}, "NormHook.on_before_optimizer_step"),
        (OwnClipping, (), {"gradient_clip_val": 1.0}, "OwnClipping.configure_gradient_clipping"),
    ],
)
def test_what_needs_gradients_keeps_them(
    module: type[Deep], callbacks: tuple[Callback, ...], options: dict[str, Any], reason: str
) -> None:
    trainer = fit(module(2), *callbacks, stream_gradients="auto", max_steps=3, **options)
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert trainer.strategy.retained_because is not None
    assert reason in trainer.strategy.retained_because
    with pytest.raises(ValueError, match="stream_gradients=True is not possible here"):
        fit(module(2), *callbacks, stream_gradients=True, max_steps=3, **options)


def test_an_overlapping_merge_is_waited_for_where_weights_are_read() -> None:
    """On the CPU merges are done at once; that they are awaited at all is the racing tests' business."""
    trainer = fit(Deep(2), max_steps=3)
    assert isinstance(trainer.strategy, ZenFlowStrategy)
    assert not trainer.strategy._watched


class Skipping(Deep):
    """A training step that returns None now and then: no backward, and a step without gradients."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return None if index % 3 == 1 else super().training_step(batch, index)


def test_a_batch_that_is_skipped_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    streamed = Skipping(2)
    retained = copy.deepcopy(streamed)
    fit(streamed, stream_gradients=True)
    fit(retained, stream_gradients=False)
    assert distance(streamed, retained) == 0.0
