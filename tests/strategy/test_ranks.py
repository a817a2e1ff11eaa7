"""Two ranks on this machine: equal to DDP where ZenFlow is AdamW, and equal to each other always."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from tests.scripts import output, run_python

TRAIN = """
import lightning_zenflow
from tiny import *


class Branches(Tiny):
    # One layer is used in even steps only.
    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x) + (self.extra(x) if batch_idx % 2 else 0.0)
        return torch.nn.functional.mse_loss(out, y)


class Keep(pl.Callback):
    def on_train_end(self, trainer, module):
        torch.save(module.state_dict(), f"{NAME}-{trainer.global_rank}.pt")


def main(strategy, module, **trainer):
    pl.Trainer(
        strategy=strategy, devices=2, callbacks=[Keep()], **{**SILENT, **trainer}
    ).fit(module, data(24))
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def train(tmp_path: Path, name: str, call: str) -> list[dict[str, torch.Tensor]]:
    """Both ranks' weights after ``main({call})``."""
    source = f"NAME = {name!r}\n{TRAIN}\nif __name__ == '__main__':\n    main({call})\n"
    output(run_python(source, tmp_path, MASTER_PORT=free_port()))
    return [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[key] - right[key]).abs().max()) for key in right)


def zenflow(**settings: object) -> str:
    """Source text of a strategy that offloads every matrix."""
    given = {"min_offload_numel": 0, "num_workers": 1, "topk_ratio": 0.3, **settings}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"lightning_zenflow.ZenFlowStrategy({arguments})"


EXACT = {"update_interval": 1, "update_lag": 0, "select_interval": 1}


RUN = "Tiny(), accumulate_grad_batches=5, gradient_clip_val=0.1"


@pytest.fixture(scope="module")
def plain_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that DDP with AdamW ends with."""
    return train(tmp_path_factory.mktemp("ddp"), "ddp", f"'ddp', {RUN}")[0]


@pytest.mark.parametrize("start", ["popen", "spawn", "fork"])
def test_equal_to_ddp_with_clipping_and_accumulation(
    tmp_path: Path, start: str, plain_ddp: dict[str, torch.Tensor]
) -> None:
    ours = train(tmp_path, "zenflow", f"{zenflow(start_method=start, **EXACT)}, {RUN}")
    assert distance(ours[0], plain_ddp) <= 2e-6
    assert distance(ours[0], ours[1]) == 0.0


def test_windows_keep_the_ranks_equal_to_the_bit(tmp_path: Path) -> None:
    ours = train(tmp_path, "zenflow", f"{zenflow(schedule='staggered', select_interval=3)}, Tiny()")
    assert distance(ours[0], ours[1]) == 0.0


def test_unused_parameters_behave_as_under_ddp(tmp_path: Path) -> None:
    theirs = train(tmp_path, "ddp", "'ddp_find_unused_parameters_true', Branches()")
    strategy = zenflow(find_unused_parameters=True, **EXACT)
    ours = train(tmp_path, "zenflow", f"{strategy}, Branches()")
    assert distance(ours[0], theirs[0]) <= 2e-6
