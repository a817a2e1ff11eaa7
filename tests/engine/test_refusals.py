"""What the engine refuses: by type, and with the option, its value and the remedy in the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_zenflow.engine import UnsupportedOptimizerError, ZenFlowEngine
from lightning_zenflow.engine.hyper import check_gradient, check_optimizer, check_parameter
from tests.support import children, make_engine, open_descriptors, set_grads

WORKS = "torch.optim.AdamW and torch.optim.Adam"


def weight() -> Tensor:
    return torch.ones(6, 5, requires_grad=True)


class MyAdamW(AdamW):
    """Inherits everything, but its ``step`` might be anything."""


class Second(SGD):
    """An optimizer of the user's own."""


def adamw(**options: Any) -> Callable[[], Optimizer]:
    return lambda: AdamW([weight()], **options)


def later(**options: Any) -> Callable[[], Optimizer]:
    """Options that stand in the second group only."""
    return lambda: Adam([{"params": [weight()]}, {"params": [weight()], **options}])


BETAS = (torch.tensor(0.5), torch.tensor(0.75))

# What is given; what stands in the message: the option, its value, and what to do.
REFUSED: dict[str, tuple[Callable[[], Optimizer], tuple[str, ...]]] = {
    "SGD": (lambda: SGD([weight()], lr=0.1), ("SGD", "strategy='ddp'")),
    "subclass of AdamW": (lambda: MyAdamW([weight()]), ("MyAdamW", __name__, "strategy='ddp'")),
    "subclass of SGD": (lambda: Second([weight()]), ("Second", "strategy='ddp'")),
    "NAdam": (lambda: torch.optim.NAdam([weight()]), ("NAdam", "strategy='ddp'")),
    "amsgrad": (adamw(amsgrad=True), ("group 0", "amsgrad=True", "set amsgrad=False")),
    "maximize": (adamw(maximize=True), ("group 0", "maximize=True", "set maximize=False")),
    "capturable": (adamw(capturable=True), ("group 0", "capturable=True", "set capturable=False")),
    "differentiable": (
        adamw(differentiable=True),
        ("group 0", "differentiable=True", "set differentiable=False"),
    ),
    "tensor lr": (
        adamw(lr=torch.tensor(0.25)),
        ("group 0", "tensor for lr", "tensor(0.2500)", "pass lr=0.25"),
    ),
    "tensor betas": (
        adamw(betas=BETAS, foreach=False),
        ("group 0", "tensor betas", "tensor(0.5000)", "pass floats"),
    ),
    "tensor weight_decay": (
        adamw(weight_decay=torch.tensor(0.5)),
        ("group 0", "tensor for weight_decay", "tensor(0.5000)", "pass weight_decay=0.5"),
    ),
    "amsgrad in group 1": (later(amsgrad=True), ("Adam", "group 1", "amsgrad=True")),
    "maximize in group 1": (later(maximize=True), ("Adam", "group 1", "maximize=True")),
    "tensor eps in group 1": (
        later(eps=torch.tensor(0.125)),
        ("group 1", "tensor for eps", "pass eps=0.125"),
    ),
}


@pytest.mark.parametrize(("make", "texts"), REFUSED.values(), ids=REFUSED.keys())
def test_optimizers_that_cannot_be_offloaded(
    make: Callable[[], Optimizer], texts: tuple[str, ...]
) -> None:
    """Before anything is started: real workers would be, but for the refusal."""
    optimizer = make()
    processes, descriptors = set(children()), open_descriptors()
    with pytest.raises(UnsupportedOptimizerError) as refusal:
        make_engine(optimizer, seed=None)
    message = str(refusal.value)
    assert all(text in message for text in (*texts, WORKS)), message
    assert set(children()) == processes
    opened = [name for fd, name in open_descriptors().items() if fd not in descriptors]
    assert not any("zenflow" in name or "eventfd" in name for name in opened)


@pytest.mark.parametrize("make", [adamw(), adamw(fused=True), adamw(foreach=True), later()])
def test_ordinary_optimizers_are_accepted(make: Callable[[], Optimizer]) -> None:
    """Or else the tests above would pass for a check that refuses everything."""
    check_optimizer(make())


def test_a_refused_optimizer_still_steps() -> None:
    """Nothing of the engine stays on it."""
    param = weight()
    optimizer = SGD([param], lr=0.5)
    with pytest.raises(UnsupportedOptimizerError):
        make_engine(optimizer)
    set_grads([param], 1)
    optimizer.step()
    assert bool((param != 1.0).any())


