"""Sanity of the sequential reference itself: known optimizers, hand-computed cases, the ledger."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .zenflow_reference import Counters, GroupHyper, ReferenceConfig, ZenFlowReference

ADAMW = GroupHyper(lr=0.02, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
ADAM = replace(ADAMW, decoupled=False)
BOTH = pytest.mark.parametrize("base", [ADAMW, ADAM], ids=["adamw", "adam"])
SHAPES = {"linear": (5, 7), "embedding": (11, 4), "conv": (6, 3, 3, 3)}
SHAPES |= {"one_column": (9, 1), "one_row": (1, 13), "bias": (7,), "scalar": ()}
MATRICES = ("linear", "embedding", "conv", "one_column", "one_row")


def make_config(
    *, k: float = 0.3, s: int = 2, lag: int | None = None, r: int = 2, w: int = 0, scale: float = 1
) -> ReferenceConfig:
    return ReferenceConfig(k, s, s if lag is None else lag, r, w, 0, scale)


def random_params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=gen).to(dtype) for name, shape in SHAPES.items()}


def random_grads(t: int) -> dict[str, Tensor | None]:
    """Random gradients of step ``t``; ``conv`` has none at every fifth step."""
    gen = torch.Generator().manual_seed(1000 + t)
    grads = {name: torch.randn(shape, generator=gen) for name, shape in SHAPES.items()}
    return {name: None if name == "conv" and t % 5 == 2 else g for name, g in grads.items()}


def hyper_at(t: int, base: GroupHyper) -> dict[str, GroupHyper]:
    """A learning rate that changes at every step; the biases form a group without decay."""
    now = replace(base, lr=base.lr * (1.0 + 0.5 * math.sin(t)))
    return {name: replace(now, weight_decay=0.0) if name == "bias" else now for name in SHAPES}


def train(ref: ZenFlowReference, base: GroupHyper, steps: int, start: int = 1) -> ZenFlowReference:
    for t in range(start, start + steps):
        ref.step(random_grads(t), hyper_at(t, base))
    return ref


def torch_trajectory(base: GroupHyper, steps: int, dtype: torch.dtype) -> dict[str, Tensor]:
    params = {n: p.requires_grad_() for n, p in random_params(dtype).items()}
    kind = torch.optim.AdamW if base.decoupled else torch.optim.Adam
    options = {"betas": (base.beta1, base.beta2), "eps": base.eps}
    optimizer = kind([{"params": [p]} for p in params.values()], **options)  # type: ignore[arg-type]
    for t in range(1, steps + 1):
        hyper, grads = hyper_at(t, base), random_grads(t)
        for group, (name, param) in zip(optimizer.param_groups, params.items(), strict=True):
            group["lr"], group["weight_decay"] = hyper[name].lr, hyper[name].weight_decay
            grad = grads[name]
            param.grad = None if grad is None else grad.to(dtype)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "config",
    [
        make_config(k=1.0, s=4, r=4),
        make_config(k=0.0, s=1, lag=0, r=1),
        make_config(k=0.1, s=1, lag=0, r=1),
        make_config(k=0.3, s=1, lag=0, r=1, w=3),
        make_config(k=0.3, s=4, r=4, w=30),
        make_config(k=0.3, s=4, r=4, w=100, scale=0.5),
    ],
    ids=["all_hot", "every_step_k0", "every_step_k.1", "every_step_k.3", "warmup", "warmup_scaled"],
)
def test_equals_torch_optimizer(
    config: ReferenceConfig, base: GroupHyper, dtype: torch.dtype
) -> None:
    reference = train(ZenFlowReference(random_params(), config, dtype=dtype), base, 30)
    expected = torch_trajectory(base, 30, dtype)
    masters = reference.masters()
    for name, value in expected.items():
        assert (reference.params[name] - value).abs().max() < 1e-6, name
        assert torch.equal(masters[name], reference.params[name]), name


class Scalar:
    """One parameter element under textbook Adam(W), in Python floats."""

    def __init__(self, value: float) -> None:
        self.value, self.m, self.v = value, 0.0, 0.0

    def adam(
        self, grad: float, count: int, lr: float, decay_lrs: Sequence[float], base: GroupHyper
    ) -> None:
        """One update; ``decay_lrs`` are the learning rates of the steps it carries."""
        if base.decoupled:
            for step_lr in decay_lrs:
                self.value *= 1 - step_lr * base.weight_decay
        else:
            grad += base.weight_decay * self.value
        self.m = base.beta1 * self.m + (1 - base.beta1) * grad
        self.v = base.beta2 * self.v + (1 - base.beta2) * grad**2
        m_hat, v_hat = self.m / (1 - base.beta1**count), self.v / (1 - base.beta2**count)
        self.value -= lr * m_hat / (math.sqrt(v_hat) + base.eps)

    def move(self, source: int, target: int, base: GroupHyper) -> None:
        self.m *= (1 - base.beta1**target) / (1 - base.beta1**source)
        self.v *= (1 - base.beta2**target) / (1 - base.beta2**source)


HAND_START = (0.5, -1.0, 2.0, 0.75)  # columns: demoted, promoted, always cold, always hot
HAND_GRADS = ((9.0, 1, -2, 20), (3.0, -1.5, 0.5, -20), (4.0, 2.5, 1, 15), (0.25, -7, 3, 18))
HAND_LR = (0.1, 0.2, 0.15, 0.05)


def hand_reference(base: GroupHyper, steps: int, scale: float = 1.0) -> ZenFlowReference:
    """S = L = R = 2: selections at steps 1 and 4, host updates submitted at steps 2 and 4."""
    start = {"w": torch.tensor([HAND_START])}
    reference = ZenFlowReference(start, make_config(k=0.5, scale=scale))
    hyper = replace(base)
    for grad, lr in zip(HAND_GRADS[:steps], HAND_LR, strict=False):
        hyper.lr = lr
        reference.step({"w": torch.tensor([grad])}, {"w": hyper})
        hyper.lr = 50.0  # a scheduler moves it after the step: nothing may read this value
    return reference


def hand_columns(base: GroupHyper, scale: float) -> list[Scalar]:
    """The four columns by hand after three steps and the first host update."""
    columns = [Scalar(x) for x in HAND_START]
    (g1, g2, g3, _), (a, b, c, _) = HAND_GRADS, HAND_LR
    for count, (grad, lr) in enumerate(((g1, a), (g2, b), (g3, c)), start=1):
        for j in (0, 3):
            columns[j].adam(grad[j], count, lr, [lr], base)
    for j in (1, 2):
        columns[j].adam((g1[j] + g2[j]) / 2, 1, b * scale, [a, b], base)
    return columns


def values(tensor: Tensor) -> list[float]:
    return [float(x) for x in tensor.flatten()]


@BOTH
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_hand_case_before_the_first_merge(base: GroupHyper, scale: float) -> None:
    columns = hand_columns(base, scale)
    reference = hand_reference(base, 3, scale)
    state = reference.matrices["w"]
    assert reference.hot_columns() == {"w": [0, 3]}
    newest = [x.value for x in columns]
    assert values(reference.masters()["w"]) == pytest.approx(newest, abs=1e-6)
    # Submitted at step 2 and due at step 4: the device still has the first cold values.
    stale = [columns[0].value, *HAND_START[1:3], columns[3].value]
    assert values(reference.params["w"]) == pytest.approx(stale, abs=1e-6)
    assert reference.counters() == {"w": Counters(hot_steps=3, host_updates=1, selections=1)}
    decay = 1 - HAND_LR[2] * ADAMW.weight_decay if base.decoupled else 1.0
    assert values(state.acc) == [0.0, 2.5, 1.0, 0.0]
    assert state.n.tolist() == [0, 1, 1, 0]
    assert values(state.decay) == pytest.approx([1.0, decay, decay, 1.0])


@BOTH
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_hand_case_with_promotion_and_demotion(base: GroupHyper, scale: float) -> None:
    col0, col1, col2, col3 = columns = hand_columns(base, scale)
    (_, _, g3, g4), (_, _, c, d) = HAND_GRADS, HAND_LR
    merged2 = col2.value
    # Step 4: three hot steps and one host update so far; columns 0 and 1 change places.
    col0.move(3, 1, base)
    col1.move(1, 3, base)
    col1.adam((g3[1] + g4[1]) / 2, 4, d, [c, d], base)
    demoted0 = col0.value
    col0.adam(g4[0], 2, d * scale, [d], base)
    col3.adam(g4[3], 4, d, [d], base)
    col2.adam((g3[2] + g4[2]) / 2, 2, d * scale, [c, d], base)

    reference = hand_reference(base, 4, scale)
    state = reference.matrices["w"]
    assert reference.hot_columns() == {"w": [1, 3]}
    assert values(state.master) == pytest.approx([x.value for x in columns], abs=1e-12)
    assert values(state.m) == pytest.approx([x.m for x in columns], abs=1e-12)
    assert values(state.v) == pytest.approx([x.v for x in columns], abs=1e-12)
    device = [demoted0, col1.value, merged2, col3.value]
    assert values(reference.params["w"]) == pytest.approx(device, abs=1e-6)
    assert reference.counters() == {"w": Counters(hot_steps=4, host_updates=2, selections=2)}


@BOTH
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_flush_updates_the_partial_window(base: GroupHyper, scale: float) -> None:
    columns = hand_columns(base, scale)
    for j in (1, 2):
        columns[j].adam(HAND_GRADS[2][j], 2, HAND_LR[2] * scale, [HAND_LR[2]], base)
    reference = hand_reference(base, 3, scale)
    for _ in range(2):  # the second one finds nothing to do
        reference.flush()
        expected = pytest.approx([x.value for x in columns], abs=1e-6)
        assert values(reference.params["w"]) == expected
        assert reference.counters()["w"] == Counters(hot_steps=3, host_updates=2, selections=1)


def test_no_rescaling_before_the_first_host_update() -> None:
    """Two hot steps and no host update: the demoted column keeps its moments as they are."""
    reference = ZenFlowReference({"w": torch.zeros(1, 2)}, make_config(k=0.5, s=3, r=2))
    for grad in ([5.0, 1.0], [5.0, 1.0], [1.0, 6.0]):
        reference.step({"w": torch.tensor([grad])}, {"w": ADAMW})
    demoted, promoted = Scalar(0.0), Scalar(0.0)
    for count in (1, 2):
        demoted.adam(5.0, count, ADAMW.lr, [ADAMW.lr], ADAMW)
    demoted.adam(1.0, 1, ADAMW.lr, [ADAMW.lr], ADAMW)
    promoted.adam(8.0 / 3, 3, ADAMW.lr, [ADAMW.lr] * 3, ADAMW)
    expected = pytest.approx([demoted.value, promoted.value], abs=1e-12)
    assert values(reference.matrices["w"].master) == expected


def submit_steps(reference: ZenFlowReference, name: str) -> list[int]:
    return sorted({use.applied_step for use in reference.usage[name] if use.side == "host"})


@pytest.mark.parametrize(
    ("w", "phase", "expected"),
    [(0, 0, [3, 6, 9]), (2, 0, [1, 2, 5, 8]), (2, 1, [1, 2, 4, 7, 10]), (0, 2, [1, 4, 7, 10])],
)
def test_boundaries(w: int, phase: int, expected: list[int]) -> None:
    phases = dict.fromkeys(MATRICES, phase)
    reference = ZenFlowReference(random_params(), make_config(k=0.0, s=3, r=3, w=w), phases)
    train(reference, ADAMW, 10)
    assert submit_steps(reference, "linear") == expected
    assert submit_steps(reference, "bias") == []


@pytest.mark.parametrize(("lag", "merged_at"), [(0, 3), (1, 4), (2, 5), (3, 6)])
def test_merge_happens_lag_steps_after_the_boundary(lag: int, merged_at: int) -> None:
    reference = ZenFlowReference({"w": torch.ones(2, 2)}, make_config(k=0.0, s=3, lag=lag, r=3))
    changed = []
    for t in range(1, 7):
        before = reference.params["w"].clone()
        reference.step({"w": torch.ones(2, 2)}, {"w": ADAMW})
        if not torch.equal(before, reference.params["w"]):
            changed.append(t)
    assert changed == ([3, 6] if lag == 0 else [merged_at])


def test_missing_gradient_delays_merge_and_leaves_the_boundary_out() -> None:
    reference = ZenFlowReference({"w": torch.ones(1, 2)}, make_config(k=0.0, s=2, lag=1, r=2))
    one: dict[str, Tensor | None] = {"w": torch.ones(1, 2)}
    for _ in range(2):
        reference.step(one, {"w": ADAMW})
    for _ in range(2):  # step 3 is the merge's step, step 4 a boundary: neither happens
        reference.step({"w": None}, {"w": ADAMW})
    assert torch.equal(reference.params["w"], torch.ones(1, 2))
    reference.step(one, {"w": ADAMW})
    assert bool((reference.params["w"] < 1).all())
    reference.step(one, {"w": ADAMW})
    assert submit_steps(reference, "w") == [2, 6]
    assert reference.counters()["w"] == Counters(hot_steps=4, host_updates=2, selections=0)


@pytest.mark.parametrize(
    ("r", "missing", "expected"),
    [(2, (), [1, 4, 6, 8, 10]), (5, (), [1, 6]), (2, (1, 4), [2, 6, 8, 10]), (1, (), None)],
)
def test_selection_steps(r: int, missing: tuple[int, ...], expected: list[int] | None) -> None:
    reference = ZenFlowReference({"w": torch.ones(3, 4)}, make_config(k=0.5, s=2, r=r))
    selected = []
    for t in range(1, 11):
        count = reference.counters()["w"].selections
        grad = None if t in missing else torch.ones(3, 4)
        reference.step({"w": grad}, {"w": ADAMW})
        if reference.counters()["w"].selections > count:
            selected.append(t)
    assert selected == (expected or [1, 2, 4, 6, 8, 10])


def test_selection_takes_the_largest_norms_and_breaks_ties_downwards() -> None:
    grad = torch.tensor([[2.0, -3.0, 2.0, 3.0, 2.0, 0.0], [2.0, 0.0, 2.0, 0.0, -2.0, 3.0]])
    for k, expected in ((0.2, [1]), (0.34, [1, 3]), (0.5, [1, 3, 5]), (0.67, [0, 1, 3, 5])):
        reference = ZenFlowReference({"w": torch.zeros(2, 6)}, make_config(k=k))
        reference.step({"w": grad}, {"w": ADAMW})
        assert reference.hot_columns()["w"] == expected


@pytest.mark.parametrize(
    ("k", "cols", "expected"),
    [(0, 5, 0), (1, 5, 5), (0.01, 3, 1), (0.3, 5, 2), (0.1, 24, 2), (0.1, 25, 3), (0.3, 1, 1)],
)
def test_number_of_hot_columns(k: float, cols: int, expected: int) -> None:
    reference = ZenFlowReference({"w": torch.zeros(2, cols)}, make_config(k=k))
    reference.step({"w": torch.ones(2, cols)}, {"w": ADAMW})
    assert reference.hot_columns() == {"w": list(range(expected))}
    assert reference.counters()["w"].selections == int(0 < expected < cols)


def test_small_and_one_dimensional_parameters_are_dense_hot() -> None:
    config = replace(make_config(k=0.3, s=4, r=4), min_offload_numel=44)
    reference = train(ZenFlowReference(random_params(), config), ADAMW, 6)
    offloaded = {name for name, c in reference.counters().items() if c.host_updates > 0}
    assert offloaded == {"embedding", "conv"}
    assert reference.hot_columns()["linear"] == list(range(7))


def test_flush_leaves_the_window_grid_alone_and_nothing_pending() -> None:
    reference = ZenFlowReference(random_params(), make_config(k=0.3, s=4, r=4))
    reference.flush()
    assert all(counters == Counters() for counters in reference.counters().values())
    train(reference, ADAMW, 5).flush()
    masters = reference.masters()
    for name, state in reference.matrices.items():
        assert torch.equal(reference.params[name], masters[name])
        assert int(state.n.sum()) == 0
        assert not state.pending
        assert state.submitted is None
    train(reference, ADAMW, 7, start=6)
    assert submit_steps(reference, "linear") == [4, 5, 8, 12]


# k, S, L, R, W
SETTINGS = [(0.3, 2, 2, 2, 0), (0.3, 3, 1, 3, 2), (0.1, 4, 4, 9, 4)]
SETTINGS += [(0.5, 3, 0, 3, 5), (0.0, 4, 2, 4, 0), (0.5, 1, 1, 1, 0)]
GRID = [make_config(k=k, s=s, lag=lag, r=r, w=w) for k, s, lag, r, w in SETTINGS]


@pytest.mark.parametrize("config", GRID)
def test_every_gradient_enters_exactly_one_update(config: ReferenceConfig) -> None:
    phases = {name: i % config.update_interval for i, name in enumerate(MATRICES)}
    reference = train(ZenFlowReference(random_params(), config, phases), ADAMW, 23)
    reference.flush()
    for name, state in reference.matrices.items():
        seen: dict[tuple[int, int], int] = defaultdict(int)
        total: dict[tuple[str, int, int], float] = defaultdict(float)
        for use in reference.usage[name]:
            for column, weight in zip(use.columns, use.weights, strict=True):
                seen[use.grad_step, column] += 1
                total[use.side, use.update, column] += weight
        present = [t for t in range(1, 24) if random_grads(t)[name] is not None]
        expected = {(t, j): 1 for t in present for j in range(state.hot.numel())}
        assert seen == expected
        assert all(weight == pytest.approx(1.0) for weight in total.values())


@pytest.mark.parametrize("config", GRID)
def test_ledger_says_what_the_arithmetic_did(config: ReferenceConfig) -> None:
    """Without momentum, m is the gradient of a column's latest update: compare with the ledger."""
    base = replace(ADAMW, beta1=0.0)
    reference = ZenFlowReference(random_params(), config)
    expected = {name: torch.zeros_like(s.m) for name, s in reference.matrices.items()}
    for t in range(1, 19):
        read = {name: len(uses) for name, uses in reference.usage.items()}
        train(reference, base, 1, start=t) if t < 18 else reference.flush()
        for name, state in reference.matrices.items():
            fresh = reference.usage[name][read[name] :]
            for use in fresh:
                expected[name][:, list(use.columns)] = 0.0
            for use in fresh:
                grad, columns = random_grads(use.grad_step)[name], list(use.columns)
                assert grad is not None
                weight = torch.tensor(use.weights, dtype=torch.float64)
                expected[name][:, columns] += grad.reshape(state.m.shape)[:, columns] * weight
            assert torch.allclose(state.m, expected[name], rtol=0, atol=1e-12), name


