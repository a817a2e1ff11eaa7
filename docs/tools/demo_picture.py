"""Draws docs/assets/demo.svg: the demo's progress bar while it trains, and its closing table.

python docs/tools/demo_picture.py [options of examples/train_gpt.py]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_gpt

from lightning_zenflow import ZenFlowProgressBar

PICTURE = Path(__file__).resolve().parents[1] / "assets" / "demo.svg"
console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)


class RecordingBar(ZenFlowProgressBar):
    """Keeps what the terminal shows at two thirds of the run."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if trainer.global_step == trainer.max_steps * 2 // 3 and self.progress is not None:
            self.progress.refresh()
            console.print(self.progress.get_renderable())


def main() -> None:
    train_gpt.ZenFlowProgressBar = RecordingBar  # type: ignore[misc]
    options = train_gpt.parse(sys.argv[1:])
    trainer, rows = train_gpt.train(options)
    console.print(
        train_gpt.result_table(
            "Byte-level GPT, strategy zenflow", rows + train_gpt.strategy_rows(trainer.strategy)
        )
    )
    PICTURE.parent.mkdir(exist_ok=True)
    console.save_svg(str(PICTURE), title="make demo")


if __name__ == "__main__":
    main()
