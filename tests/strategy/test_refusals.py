"""Wrong configurations: each message names the field, its value and the remedy; nothing is left.

That no worker, descriptor or shared memory stays is checked after each test by the fixture of
``tests/conftest.py``, which covers refusals during the set-up of a fit too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_zenflow import GradientSyncCallback, UnsupportedOptimizerError, ZenFlowStrategy
from tests.strategy.models import (
    Regression,
    build,
    distance,
    fit,
    isolated,
    loader,
    make_trainer,
    same_bits,
    weights,
    zenflow,
)
from tests.support import children


def assert_message(error: BaseException, *parts: str) -> None:
    message = str(error)
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"


# -- arguments of the strategy: refused where they are given ------------------------------------------

# Argument, wrong value, error, and what the message must say besides both.
ARGUMENTS: list[tuple[str, Any, type[Exception], str]] = [
    ("topk_ratio", 1.2, ValueError, "0.1 is a good start"),
    ("topk_ratio", -0.5, ValueError, "0.1 is a good start"),
    ("topk_ratio", "10%", TypeError, "0.1 is a good start"),
    ("update_interval", 0, ValueError, "4 is a good start"),
    ("update_interval", 2.5, TypeError, "4 is a good start"),
    ("update_interval", True, TypeError, "4 is a good start"),
    ("update_interval", None, TypeError, "4 is a good start"),
    ("update_lag", 5, ValueError, "raise update_interval to at least 5"),
    ("update_lag", -1, ValueError, "None is one window"),
    ("select_interval", 0, ValueError, '"auto" is 4 windows'),
    ("select_interval", "epoch", TypeError, '"auto" is 4 windows'),
    ("warmup_steps", -3, ValueError, "0: none"),
    ("warmup_steps", 0.1, TypeError, "0: none"),
    ("schedule", "stagger", ValueError, 'use "staggered"'),
    ("schedule", None, TypeError, 'use "staggered"'),
    ("min_offload_numel", -1, ValueError, "0 offloads them all"),
    ("min_offload_numel", "64k", TypeError, "0 offloads them all"),
    ("cold_lr_scale", 0.0, ValueError, "1.0 leaves it unchanged"),
    ("cold_lr_scale", "2", TypeError, "1.0 leaves it unchanged"),
    ("num_workers", 0, ValueError, '"auto": by machine'),
    ("num_workers", "all", TypeError, '"auto": by machine'),
    ("threads_per_worker", 0, ValueError, '"auto": by machine'),
    ("threads_per_worker", 1.0, TypeError, '"auto": by machine'),
    ("kernels", "cupy", ValueError, 'use "auto" or "torch"'),
    ("kernels", "cuda", ValueError, 'use "auto" or "torch"'),
    ("model_averaging_period", 10, ValueError, "remove it, or use strategy='ddp'"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "remedy"), ARGUMENTS, ids=[f"{a[0]}={a[1]!r}" for a in ARGUMENTS]
)
def test_argument(name: str, value: Any, error: type[Exception], remedy: str) -> None:
    before = children()
    with pytest.raises(error) as caught:
        ZenFlowStrategy(**{name: value})
    assert_message(caught.value, name, repr(value), remedy)
    assert children() == before


@pytest.mark.parametrize("value", [4, 1])
def test_lag_above_the_interval_names_both(value: int) -> None:
    with pytest.raises(ValueError, match="update_lag") as caught:
        ZenFlowStrategy(update_interval=value, update_lag=value + 1)
    assert_message(caught.value, f"update_interval={value}", f"got {value + 1}", "lower it")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("top_k_ratio", "topk_ratio"),
        ("update_intervall", "update_interval"),
        ("find_unused_params", "find_unused_parameters"),
    ],
)
def test_unknown_argument(name: str, meant: str) -> None:
    """At once: with one rank no DistributedDataParallel is ever made that would refuse it."""
    with pytest.raises(TypeError) as caught:
        ZenFlowStrategy(**{name: 0.25})
    assert_message(caught.value, name, "0.25", meant)


def test_arguments_of_ddp_are_taken() -> None:
    """Of DDPStrategy, and those that it hands to DistributedDataParallel."""
    strategy = ZenFlowStrategy(
        process_group_backend="gloo",
        find_unused_parameters=True,
        bucket_cap_mb=10,
        static_graph=False,
    )
    assert strategy.process_group_backend == "gloo"


# -- optimizers, refused at the start of fit ----------------------------------------------------------


def with_option(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda module: AdamW(module.parameters(), **options)


class MyAdamW(AdamW):
    """A subclass may have another step."""


def sparse_layout(module: nn.Module) -> Optimizer:
    return AdamW([nn.Parameter(torch.eye(4).to_sparse())])


def complex_parameter(module: nn.Module) -> Optimizer:
    return AdamW([nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))])


WORKS = "torch.optim.AdamW"
OPTIMIZERS: list[tuple[str, Callable[[nn.Module], Optimizer], tuple[str, ...]]] = [
    (
        "sgd",
        lambda m: SGD(m.parameters(), lr=0.1),
        ("torch.optim.sgd.SGD", WORKS, "strategy='ddp'"),
    ),
    ("subclass", lambda m: MyAdamW(m.parameters()), ("MyAdamW", WORKS, "strategy='ddp'")),
    ("amsgrad", with_option(amsgrad=True), ("amsgrad=True", "set amsgrad=False", WORKS)),
    ("maximize", with_option(maximize=True), ("maximize=True", "return the negated loss", WORKS)),
    (
        "capturable",
        with_option(capturable=True),
        ("capturable=True", "set capturable=False", WORKS),
    ),
    (
        "differentiable",
        with_option(differentiable=True),
        ("differentiable=True", "set differentiable=False", WORKS),
    ),
    (
        "tensor_lr",
        with_option(lr=torch.tensor(0.25), foreach=False),
        ("tensor for lr", "tensor(0.2500)", "pass lr=0.25", WORKS),
    ),
    (
        "second_group",
        lambda m: Adam(
            [
                {"params": m.conv.parameters()},
                {"params": m.head.parameters(), "amsgrad": True},
            ]
        ),
        ("Adam parameter group 1", "amsgrad=True", "set amsgrad=False"),
    ),
    ("sparse_parameter", sparse_layout, ("torch.sparse_coo", "#0", ".to_dense()")),
    ("complex_parameter", complex_parameter, ("torch.complex64", "#0", "torch.view_as_real")),
]


@pytest.mark.parametrize(
    ("make", "parts"), [o[1:] for o in OPTIMIZERS], ids=[o[0] for o in OPTIMIZERS]
)
def test_optimizer(make: Callable[[nn.Module], Optimizer], parts: tuple[str, ...]) -> None:
    module = build(optimizer=make)
    with pytest.raises(UnsupportedOptimizerError) as caught:
        fit(module, zenflow())
    assert_message(caught.value, *parts)
    assert module.losses == [], "refused before the first batch"


class TwoOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False  # Lightning wants that, but later than we are asked
        return [AdamW(self.conv.parameters()), AdamW(self.head.parameters())]


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(8, 6, sparse=True)


class SparseGradient(Regression):
    """Sparse by a functional call: to be seen in the gradient only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.embedding(torch.arange(8), self.table, sparse=True)
        return super().forward(x) + rows.sum()


