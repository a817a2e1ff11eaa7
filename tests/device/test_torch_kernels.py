"""Each of the torch kernels against a loop over the elements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device import Columns, EagerStep, HotState
from lightning_zenflow.device.torch_kernels import TorchKernels

KERNELS = TorchKernels()
DTYPES = (torch.float32, torch.bfloat16)
# rows, cols, columns: unordered as slots are after a migration, with neighbours and both ends
SHAPES = {
    "wide": (3, 7, [6, 0, 3, 2]),
    "tall": (9, 4, [2, 1]),
    "one column": (5, 1, [0]),
    "one row": (1, 6, [5, 1]),
    "all": (4, 3, [2, 0, 1]),
    "none": (4, 3, []),
}

every_case = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("shape", SHAPES),
]


def cases(test):  # type: ignore[no-untyped-def]
    for mark in every_case:
        test = mark(test)
    return test


def draw(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some(columns: list[int], cols: int) -> tuple[Columns, Columns]:
    """``columns`` as the hot ones, and as the cold ones; all others are on the other side."""
    these = torch.tensor(columns, dtype=torch.int64)
    others = torch.tensor([j for j in range(cols) if j not in columns], dtype=torch.int64)
    return Columns.of(these, others), Columns.of(others, these)


def column_scores(grad: Tensor) -> Tensor:
    out = torch.full((grad.shape[1],), torch.nan)
    KERNELS.column_scores(grad, out)
    return out


def split_hot(grad: Tensor, columns: list[int]) -> Tensor:
    out = torch.full((grad.shape[0], len(columns)), torch.nan)
    KERNELS.split_hot(grad, some(columns, grad.shape[1])[0], out)
    return out


def split_cold(grad: Tensor, columns: list[int], out: Tensor) -> None:
    """In two pieces where there is more than one row."""
    cold, rows = some(columns, grad.shape[1])[1], grad.shape[0]
    for start, stop in ((0, rows // 2), (rows // 2, rows)):
        KERNELS.split_cold(grad, cold, start, stop, out[start:stop])


@cases
def test_column_scores(shape: str, dtype: torch.dtype) -> None:
    rows, cols, _ = SHAPES[shape]
    grad = draw(rows, cols, dtype)
    scores = column_scores(grad)
    assert scores.dtype == torch.float32
    assert scores.shape == (cols,)
    for j in range(cols):
        expected = sum(float(grad[i, j]) ** 2 for i in range(rows))
        assert float(scores[j]) == pytest.approx(expected, rel=1e-6)


def test_column_scores_of_16_bit_gradients_are_summed_in_fp32() -> None:
    # In bf16 the sum would stop growing at 256, and in fp16 the squares would be infinite.
    assert column_scores(torch.ones(1000, 2, dtype=torch.bfloat16)).tolist() == [1e3, 1e3]
    assert column_scores(torch.full((2, 1), 1e3, dtype=torch.float16)).tolist() == [2e6]


@cases
def test_split_hot(shape: str, dtype: torch.dtype) -> None:
    rows, cols, columns = SHAPES[shape]
    grad = draw(rows, cols, dtype)
    hot = split_hot(grad, columns)
    assert hot.dtype == torch.float32
    assert hot.shape == (rows, len(columns))
    for i in range(rows):
        for slot, j in enumerate(columns):
            assert float(hot[i, slot]) == float(grad[i, j])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_hot_is_a_copy(dtype: torch.dtype) -> None:
    grad = draw(3, 4, dtype)
    before = grad.clone()
    split_hot(grad, [0, 1, 2, 3]).zero_()
    assert torch.equal(grad, before)


@cases
def test_split_cold(shape: str, dtype: torch.dtype) -> None:
    rows, cols, columns = SHAPES[shape]
    grad = draw(rows, cols, dtype)
    staging = torch.full((rows, len(columns)), 7.0, dtype=dtype)
    address = staging.data_ptr()
    split_cold(grad, columns, staging)
    assert staging.data_ptr() == address, "the staging lies in the arena and must stay there"
    for i in range(rows):
        for slot, j in enumerate(columns):
            assert float(staging[i, slot]) == float(grad[i, j])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_need_not_be_contiguous(dtype: torch.dtype) -> None:
    grad = draw(5, 3, dtype).t()
    plain, columns = grad.contiguous(), [4, 0]
    staging, expected = torch.empty(3, 2, dtype=dtype), torch.empty(3, 2, dtype=dtype)
    split_cold(grad, columns, staging)
    split_cold(plain, columns, expected)
    assert torch.equal(staging, expected)
    assert torch.equal(split_hot(grad, columns), split_hot(plain, columns))
    torch.testing.assert_close(column_scores(grad), column_scores(plain))


@cases
def test_merge(shape: str, dtype: torch.dtype) -> None:
    rows, cols, columns = SHAPES[shape]
    param, values = draw(rows, cols, dtype), draw(rows, len(columns), dtype, seed=1)
    expected = [[float(x) for x in row] for row in param]
    for i in range(rows):
        for slot, j in enumerate(columns):
            expected[i][j] = float(values[i, slot])
    cold = some(columns, cols)[1]
    for start, stop in ((0, rows // 2), (rows // 2, rows)):
        KERNELS.merge(param, cold, start, stop, values[start:stop])
    assert param.tolist() == expected


HYPERS = {
    "AdamW": AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True),
    "Adam": AdamHyper(1e-2, 0.8, 0.95, 1e-6, 0.1, False),
}


def naive_adam(
    weight: float, grad: float, m: float, v: float, step: int, h: AdamHyper, decay: float
) -> tuple[float, float, float]:
    """One element's update, in Python floats."""
    weight *= decay
    if not h.decoupled:
        grad += h.weight_decay * weight
    m = h.beta1 * m + (1 - h.beta1) * grad
    v = h.beta2 * v + (1 - h.beta2) * grad * grad
    m_hat, v_hat = m / (1 - h.beta1**step), v / (1 - h.beta2**step)
    return weight - h.lr * m_hat / (math.sqrt(v_hat) + h.eps), m, v


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("hyper", HYPERS)
@cases
def test_adamw(shape: str, dtype: torch.dtype, hyper: str, per_column: bool, scaled: bool) -> None:
    rows, cols, columns = SHAPES[shape]
    h, n_hot = HYPERS[hyper], len(columns)
    param = draw(rows, cols, dtype)
    master = None if dtype == torch.float32 else draw(rows, n_hot, torch.float32, seed=1)
    state = HotState(
        master=master,
        exp_avg=draw(rows, n_hot, torch.float32, seed=2),
        exp_avg_sq=draw(rows, n_hot, torch.float32, seed=3).square(),
    )
    grad = draw(rows, n_hot, torch.float32, seed=4)
    decay = torch.linspace(0.5, 0.9, n_hot) if per_column else 0.75
    scale = torch.tensor([0.37]) if scaled else None

    expected = param.to(torch.float64).clone()
    moments = torch.zeros(2, rows, n_hot, dtype=torch.float64)
    for i in range(rows):
        for slot, j in enumerate(columns):
            weight, moments[0, i, slot], moments[1, i, slot] = naive_adam(
                float(param[i, j] if master is None else master[i, slot]),
                float(grad[i, slot]) * (0.37 if scaled else 1.0),
                float(state.exp_avg[i, slot]),
                float(state.exp_avg_sq[i, slot]),
                3,
                h,
                float(decay[slot]) if isinstance(decay, Tensor) else decay,
            )
            expected[i, j] = weight

    untouched = [j for j in range(cols) if j not in columns]
    before, grad_before = param.clone(), grad.clone()
    KERNELS.adamw(param, some(columns, cols)[0], state, grad, scale, 3, h, decay)

    close = {"rtol": 2e-6, "atol": 2e-6, "check_dtype": False}
    torch.testing.assert_close(state.exp_avg, moments[0], **close)
    torch.testing.assert_close(state.exp_avg_sq, moments[1], **close)
    weights = param[:, columns] if state.master is None else state.master
    torch.testing.assert_close(weights, expected[:, columns], **close)
    assert torch.equal(param[:, columns], weights.to(dtype)), "the weight is its master's rounding"
    assert torch.equal(param[:, untouched], before[:, untouched])
    assert scaled or torch.equal(grad, grad_before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squared_norm(dtype: torch.dtype) -> None:
    data = draw(7, 5, dtype)
    out = torch.empty(1)
    KERNELS.squared_norm(data, out)
    assert float(out) == pytest.approx(sum(float(x) ** 2 for x in data.flatten()), rel=1e-6)


def test_squared_norm_of_16_bit_data_is_summed_in_fp32() -> None:
    out = torch.empty(1)
    KERNELS.squared_norm(torch.full((1000,), 1e3, dtype=torch.float16), out)
    assert float(out) == pytest.approx(1e9, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 5), (40, 33)])
