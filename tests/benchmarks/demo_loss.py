"""Final validation loss of a shortened demo, over seeds, for fp32 and bf16-true, ddp and zenflow.

    python tests/benchmarks/demo_loss.py [--steps 300] [--seeds 4]

The question: does `bf16-true` (bf16 weights, our fp32 masters) end where fp32 ends, within the noise of
the seed? `ddp` with `bf16-true`, plain AdamW on bf16 weights, is there for comparison.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import parse, train

RUNS = (("ddp", "32-true"), ("zenflow", "32-true"), ("zenflow", "bf16-true"), ("ddp", "bf16-true"))
SMALL = ["--layers", "2", "--width", "128", "--block-size", "64", "--log-dir", "/tmp/zenflow-runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(f"{args.steps} steps, seeds 0..{args.seeds - 1}: validation loss in nats a byte")
    for strategy, precision in RUNS:
        losses = []
        for seed in range(args.seeds):
            options = ["--strategy", strategy, "--precision", precision, "--seed", str(seed)]
            trainer, _ = train(parse([*SMALL, "--steps", str(args.steps), *options]))
            losses.append(float(trainer.callback_metrics["val_loss"]))
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        print(
            f"{strategy:8} {precision:10} mean {statistics.mean(losses):.4f} sd {spread:.4f}  "
            + " ".join(f"{loss:.4f}" for loss in losses),
            flush=True,
        )


if __name__ == "__main__":
    main()
