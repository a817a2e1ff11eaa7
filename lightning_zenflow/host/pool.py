"""The trainer's side of the worker processes: start, post, wait, notice death, stop."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np

from lightning_zenflow.host.arena import Arena
from lightning_zenflow.host.commands import Command
from lightning_zenflow.host.layout import QUEUE_DEPTH, HostSpec, assign_chunks
from lightning_zenflow.host.worker import BUSY_NS, EXIT_ERROR, MOVED, READY

START_TIMEOUT_S = 120.0  # a cold disk may take long to import torch; a dead worker is seen at once
STOP_TIMEOUT_S = 2.0
NOT_AN_OWNER = np.iinfo(np.int64).max

# Variables that would make a worker look like a rank, or restrict its threads to the rank's.
_DROPPED = (
    "LOCAL_RANK", "RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY",
    "OMP_PROC_BIND", "OMP_PLACES",
)  # fmt: skip


class WorkerDied(RuntimeError):
    """An updater process ended although it was not told to."""


def _environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _DROPPED}
    # The worker must import the same torch and the same package as the trainer, from any directory.
    package_root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p] + [package_root])
    env["CUDA_VISIBLE_DEVICES"] = ""  # a worker has no business on a GPU
    env["OMP_NUM_THREADS"] = "1"
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # nor on any other device
    return env


def _exit_reason(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal has a number only
            name = str(-code)
        return f"was killed by signal {name}"
    if code == EXIT_ERROR:
        return "failed with an exception"
    return f"exited with status {code}"


def _end(owner: int, processes: list[subprocess.Popen[bytes]], stop: int, fds: list[int]) -> None:
    """Stop all workers, collect them, close the descriptors. Runs once, at close or at exit."""
    if os.getpid() != owner:
        return  # a forked child (a data loader's worker, say) must not end its parent's workers
    os.eventfd_write(stop, 1)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for fd in fds:
        os.close(fd)


class UpdaterPool:
    """Worker processes that own the chunks of one arena.

    Raises:
        WorkerDied: from every method that waits or checks, as soon as a worker is found dead.
    """

    def __init__(self, spec: HostSpec) -> None:
        self.arena = Arena.create(spec)
        self.spec = spec
        self._posted = [0] * len(spec.matrices)
        self._mark_owners()
        self._completed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(spec.lanes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fds = [self._completed, self._stop, *self._wake]
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._processes, self._stop, self._fds
        )
        self._poll = select.poll()
        self._poll.register(self._completed, select.POLLIN)
        self._pidfds: dict[int, int] = {}
        self._death: str | None = None
        try:
            self._start()
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _mark_owners(self) -> None:
        for lane, owned in enumerate(assign_chunks(self.spec)):
            for matrix in range(len(self.spec.matrices)):
                if matrix not in owned:
                    self.arena.done[lane][matrix] = NOT_AN_OWNER

    def _start(self) -> None:
        parent = os.pidfd_open(os.getpid())
        try:
            for worker in range(self.spec.workers):
                wake = self._wake[worker * self.spec.threads : (worker + 1) * self.spec.threads]
                inherited = [self.arena.fd, self._stop, parent, self._completed, *wake]
                command = [sys.executable, "-P", "-m", "lightning_zenflow.host.worker"]
                command += ["--worker", str(worker), "--arena", str(self.arena.fd)]
                command += ["--stop", str(self._stop), "--parent", str(parent)]
                command += ["--completed", str(self._completed), "--wake", *map(str, wake)]
                process = subprocess.Popen(
                    command,
                    pass_fds=inherited,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal must reach the trainer only
                )
                self._processes.append(process)
                pidfd = os.pidfd_open(process.pid)
                self._fds.append(pidfd)
                self._pidfds[pidfd] = worker
                self._poll.register(pidfd, select.POLLIN)
        finally:
            os.close(parent)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.arena.lane_words[:, READY].all():
            if time.monotonic() > deadline:
                raise WorkerDied(
                    f"the updater workers (pids {self.pids}) were not ready after "
                    f"{START_TIMEOUT_S:.0f} s; see their output above, and check that "
                    f"`{sys.executable} -c 'import torch'` is quick on this machine"
                )
            self._sleep(100)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes]

    # -- commands -------------------------------------------------------------------------------

    def post(self, matrix: int, command: Command) -> int:
        """Write ``command`` (for the matrix with this index) behind the matrix's earlier ones.

        The workers see it once its number stands in ``arena.posted``: the caller has to bring
        :attr:`numbers` there, behind all copies into the arena that the command needs.

        Returns:
            The command's number, for :meth:`is_done` and :meth:`wait`.

        Raises:
            RuntimeError: the matrix's queue is full: the caller has to wait for older commands.
        """
        self._require_open()
        number = self._posted[matrix] + 1
        if number > QUEUE_DEPTH and not self.is_done(matrix, number - QUEUE_DEPTH):
            raise RuntimeError(
                f"matrix {matrix} has {QUEUE_DEPTH} commands that are not done; wait for number "
                f"{number - QUEUE_DEPTH} before posting another"
            )
        self.arena.commands[matrix, (number - 1) % QUEUE_DEPTH] = command.record()
        self._posted[matrix] = number
        return number

    @property
    def numbers(self) -> list[int]:
        """For each matrix the number of its newest command: what belongs into ``arena.posted``."""
        return list(self._posted)

    def last_posted(self, matrix: int) -> int:
        """Number of the newest command of ``matrix``; 0 before the first."""
        return self._posted[matrix]

    def wake(self) -> None:
        """Make every lane look for posted commands, and watch for those that are on their way."""
        self._require_open()
        self.arena.announced[:] = self._posted
        for fd in self._wake:
            os.eventfd_write(fd, 1)

    def is_done(self, matrix: int, number: int) -> bool:
        """Whether all owners have done command ``number`` of ``matrix``."""
        self._require_open()
        return all(done[matrix] >= number for done in self.arena.done)

    def wait(self, matrix: int, number: int) -> float:
        """Wait until :meth:`is_done`; returns the seconds waited, 0.0 if it was done already."""
        if self.is_done(matrix, number):
            return 0.0
        started = time.perf_counter()
        self.wake()
        while not self.is_done(matrix, number):
            self._sleep(250)
        return time.perf_counter() - started

    def busy_seconds(self) -> float:
        """Seconds that the lanes have worked so far, averaged over lanes."""
        self._require_open()
        return float(self.arena.lane_words[:, BUSY_NS].mean()) * 1e-9

    def moved_bytes(self) -> int:
        """Bytes of the arena that the lanes have read and written so far."""
        self._require_open()
        return int(self.arena.lane_words[:, MOVED].sum())

    # -- life and death -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise :class:`WorkerDied` if a worker has ended; never waits."""
        self._sleep(0)

    def _sleep(self, milliseconds: int) -> None:
        """Sleep until a lane has finished something, a worker has died, or the time is up."""
        self._require_open()
        for fd, _ in self._poll.poll(milliseconds):
            if fd == self._completed:
                os.eventfd_read(fd)
            else:
                self._raise_death(self._pidfds[fd])

    def _require_open(self) -> None:
        if self._death is not None:
            raise WorkerDied(self._death)
        if self.closed:
            raise RuntimeError("the updater pool is closed")

    def _raise_death(self, worker: int) -> None:
        process = self._processes[worker]
        reason = _exit_reason(process.wait())
        text = self.arena.read_error(worker)
        hint = (
            "SIGKILL often is the kernel's out-of-memory killer: see `dmesg` and free host memory. "
            if "SIGKILL" in reason
            else ""
        )
        self._death = (
            f"updater worker {worker} (pid {process.pid}) {reason}; the cold half of the optimizer "
            f"cannot go on. {hint}Restart from the last checkpoint."
            + (f"\nIts traceback:\n{text}" if text else "")
        )
        self.close()
        raise WorkerDied(self._death)

    @property
    def closed(self) -> bool:
        """Whether the workers have been stopped."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop the workers, collect them, give descriptors and memory back. Safe to call twice."""
        self._finalizer()
        self.arena.close()
