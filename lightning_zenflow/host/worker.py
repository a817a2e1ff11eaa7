"""The updater process: ``python -m lightning_zenflow.host.worker``, started by the pool.

Its main thread only watches for the end (told to stop, or the trainer is gone, however it died); each
lane is a thread that waits for posted commands and does them for the chunks it owns. torch releases
the GIL inside its operations, so lanes run side by side.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_zenflow.host.adamw import ChunkKernels, KeptGradient, read_kept
from lightning_zenflow.host.arena import Arena, MeanArrays, ReplayArrays
from lightning_zenflow.host.commands import Accumulate, Kind, Replay, Update, fence
from lightning_zenflow.host.layout import QUEUE_DEPTH, Chunk, assign_chunks

EXIT_ERROR = 70  # an exception in a lane; its traceback lies in the arena
BUSY_NS, READY, MOVED = 0, 1, 2  # words of a lane's statistics
DOORBELL_POLL_S = 100e-6


@dataclass
class OpenUpdate:
    """An update or replay that a lane is doing chunk by chunk; ``position`` is the next of its chunks."""

    command: Update | Replay
    kept: list[KeptGradient]
    position: int = 0


class Lane:
    """One thread's share of the host half.

    Order of work: gradients first, whenever one may be added (its chunk's earlier commands are
    done), because that frees the staging the trainer writes to; between two gradients one chunk of
    the oldest open update.
    """

    def __init__(self, arena: Arena, lane: int, wake: int, completed: int) -> None:
        spec = arena.layout.spec
        self.arena = arena
        self.index = lane
        self.wake = wake
        self.completed = completed
        self.owned: dict[int, list[Chunk]] = assign_chunks(spec)[lane]
        self.done = arena.done[lane]
        self.words = arena.lane_words[lane]
        largest = max(
            (
                (c.stop - c.start) * spec.matrices[m].n_cold
                for m, cs in self.owned.items()
                for c in cs
            ),
            default=0,
        )
        self.kernels = ChunkKernels(largest)
        self.open_updates: dict[int, OpenUpdate] = {}  # by matrix
        # Only a test sets delay_us; the sleep must differ between lanes and between runs.
        self.jitter = random.Random(lane) if spec.delay_us else None

    def run(self) -> None:
        """Serve commands until the process ends."""
        torch.set_num_threads(1)  # per thread; a chunk split over OpenMP threads waits at barriers
        self.words[READY] = 1
        os.eventfd_write(self.completed, 1)
        while True:
            if self.pass_once():
                continue
            if self.expects_more():
                time.sleep(DOORBELL_POLL_S)
            else:
                os.eventfd_read(self.wake)

    def expects_more(self) -> bool:
        """Whether a command is announced that is not posted yet: its data is still on the bus."""
        return bool((self.arena.announced > self.done).any())

    def pass_once(self) -> bool:
        """Do what can be done now; False if there was nothing."""
        started = time.perf_counter_ns()
        worked = False
        for matrix in (self.arena.posted > self.done).nonzero()[0].tolist():
            if matrix not in self.open_updates:
                worked |= self.start_command(matrix)
        if self.open_updates:
            self.continue_update()
            worked = True
        if worked:
            self.words[BUSY_NS] += time.perf_counter_ns() - started
        return worked

    def start_command(self, matrix: int) -> bool:
        """Do an accumulation whole, or open an update."""
        fence()  # the word in `posted` has been seen: now its record and its data
        record = self.arena.commands[matrix, int(self.done[matrix]) % QUEUE_DEPTH]
        kind = Kind(int(record["kind"]))  # an unknown one is an error, not an accumulation
        arrays = self.arena.matrices[matrix]
        if kind is Kind.UPDATE:
            self.open_updates[matrix] = OpenUpdate(Update.from_record(record), [])
            return True
        if kind is Kind.REPLAY:
            assert isinstance(arrays, ReplayArrays)
            replay = Replay.from_record(record)
            kept = read_kept(arrays, replay, self.arena.factors)
            self.open_updates[matrix] = OpenUpdate(replay, kept)
            return True
        assert isinstance(arrays, MeanArrays)
        command = Accumulate(bool(record["first"]), int(record["factor_slot"]))
        slot = command.factor_slot
        factor = 1.0 if slot < 0 else float(self.arena.factors[slot])
        for chunk in self.owned[matrix]:
            self.pause()
            self.words[MOVED] += self.kernels.accumulate(arrays, chunk, command, factor)
        self.finish(matrix)
        return True

    def continue_update(self) -> None:
        """One chunk of the oldest open update."""
        matrix, update = next(iter(self.open_updates.items()))
        self.pause()
        chunks, arrays = self.owned[matrix], self.arena.matrices[matrix]
        chunk = chunks[update.position]
        if isinstance(update.command, Replay):
            assert isinstance(arrays, ReplayArrays)
            moved = self.kernels.replay(arrays, chunk, update.command, update.kept)
        else:
            assert isinstance(arrays, MeanArrays)
            moved = self.kernels.update(arrays, chunk, update.command)
        self.words[MOVED] += moved
        update.position += 1
        if update.position == len(chunks):
            del self.open_updates[matrix]
            self.finish(matrix)

    def finish(self, matrix: int) -> None:
        """Announce the end of this lane's part of a command."""
        fence()  # results before the word that announces them
        self.done[matrix] += 1
        os.eventfd_write(self.completed, 1)

    def pause(self) -> None:
        if self.jitter is not None:
            limit = self.arena.layout.spec.delay_us * 1e-6
            time.sleep(self.jitter.random() * limit)


@contextmanager
def reported(arena: Arena, worker: int) -> Iterator[None]:
    """An error inside ends the process, with its traceback left in the arena for the trainer to raise."""
    try:
        yield
    except BaseException:
        arena.write_error(worker, traceback.format_exc())
        os._exit(EXIT_ERROR)


def serve(lane: Lane, worker: int) -> None:
    """Run a lane until the process ends."""
    with reported(lane.arena, worker):
        lane.run()


def start_lanes(arena: Arena, worker: int, completed: int, wakes: list[int]) -> None:
    """Bind this process to its CPUs and start a thread for each of its lanes."""
    spec = arena.layout.spec
    cpus = spec.affinity[worker] if spec.affinity else []
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.set_grad_enabled(False)
    for thread, wake in enumerate(wakes):
        lane = Lane(arena, worker * spec.threads + thread, wake, completed)
        name = f"zenflow-lane-{lane.index}"
        threading.Thread(target=serve, args=(lane, worker), name=name, daemon=True).start()


def main() -> None:
    """Entry point; all descriptors are inherited from the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--arena", type=int, required=True)
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="pidfd of the trainer")
    parser.add_argument("--completed", type=int, required=True)
    parser.add_argument("--wake", type=int, nargs="+", required=True, help="one eventfd a lane")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business

    arena = Arena.attach(args.arena)
    with reported(arena, args.worker):
        start_lanes(arena, args.worker, args.completed, args.wake)

    end = select.poll()
    end.register(args.parent, select.POLLIN)
    end.register(args.stop, select.POLLIN)
    end.poll()
    os._exit(0)  # lanes may be inside a kernel; nobody waits for their result any more


if __name__ == "__main__":
    main()