BAD_PARAMETERS: dict[str, tuple[Callable[[], Tensor], tuple[str, ...]]] = {
    "complex": (
        lambda: torch.zeros(4, 3, dtype=torch.complex64),
        ("torch.complex64", "torch.view_as_real"),
    ),
    "integer": (lambda: torch.zeros(4, 3, dtype=torch.int64), ("torch.int64", "floating-point")),
    "bool": (lambda: torch.zeros(4, 3, dtype=torch.bool), ("torch.bool", "floating-point")),
    "sparse": (lambda: torch.eye(4).to_sparse(), ("torch.sparse_coo", ".to_dense()")),
    "sparse rows": (lambda: torch.eye(4).to_sparse_csr(), ("torch.sparse_csr", ".to_dense()")),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(("make", "texts"), BAD_PARAMETERS.values(), ids=BAD_PARAMETERS.keys())
def test_parameters_that_are_not_real_and_dense(
    make: Callable[[], Tensor], texts: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedOptimizerError) as refusal:
        check_parameter("net.weight", make())
    message = str(refusal.value)
    assert all(text in message for text in ("parameter net.weight", *texts)), message


@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_the_engine_checks_every_trainable_parameter(kind: str) -> None:
    """Integers cannot require a gradient, so autograd never lets one come so far."""
    make, texts = BAD_PARAMETERS[kind]
    good, bad = weight(), make().requires_grad_()
    with pytest.raises(UnsupportedOptimizerError, match=r"parameter block\.w ") as refusal:
        make_engine(AdamW([good, bad]), names={good: "good", bad: "block.w"})
    assert all(text in str(refusal.value) for text in texts)


def test_unnamed_parameters_are_numbered() -> None:
    bad = torch.zeros(4, 3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(UnsupportedOptimizerError, match="parameter #1 "):
        make_engine(AdamW([weight(), bad]))


def test_frozen_parameters_may_be_anything() -> None:
    frozen = torch.zeros(4, 3, dtype=torch.int64)
    param = weight()
    with make_engine(AdamW([frozen, param])) as engine:
        set_grads([param], 1)
        engine.step()
        engine.flush()
    assert not frozen.any()
    assert bool((param != 1.0).all())


@pytest.mark.parametrize("min_offload_numel", [0, 10**6], ids=["offloaded", "dense hot"])
def test_sparse_gradients_are_refused(min_offload_numel: int) -> None:
    """They are known only when they come; the layer that makes them is named."""
    layer = nn.Embedding(5, 3, sparse=True)
    optimizer, names = AdamW(layer.parameters()), {layer.weight: "embed.weight"}
    before = layer.weight.detach().clone()
    with make_engine(optimizer, names=names, min_offload_numel=min_offload_numel) as engine:
        layer(torch.tensor([1, 3])).sum().backward()
        with pytest.raises(UnsupportedOptimizerError) as refusal:
            engine.step()
    texts = ("parameter embed.weight", "torch.sparse_coo", "sparse=False")
    assert all(text in str(refusal.value) for text in texts)
    assert torch.equal(layer.weight, before)


def test_dense_gradients_are_accepted() -> None:
    check_gradient("w", torch.zeros(3, 2))


@pytest.mark.parametrize("topk_ratio", [0.1, 1.0])
def test_the_optimizers_own_step_is_refused_while_the_engine_lives(topk_ratio: float) -> None:
    param = weight()
    optimizer = AdamW([param], lr=1e-2)
    with make_engine(optimizer, topk_ratio=topk_ratio):
        set_grads([param], 1)
        with pytest.raises(RuntimeError, match=r"AdamW\.step\(\) was called directly") as refusal:
            optimizer.step()
        assert "engine.step()" in str(refusal.value)
        assert bool((param == 1.0).all())
    optimizer.step()
    assert bool((param != 1.0).all()), "after close the optimizer is the user's again"


# -- after close ----------------------------------------------------------------------------------

AFTER_CLOSE: dict[str, Callable[[ZenFlowEngine], object]] = {
    "step": lambda engine: engine.step(),
    "flush": lambda engine: engine.flush(),
    "state_dict": lambda engine: engine.state_dict(),
    "load_state_dict": lambda engine: engine.load_state_dict(
        AdamW([weight(), weight()]).state_dict()
    ),
    "reload_masters": lambda engine: engine.reload_masters(),
}


@pytest.mark.parametrize("use", AFTER_CLOSE.values(), ids=AFTER_CLOSE.keys())
def test_use_after_close_is_an_error_and_changes_nothing(
    use: Callable[[ZenFlowEngine], object],
) -> None:
    """A closed engine has lost the cold half: to go on without it would train something else."""
    params = [weight(), weight()]
    engine = make_engine(AdamW(params, lr=1e-2), topk_ratio=0.4, update_interval=4)
    for step in (1, 2):
        set_grads(params, step)
        engine.step()
    engine.close()
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="closed"):
        use(engine)
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)


@pytest.mark.parametrize("seed", [0, None], ids=["inline lanes", "worker processes"])
def test_close_may_be_called_twice(seed: int | None) -> None:
    engine = make_engine(AdamW([weight()]), seed=seed)
    engine.close()
    engine.close()
    assert engine.pool is None


def test_the_closed_pool_and_engine_are_refused_too() -> None:
    param = weight()
    engine = make_engine(AdamW([param]), topk_ratio=0.4)
    set_grads([param], 1)
    engine.step()
    pool = engine.pool
    assert pool is not None
    engine.close()
    assert pool.closed
    with pytest.raises(RuntimeError, match="closed"):
        engine.synchronize()
    with pytest.raises(RuntimeError, match="closed"):
        pool.check()


def test_an_exception_in_a_with_block_closes_the_engine() -> None:
    optimizer = AdamW([weight()])
    with pytest.raises(KeyError), make_engine(optimizer) as engine:
        raise KeyError("the user's")
    assert engine.pool is None