class StepsByItself(Regression):
    """Reaches around Lightning to the plain optimizer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "error", "parts"),
    [
        (TwoOptimizers, ValueError, ("2 optimizers", "one AdamW", "strategy='ddp'")),
        (Manual, ValueError, ("Manual", "automatic_optimization=False", "Use automatic", "'ddp'")),
        (Sparse, ValueError, ("Embedding 'position'", "sparse=True", "sparse=False")),
        (SparseGradient, ValueError, ("table", "torch.sparse_coo", "sparse=False")),
        (
            StepsByItself,
            RuntimeError,
            ("AdamW.step()", "called directly", "automatic optimization"),
        ),
    ],
)
def test_module(kind: type[Regression], error: type[Exception], parts: tuple[str, ...]) -> None:
    module = build(kind)
    with pytest.raises(error) as caught:
        fit(module, zenflow())
    assert_message(caught.value, *parts)


# -- the Trainer --------------------------------------------------------------------------------------


def test_contradicting_intervals() -> None:
    with pytest.raises(ValueError, match="GradientSyncCallback") as caught:
        fit(build(), zenflow(update_interval=2), callbacks=[GradientSyncCallback(3)])
    assert_message(caught.value, "every_n_steps=3", "update_interval=2", "Remove one of them")


def test_lag_above_the_callbacks_interval() -> None:
    with pytest.raises(ValueError, match="update_lag") as caught:
        fit(build(), zenflow(update_lag=4), callbacks=[GradientSyncCallback(2)])
    assert_message(caught.value, "update_interval=2", "got 4", "lower it")


def test_precision() -> None:
    with pytest.raises(ValueError, match="precision") as caught:
        fit(build(), zenflow(), precision="64-true")
    assert_message(caught.value, "precision='64-true'", "32-true, bf16-true, bf16-mixed", "'ddp'")


@pytest.mark.parametrize("start", ["fit", "validate"])
def test_a_trainer_recovers_from_a_refusal(start: str) -> None:
    """The same Trainer trains another module after it has refused one."""
    trainer = make_trainer(zenflow(topk_ratio=1.0))
    with isolated():
        if start == "fit":
            with pytest.raises(UnsupportedOptimizerError):
                trainer.fit(build(optimizer=lambda m: SGD(m.parameters(), lr=0.1)), loader())
        else:  # refused for training only
            trainer.validate(
                build(optimizer=lambda m: SGD(m.parameters())), loader(), verbose=False
            )
        module = build()
        trainer.fit(module, loader())
    assert trainer.global_step == 8 == len(module.losses)
    strategy: Any = trainer.strategy
    assert strategy.engine is None


class Bounded(Regression):
    """An embedding whose forward pass rescales its weight in place."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(8, 6, max_norm=0.5)


