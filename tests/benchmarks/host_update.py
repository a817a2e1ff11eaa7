"""Host update, one thread: our chunks against whole-tensor torch AdamW, interleaved in one run.

    python tests/benchmarks/host_update.py [--millions 16] [--rounds 9]

Both do the same job: mean of an fp32 accumulator, AdamW on fp32 state, bf16 copy out. Times on a
shared machine are noise; read the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from lightning_zenflow.arithmetic import AdamHyper, adam_update_
from lightning_zenflow.host.adamw import ChunkKernels
from lightning_zenflow.host.arena import Arena
from lightning_zenflow.host.commands import Update
from lightning_zenflow.host.layout import HostMatrix, HostSpec, assign_chunks

COLS = 4096
BYTES_PER_PARAMETER = 4 * 4 + 3 * 4 + 2  # read p, m, v, acc; write p, m, v and the bf16 copy


def measure(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each job over ``rounds`` interleaved rounds, after one unmeasured."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            started = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = args.millions * 1_000_000 // COLS
    jobs: dict[str, Callable[[], None]] = {}
    hyper = AdamHyper(1e-4, 0.9, 0.999, 1e-8, 0.01, True)
    command = Update(hyper, step=10, decay=hyper.step_decay**4, inverse_count=0.25, per_slot=False)
    for elements in (1 << 17, 1 << 18, 1 << 19, 1 << 20):
        spec = HostSpec([HostMatrix(rows, COLS, "bfloat16")], 1, 1, elements)
        arena = Arena.create(spec)
        arrays, chunks = arena.matrices[0], assign_chunks(spec)[0][0]
        for tensor in (arrays.master, arrays.accumulator, arrays.exp_avg, arrays.exp_avg_sq):
            tensor.uniform_(1e-4, 1e-3)
        kernels = ChunkKernels(max((c.stop - c.start) * COLS for c in chunks))

        def chunked(arrays=arrays, chunks=chunks, kernels=kernels) -> None:  # type: ignore[no-untyped-def]
            for chunk in chunks:
                kernels.update(arrays, chunk, command)

        def whole(arrays=arrays) -> None:  # type: ignore[no-untyped-def]
            grad = arrays.accumulator * command.inverse_count
            adam_update_(
                arrays.master,
                grad,
                arrays.exp_avg,
                arrays.exp_avg_sq,
                step=command.step,
                hyper=hyper,
                decay=command.decay,
            )
            arrays.outgoing.copy_(arrays.master)

        jobs[f"chunks of {elements >> 10}K"] = chunked
        jobs["whole tensors"] = whole
    medians = measure(jobs, args.rounds)
    print(
        f"{rows * COLS / 1e6:.0f} M parameters, 1 thread, torch {torch.__version__}, pid {os.getpid()}"
    )
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        rate = BYTES_PER_PARAMETER * rows * COLS / seconds / 1e9
        ratio = medians["whole tensors"] / seconds
        print(f"{name:18} {seconds * 1e3:7.1f} ms  {rate:5.1f} GB/s  {ratio:4.2f} x whole tensors")


if __name__ == "__main__":
    main()
