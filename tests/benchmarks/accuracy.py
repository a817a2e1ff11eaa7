"""Validation loss of both rules against AdamW, over S, k and the halves of the preview, from scratch and fine-tuning.

    python tests/benchmarks/accuracy.py [--steps 300] [--seeds 3] [--out accuracy.json]

A byte-level GPT (2 layers, 128 channels). *scratch* trains it on the standard library's Python source;
*tune* starts from a model that AdamW has trained on that text for 1500 steps, and goes on with another
text, Python's C headers. Every rule gets the same weights, batches and learning rates as AdamW with the
same seed, so the ratio to AdamW's own loss is taken seed by seed. Losses are read after a flush: they are
the masters', what a checkpoint at the end of an epoch holds.

Results are kept in ``--out`` as they come: a run that was cut goes on where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, WarmupCosine
from text import FixedWindows, RandomWindows, Text, read_text

from lightning_zenflow import ZenFlowConfig, ZenFlowEngine
from lightning_zenflow.engine.replay import ReplayHalf

BATCH, LENGTH = 8, 64
PRETRAIN_STEPS, PRETRAIN_SEED = 1500, 99
LEARNING_RATE = {"scratch": 1e-3, "tune": 5e-4}
TASKS = ("tune", "scratch")


@dataclass(frozen=True)
class Rule:
    """One row of the table; ``settings`` None is AdamW itself."""

    name: str
    settings: dict[str, Any] | None = None
    extrapolates: bool = True


def rules() -> list[Rule]:
    found = [Rule("AdamW")]
    for interval in (4, 2, 8):
        for ratio in (0.1, 0.02, 0.0):
            base = {"update_interval": interval, "topk_ratio": ratio}
            replay = {**base, "cold_rule": "replay"}
            found += [
                Rule("mean", {**base, "cold_rule": "mean"}),
                Rule("replay", replay),
                Rule("replay, extrapolation only", {**replay, "preview_gain": 0.0}),
                Rule("replay, eager step only", replay, extrapolates=False),
                Rule("replay, no preview", {**replay, "preview": False}),
            ]
            if ratio == 0.1:
                found += [
                    Rule(f"replay, preview_gain={g}", {**replay, "preview_gain": g})
                    for g in (1.0, 1.5)
                ]
    return found


def headers() -> Text:
    """Another text: the C headers of this Python, every seventh file held out."""
    root = Path(sysconfig.get_path("include"))
    files = [path.read_bytes() for path in sorted(root.rglob("*.h"))]
    halves = [b"".join(f for i, f in enumerate(files) if (i % 7 == 0) == held) for held in (0, 1)]
    train, val = (torch.frombuffer(bytearray(half), dtype=torch.uint8) for half in halves)
    return Text(train, val)


class Batches:
    """The batches of a seed, ``[BATCH, LENGTH + 1]``, and the windows to validate on."""

    def __init__(self, text: Text, seed: int, steps: int) -> None:
        self._windows = RandomWindows(text.train, LENGTH + 1, seed)
        gen = torch.Generator().manual_seed(seed)
        self._order = torch.randint(0, len(self._windows), (steps, BATCH), generator=gen)
        fixed = FixedWindows(text.val, LENGTH + 1, 256)
        self.val = torch.stack([fixed[i] for i in range(len(fixed))])

    def __getitem__(self, step: int) -> Tensor:
        return torch.stack([self._windows[int(i)] for i in self._order[step]])


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    tokens = windows.long()
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, text: Text, seed: int, steps: int, lr: float, rule: Rule) -> float:
    """Train ``model`` and return its validation loss."""
    batches, factor = Batches(text, seed, steps), WarmupCosine(round(0.1 * steps), steps)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    engine = None
    if rule.settings is not None:
        config = ZenFlowConfig(min_offload_numel=4096, num_workers=1, **rule.settings)
        engine = ZenFlowEngine(optimizer, config)
        if not rule.extrapolates:
            assert isinstance(engine.cold, ReplayHalf)
            engine.cold.horizon = 0
    try:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor(step)
            optimizer.zero_grad()
            loss_of(model, batches[step]).backward()
            optimizer.step() if engine is None else engine.step()
        if engine is not None:
            engine.flush()
    finally:
        if engine is not None:
            engine.close()
    with torch.no_grad():
        return float(loss_of(model, batches.val))


def fresh(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(layers=2, width=128, heads=4, block_size=LENGTH)


def pretrained(text: Text) -> GPT:
    model = fresh(0)
    train(model, text, PRETRAIN_SEED, PRETRAIN_STEPS, 2e-3, Rule("AdamW"))
    return model


def report(results: dict[str, dict[str, float]], seeds: int) -> None:
    """A Markdown table: per row the mean loss, its spread over seeds, and the mean ratio to AdamW."""
    print("| rule | S | k | " + " | ".join(f"{t} | sd | to AdamW" for t in TASKS) + " |")
    print("|---" * (3 + 3 * len(TASKS)) + "|")
    adamw = {t: [results[key(t, Rule("AdamW"))][str(s)] for s in range(seeds)] for t in TASKS}
    for rule in rules():
        cells = [rule.name]
        settings = rule.settings or {"update_interval": "", "topk_ratio": ""}
        cells += [str(settings["update_interval"]), str(settings["topk_ratio"])]
        for task in TASKS:
            losses = [results[key(task, rule)][str(s)] for s in range(seeds)]
            ratio = statistics.mean(a / b for a, b in zip(losses, adamw[task], strict=True)) - 1.0
            spread = statistics.stdev(losses) if seeds > 1 else 0.0
            cells += [f"{statistics.mean(losses):.3f}", f"{spread:.3f}", f"{ratio:+.2%}"]
        print("| " + " | ".join(cells) + " |")


def key(task: str, rule: Rule) -> str:
    settings = rule.settings or {}
    where = [f"S={settings.get('update_interval')}", f"k={settings.get('topk_ratio')}"]
    return ", ".join([task, rule.name, *where])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("accuracy.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    if args.out.exists():
        results = json.loads(args.out.read_text())
    texts = {"scratch": read_text(), "tune": headers()}
    base = pretrained(texts["scratch"])
    for rule in rules():
        for task in TASKS:
            losses = results.setdefault(key(task, rule), {})
            for seed in range(args.seeds):
                if str(seed) in losses:
                    continue
                model = copy.deepcopy(base) if task == "tune" else fresh(seed)
                lr = LEARNING_RATE[task]
                losses[str(seed)] = train(model, texts[task], seed, args.steps, lr, rule)
                args.out.write_text(json.dumps(results, indent=1))
            print(f"{key(task, rule)}: {losses}", file=sys.stderr, flush=True)
    report(results, args.seeds)


if __name__ == "__main__":
    main()
