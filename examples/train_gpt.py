"""Train a small byte-level GPT on the standard library's source text, and say where time went.

``python examples/train_gpt.py`` takes about 3 minutes on 2 cores; ``--strategy ddp`` runs the same
job with plain AdamW.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
from gpt import GPTModule
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from text import TextData, unigram_entropy

from lightning_zenflow import ZenFlowProgressBar, ZenFlowStrategy

Rows = list[tuple[str, str]]
Precision = Literal["32-true", "bf16-true", "bf16-mixed"]


@dataclass(frozen=True)
class Options:
    """The command line, typed."""

    strategy: str
    steps: int
    batch_size: int
    block_size: int
    layers: int
    width: int
    val_windows: int
    lr: float
    seed: int
    precision: Precision
    accelerator: str
    devices: int
    topk_ratio: float
    update_interval: int
    update_lag: int | None
    warmup_steps: int
    schedule: Literal["auto", "window", "staggered"]
    cold_rule: Literal["replay", "mean"]
    log_dir: Path


def parse(argv: Sequence[str] | None) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's own source text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", choices=("zenflow", "ddp", "auto"), default="zenflow")
    add("--steps", type=int, default=900, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="windows in a batch")
    add("--block-size", type=int, default=128, help="bytes in a window")
    add("--layers", type=int, default=4, help="transformer layers")
    add("--width", type=int, default=256, help="channels")
    add("--val-windows", type=int, default=256, help="windows in a validation")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="of weights and training windows")
    add("--precision", choices=("32-true", "bf16-true", "bf16-mixed"), default="32-true")
    add("--accelerator", default="auto", help="as the Trainer's")
    add("--devices", type=int, default=1, help="ranks")
    add("--log-dir", type=Path, default=Path("runs"), help="where the CSV log goes")
    zenflow = parser.add_argument_group("zenflow only").add_argument
    zenflow("--topk-ratio", type=float, default=0.1, help="share of hot columns")
    zenflow("--update-interval", type=int, default=4, help="steps in a window of the cold columns")
    zenflow(
        "--update-lag", type=int, default=None, help="steps to the merge; None: as the rule has it"
    )
    zenflow("--warmup-steps", type=int, default=0, help="first steps, synchronous as plain AdamW")
    zenflow("--schedule", choices=("auto", "window", "staggered"), default="auto")
    zenflow("--cold-rule", choices=("replay", "mean"), default="replay", help="mean is the paper's")
    return Options(**vars(parser.parse_args(argv)))


def build_trainer(options: Options) -> pl.Trainer:
    """Build the Trainer: the one place that knows which strategy trains."""
    strategy: ZenFlowStrategy | str = options.strategy
    progress = RichProgressBar()
    if options.strategy == "zenflow":
        strategy = ZenFlowStrategy(
            topk_ratio=options.topk_ratio,
            update_interval=options.update_interval,
            update_lag=options.update_lag,
            warmup_steps=options.warmup_steps,
            schedule=options.schedule,
            cold_rule=options.cold_rule,
        )
        progress = ZenFlowProgressBar()
    return pl.Trainer(
        strategy=strategy,
        callbacks=[progress],
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        # Three times on the way; after the last step the flushed weights are validated instead.
        val_check_interval=options.steps // 4 + 1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=CSVLogger(options.log_dir),
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def strategy_rows(strategy: object) -> Rows:
    """Where the optimizer's time and memory went; nothing for other strategies than ZenFlow."""
    if not isinstance(strategy, ZenFlowStrategy):
        return []
    summary, memory = strategy.ledger.summary(), strategy.host_memory
    wall = summary.wall_seconds
    rows = [("training steps", f"{wall:.1f} s, {1e3 * wall / max(1, summary.steps):.1f} ms each")]
    for cause, seconds in summary.stall_seconds.items():
        rows.append((f"stall: {cause}", f"{seconds:.3f} s ({_percent(seconds, wall)})"))
    total = sum(summary.stall_seconds.values())
    hidden = summary.hidden_share
    return [
        *rows,
        ("stall: total", f"{total:.3f} s ({_percent(total, wall)})"),
        ("host work", f"{summary.host_busy_seconds:.1f} s, {summary.updates} matrix updates"),
        ("hidden share of it", "no host work" if math.isnan(hidden) else f"{hidden:.1%}"),
        ("hot parameters", f"{memory.hot_parameters:,}"),
        ("cold parameters", f"{memory.cold_parameters:,}"),
        ("host bytes a cold parameter", f"{memory.bytes_per_cold_parameter:.2f}"),
        ("host bytes in total", f"{memory.total_bytes:,}"),
    ]


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.2%} of training" if whole > 0.0 else "no steps"


def result_table(title: str, rows: Rows) -> Table:
    """The closing table."""
    table = Table(title=title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def train(options: Options) -> tuple[pl.Trainer, Rows]:
    """Train, then validate the final weights. Returns the trainer and the first rows of the table."""
    # Cutting a batch out of memory takes microseconds: loader processes would only cost.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    pl.seed_everything(options.seed, verbose=False)
    data = TextData(
        block_size=options.block_size,
        batch_size=options.batch_size,
        val_windows=options.val_windows,
        seed=options.seed,
    )
    module = GPTModule(
        layers=options.layers, width=options.width, block_size=options.block_size, lr=options.lr
    )
    trainer = build_trainer(options)
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds, steps = time.perf_counter() - started, trainer.global_step
    trainer.validate(module, data, verbose=False)
    return trainer, [
        ("validation loss", f"{trainer.callback_metrics['val_loss']:.4f} nats a byte"),
        ("unigram entropy", f"{unigram_entropy(data.text):.4f} nats a byte"),
        ("optimizer steps", f"{steps:,}"),
        ("wall time of fit", f"{seconds:.1f} s"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says, and print the table."""
    options = parse(argv)
    trainer, rows = train(options)
    if trainer.is_global_zero:
        rows += strategy_rows(trainer.strategy)
        Console().print(result_table(f"Byte-level GPT, strategy {options.strategy}", rows))


if __name__ == "__main__":
    main()