def test_mean_squares_are_the_moving_average_of_adamws_second_moment(
    dtype: torch.dtype, rows: int, cols: int
) -> None:
    gen = torch.Generator().manual_seed(4)
    found, expected = torch.zeros(cols), torch.zeros(cols, dtype=torch.float64)
    for _ in range(5):
        grad = torch.randn(rows, cols, generator=gen).to(dtype)
        TorchKernels().track_squares(grad, found, 0.98)
        expected = 0.98 * expected + 0.02 * grad.double().square().mean(dim=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hot", [[], [1], [0, 3, 4]])
def test_the_eager_step_moves_cold_columns_by_the_formula(
    dtype: torch.dtype, hot: list[int]
) -> None:
    gen = torch.Generator().manual_seed(5)
    rows, cols = 9, 5
    param = torch.randn(rows, cols, generator=gen).to(dtype)
    grad = torch.randn(rows, cols, generator=gen).to(dtype)
    grad[2, 2] = 50.0  # beyond the limit
    grad[:, 1] = 0.0  # with a mean square of zero: nothing moves, and eps keeps it finite
    mean_squares = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.1])
    cold = [j for j in range(cols) if j not in hot]
    step = EagerStep(size=0.01, correction=0.5, eps=1e-8, limit=10.0)
    scale = (mean_squares.double() / 0.5).sqrt() + 1e-8
    moved = 0.01 * (grad.double() / scale).clamp(-10.0, 10.0)
    expected = param.double() - moved
    expected[:, hot] = param[:, hot].double()
    before = param.clone()
    columns = Columns.of(torch.tensor(hot, dtype=torch.int64), torch.tensor(cold))
    TorchKernels().preview(param, columns, grad, mean_squares, step)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(param.double(), expected, rtol=tolerance, atol=1e-7)
    assert torch.equal(param[:, hot], before[:, hot])
    assert param[2, 2].item() == pytest.approx(
        before[2, 2].item() - (0.1 if 2 in cold else 0.0), rel=1e-2
    )