def test_fp32_arithmetic_follows_fp64() -> None:
    exact, single = (
        train(ZenFlowReference(random_params(), GRID[0], dtype=dtype), ADAMW, 30)
        for dtype in (torch.float64, torch.float32)
    )
    assert exact.hot_columns() == single.hot_columns()
    for name, master in exact.masters().items():
        # Elements of size 2 to 4 round by up to 2.4e-7 at each of the 30 steps.
        assert (single.masters()[name] - master).abs().max() < 3e-6


def test_inputs_and_outputs_are_not_aliased() -> None:
    params = random_params()
    reference = ZenFlowReference(params, make_config(), dtype=torch.float32)
    masters = reference.masters()
    train(reference, ADAMW, 5)
    for name, start in random_params().items():
        assert torch.equal(params[name], start)
        assert torch.equal(masters[name], start)


def test_wrong_settings_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="update_lag=3"):
        make_config(s=2, lag=3)
    for phases in ({"linear": 2}, {"linear": -1}, {"nowhere": 0}):
        with pytest.raises(ValueError, match=r"linear|nowhere"):
            ZenFlowReference(random_params(), make_config(s=2), phases)
    with pytest.raises(ValueError, match="typo"):
        ZenFlowReference(random_params(), make_config()).step({"typo": torch.ones(1)}, {})