def test_an_embedding_that_changes_its_own_weight() -> None:
    with pytest.raises(ValueError, match="max_norm") as caught:
        fit(build(Bounded), zenflow())
    assert_message(caught.value, "'position'", "max_norm=0.5", "max_norm=None", "numel=49")
    module = build(Bounded)
    fit(module, zenflow(min_offload_numel=49))
    theirs = build(Bounded)
    fit(theirs, "ddp")
    assert distance(weights(module), weights(theirs)) < 0.05


# -- what looks wrong and is not ----------------------------------------------------------------------


class SparseByName(Regression):
    """An attention with an attribute of this name, and a sparse table that is not trained."""

    def __init__(self, which: str) -> None:
        super().__init__()
        if which == "attribute":
            self.hidden.sparse = True
        else:
            self.frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)


@pytest.mark.parametrize("which", ["attribute", "frozen"])
def test_only_sparse_gradients_are_refused(which: str) -> None:
    module = build(SparseByName, which=which)
    fit(module, zenflow(topk_ratio=1.0))
    assert len(module.losses) == 8


def test_no_optimizer_runs() -> None:
    class NoOptimizer(Regression):
        def configure_optimizers(self) -> None:
            return None

    module = build(NoOptimizer)
    before = weights(module)
    with pytest.warns(UserWarning, match=r"configure_optimizers.*returned `None`"):
        trainer = fit(module, zenflow())
    assert len(module.losses) == 8
    assert same_bits(before, weights(module))
    strategy: Any = trainer.strategy
    assert strategy.host_memory.total_bytes == 0
