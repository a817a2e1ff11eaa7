"""Running scripts as a user would: in a process of their own, from a directory of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

# A module that the scripts below train. It knows nothing of ZenFlow.
TINY = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batches=12):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(4 * batches, 8, generator=gen)
    return DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=4)


SILENT = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, max_epochs=1,
)
"""

RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_python(
    source: str, cwd: Path, *, timeout: float = 120.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Write ``source`` into ``cwd`` beside ``tiny.py`` and run it with this interpreter."""
    (cwd / "tiny.py").write_text(TINY)
    script = cwd / "script.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=cwd,
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def clean_environment(**env: str) -> dict[str, str]:
    """This process's variables without those of a rank, and ``env`` on top."""
    return {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES} | env


def output(result: subprocess.CompletedProcess[str]) -> str:
    """The script's standard output; fails with all it said if the script failed."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
