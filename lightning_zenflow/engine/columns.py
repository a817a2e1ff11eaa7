"""Choosing the hot columns of a matrix, and exchanging them with cold ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.device import Columns


def count_hot(topk_ratio: float, cols: int) -> int:
    """Number of hot columns: 0 if k = 0, all if k = 1, else round(k * cols), at least 1."""
    if topk_ratio == 0.0:
        return 0
    if topk_ratio == 1.0:
        return cols
    return min(cols, max(1, math.floor(topk_ratio * cols + 0.5)))


def provisional(n_hot: int, cols: int, device: torch.device) -> Columns:
    """The first ``n_hot`` columns are hot until the first selection.

    During warm-up both halves make plain AdamW updates, so it does not matter which they are.
    """
    every = torch.arange(cols, dtype=torch.int64, device=device)
    return Columns.of(hot=every[:n_hot].clone(), cold=every[n_hot:].clone())


@dataclass(frozen=True)
class Swap:
    """Pairs of columns that change side: entry i of all four belongs together.

    A demoted column takes the cold slot of the promoted one, and the other way round, so only
    changed columns move.
    """

    promoted: Tensor  # columns that become hot
    demoted: Tensor  # columns that become cold
    hot_slots: Tensor  # where the promoted go (the demoted lay there)
    cold_slots: Tensor  # where the demoted go (the promoted lay there)

    def __len__(self) -> int:
        return int(self.promoted.numel())


def choose_hot(scores: Tensor, n_hot: int) -> Tensor:
    """The ``n_hot`` columns with the highest scores; ties go to the lower index."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n_hot]


def plan_swap(columns: Columns, chosen: Tensor) -> Swap:
    """What has to move so that ``chosen`` are the hot columns. Pairs are in order of slot."""
    total = columns.hot.numel() + columns.cold.numel()
    wanted = torch.zeros(total, dtype=torch.bool, device=columns.hot.device)
    wanted[chosen] = True
    hot_slots = (~wanted[columns.hot]).nonzero().squeeze(1)
    cold_slots = wanted[columns.cold].nonzero().squeeze(1)
    return Swap(
        promoted=columns.cold[cold_slots],
        demoted=columns.hot[hot_slots],
        hot_slots=hot_slots,
        cold_slots=cold_slots,
    )


def apply_swap(columns: Columns, swap: Swap) -> Columns:
    """``columns`` with the pairs exchanged in their slots."""
    hot, cold = columns.hot.clone(), columns.cold.clone()
    hot[swap.hot_slots] = swap.promoted
    cold[swap.cold_slots] = swap.demoted
    return Columns.of(hot, cold)
