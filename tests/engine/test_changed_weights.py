"""Weights that someone else writes during training: taken over where possible, else warned about."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tests.support import make_engine, of_each_rule, set_grads

rule = of_each_rule(__name__)


def test_a_changed_matrix_is_warned_about_by_name() -> None:
    param = nn.Parameter(torch.randn(6, 8))
    with make_engine(AdamW([param]), topk_ratio=0.3, names={param: "layer.weight"}) as engine:
        set_grads([param], 1)
        engine.step()
        with torch.no_grad():
            param.clamp_(-0.1, 0.1)
        with pytest.warns(UserWarning, match=r"layer\.weight was changed in place.*reload_masters"):
            engine.step()


def test_reload_masters_keeps_the_change() -> None:
    param = nn.Parameter(torch.randn(6, 8))
    with make_engine(AdamW([param], lr=1e-4), topk_ratio=0.3) as engine:
        for step in range(1, 7):
            set_grads([param], step)
            engine.step()
        with torch.no_grad():
            param.fill_(0.5)
        engine.reload_masters()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(7, 20):
                set_grads([param], step)
                engine.step()
            engine.flush()
        assert float((param - 0.5).abs().max()) < 20 * 2e-4


@pytest.mark.parametrize("lag", [0, 2, 4])
def test_our_own_changes_are_not_taken_for_someone_elses(lag: int) -> None:
    params = [nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(5))]
    with (
        make_engine(AdamW(params), topk_ratio=0.3, update_lag=lag, warmup_steps=3) as engine,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for step in range(1, 20):
            set_grads(params, step)
            engine.step()
            if step % 7 == 0:
                engine.flush()
                engine.load_state_dict(engine.state_dict())


def test_a_changed_bf16_vector_keeps_its_change_and_its_neighbours_masters() -> None:
    param = nn.Parameter(torch.randn(5).bfloat16())
    with make_engine(AdamW([param], lr=1e-6, weight_decay=0.0)) as engine:
        set_grads([param], 1)
        engine.step()
        master = engine.dense.state(param).master
        assert master is not None
        before = master.clone()
        assert not torch.equal(before, before.bfloat16().float()), (
            "the masters hold no more than bf16"
        )
        with torch.no_grad():
            param[2] = 3.0
        set_grads([param], 2)
        engine.step()
        expected = before.clone()
        expected[2] = 3.0
        assert float((master - expected).abs().max()) < 1e-5
        assert float(param[2]) == 3.0
