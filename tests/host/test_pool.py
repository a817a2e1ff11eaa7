"""The pool with real processes: commands, back-pressure, and every way to end."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.host.commands import Accumulate, Command, Update
from lightning_zenflow.host.layout import QUEUE_DEPTH, HostMatrix, HostSpec
from lightning_zenflow.host.pool import UpdaterPool, WorkerDied
from tests.support import children, open_descriptors

ACC, ADD = Accumulate(first=True), Accumulate(first=False)
UPDATE = Update(AdamHyper(0.1, 0.9, 0.99, 1e-8, 0.0, True), 1, 1.0, 1.0, per_slot=False)
FOREVER_US = 600_000_000  # a lane that pauses this long is "at work" for all a test can tell
RANK_VARIABLES = {
    "LOCAL_RANK": "1", "RANK": "3", "GROUP_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    "OMP_PROC_BIND": "true", "OMP_PLACES": "cores",
}  # fmt: skip


def spec(workers: int = 1, threads: int = 1, *, rows: int = 8, delay_us: int = 0) -> HostSpec:
    """Two matrices; each row is a chunk, so that every lane owns part of both."""
    matrices = [HostMatrix(rows, 4, "float32")] * 2
    return HostSpec(matrices, workers, threads, chunk_elements=1, delay_us=delay_us)


def ring(pool: UpdaterPool) -> None:
    """What the device does when the copies have arrived."""
    pool.arena.posted[:] = pool.numbers


def post(pool: UpdaterPool, command: Command, matrix: int = 0) -> int:
    """Post as the engine does, and wake the lanes."""
    number = pool.post(matrix, command)
    ring(pool)
    pool.wake()
    return number


def state_of(pid: int) -> str:
    """The kernel's one-letter state of a process, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def await_death(pid: int) -> None:
    """Wait until all threads of a child are gone, and leave it to the pool to collect it."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds} s: {what}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool() -> Iterator[UpdaterPool]:
    """Two workers of two lanes, started by a trainer that is a rank; for tests that leave it alive."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RANK_VARIABLES.items():
            patch.setenv(name, value)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        patch.setenv("OMP_NUM_THREADS", "7")
        # Where pytest itself ignores SIGINT (a shell's background job) the workers would inherit it.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        made = UpdaterPool(spec(2, 2))
        signal.signal(signal.SIGINT, handler)
    yield made
    made.close()


class TestCommands:
    def test_post_wait_and_is_done(self, pool: UpdaterPool) -> None:
        start = pool.last_posted(0)
        arrays = pool.arena.matrices[0]
        arrays.staging.fill_(2.0)
        number = post(pool, ACC)
        assert number == pool.last_posted(0) == start + 1
        assert pool.wait(0, number) >= 0.0
        assert pool.is_done(0, number)
        assert not pool.is_done(0, number + 1)
        assert bool((arrays.accumulator == 2.0).all())
        assert pool.wait(0, number) == 0.0, "what is done costs no wait"

    def test_a_window_and_its_update(self, pool: UpdaterPool) -> None:
        arrays = pool.arena.matrices[1]
        for tensor in (arrays.master, arrays.exp_avg, arrays.exp_avg_sq):
            tensor.zero_()
        for number, command in enumerate((ACC, ADD)):
            arrays.staging.fill_(1.0 + number)
            pool.wait(1, post(pool, command, matrix=1))
        pool.wait(1, post(pool, UPDATE, matrix=1))
        torch.testing.assert_close(arrays.master, torch.full((8, 4), -0.1))
        torch.testing.assert_close(arrays.exp_avg, torch.full((8, 4), 0.3))

    def test_matrices_have_their_own_numbers(self, pool: UpdaterPool) -> None:
        before = pool.last_posted(0), pool.last_posted(1)
        numbers = [post(pool, ACC, matrix) for matrix in (0, 1, 1)]
        assert numbers == [before[0] + 1, before[1] + 1, before[1] + 2]
        for matrix in (0, 1):
            pool.wait(matrix, pool.last_posted(matrix))

    def test_an_announced_command_is_done_once_it_is_rung_without_another_wake(
        self, pool: UpdaterPool
    ) -> None:
        """The doorbell comes behind the copies: later than the trainer's wake, by any time."""
        number = pool.post(0, UPDATE)
        pool.wake()
        time.sleep(0.05)
        assert not pool.is_done(0, number), "done before its data had arrived"
        ring(pool)
        until(lambda: pool.is_done(0, number), "done")

    def test_the_factor_of_a_gradient_is_read_when_it_is_rung(self, pool: UpdaterPool) -> None:
        arrays = pool.arena.matrices[0]
        arrays.staging.fill_(3.0)
        pool.arena.factors.fill_(1e9)
        number = pool.post(0, Accumulate(first=True, factor_slot=2))
        pool.wake()
        time.sleep(0.02)
        pool.arena.factors[2] = 0.5
        ring(pool)
        pool.wait(0, number)
        assert torch.equal(arrays.accumulator, torch.full((8, 4), 1.5))

    def test_work_counts_as_busy(self, pool: UpdaterPool) -> None:
        before = pool.busy_seconds()
        pool.wait(0, post(pool, ACC))
        assert pool.busy_seconds() > before

    def test_a_full_queue_is_refused(self, pool: UpdaterPool) -> None:
        """With the workers stopped exactly QUEUE_DEPTH commands fit."""
        pool.wait(0, pool.last_posted(0))
        first = pool.last_posted(0) + 1
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(state_of(pid) == "T" for pid in pool.pids), "workers stopped")
        try:
            for _ in range(QUEUE_DEPTH):
                post(pool, ACC)
            with pytest.raises(RuntimeError, match=f"wait for number {first} before"):
                pool.post(0, ADD)
            assert pool.last_posted(0) == first + QUEUE_DEPTH - 1
        finally:
            for pid in pool.pids:
                os.kill(pid, signal.SIGCONT)
        pool.wait(0, first)
        pool.wait(0, post(pool, ADD))


class TestWorkers:
    """What the workers are to the system, and that the trainer is left as it was."""

    def test_environment(self, pool: UpdaterPool) -> None:
        for pid in pool.pids:
            entries = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
            env = dict(entry.split("=", 1) for entry in entries)
            assert not set(RANK_VARIABLES) & set(env)
            assert env["CUDA_VISIBLE_DEVICES"] == ""
            assert env["OMP_NUM_THREADS"] == "1"

    def test_one_process_a_worker_in_its_own_session(self, pool: UpdaterPool) -> None:
        assert len(set(pool.pids)) == 2
        assert set(pool.pids) <= set(children())
        for pid in pool.pids:
            assert os.getsid(pid) == pid, "Ctrl-C in the trainer's terminal must not reach it"
            assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"

    def test_sigint_is_ignored(self, pool: UpdaterPool) -> None:
        for pid in pool.pids:
            status = Path(f"/proc/{pid}/status").read_text()
            (ignored,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)", status, re.MULTILINE)
            assert int(ignored, 16) >> (signal.SIGINT - 1) & 1
            os.kill(pid, signal.SIGINT)
        pool.wait(0, post(pool, ACC))
        pool.check()

    def test_a_stopped_worker_only_delays(self, pool: UpdaterPool) -> None:
        pid = pool.pids[1]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T", "worker stopped")
        number = post(pool, ACC)
        pool.check()
        resume = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        resume.start()
        waited = pool.wait(0, number)
        resume.join()
        assert pool.is_done(0, number)
        assert waited > 0.1
        pool.check()

    def test_a_forked_child_does_not_stop_them(self, pool: UpdaterPool) -> None:
        pid = os.fork()
        if pid == 0:
            pool.close()
            os._exit(17)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        pool.check()
        pool.wait(0, post(pool, ACC))
        assert not pool.closed

    def test_the_trainer_is_left_as_it_was(self) -> None:
        def settings() -> tuple[object, ...]:
            return (
                torch.get_num_threads(),
                torch.get_num_interop_threads(),
                os.sched_getaffinity(0),
                threading.active_count(),
                dict(os.environ),
                {number: signal.getsignal(number) for number in signal.valid_signals()},
            )

        before = settings()
        pool = UpdaterPool(spec())
        assert settings() == before
        pool.wait(0, post(pool, ACC))
        assert settings() == before
        pool.close()
        assert settings() == before

    def test_they_bind_to_the_cpus_they_are_given(self) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        chosen = [[allowed[-1]], [allowed[0]]]
        base = spec(2)
        pool = UpdaterPool(HostSpec(base.matrices, 2, 1, 1, affinity=chosen))
        try:
            assert [sorted(os.sched_getaffinity(pid)) for pid in pool.pids] == chosen
        finally:
            pool.close()
        assert sorted(os.sched_getaffinity(0)) == allowed


WAITS: dict[str, Callable[[UpdaterPool, int], object]] = {
    "wait": lambda pool, number: pool.wait(0, number),
    "check": lambda pool, number: pool.check(),
}


def errors(pool: UpdaterPool, number: int) -> dict[str, Exception | None]:
    """What each way to wait for command ``number`` raises."""
    raised: dict[str, Exception | None] = dict.fromkeys(WAITS)
    for where, call in WAITS.items():
        try:
            call(pool, number)
        except Exception as error:
            raised[where] = error
    return raised


class TestDeath:
    @pytest.mark.parametrize(
        ("number", "where"),
        [
            (signal.SIGKILL, "wait"),
            (signal.SIGKILL, "check"),
            (signal.SIGSEGV, "wait"),
            (signal.SIGTERM, "wait"),
            (signal.SIGRTMIN + 1, "check"),  # has no name of its own
        ],
    )
    def test_a_killed_worker_is_named_at_once(self, number: int, where: str) -> None:
        """The lanes are made busy for good first, so that the trainer really has to wait."""
        pool = UpdaterPool(spec(2, delay_us=FOREVER_US))
        try:
            pids = pool.pids
            command = post(pool, ACC)
            killed = 0.0

            def kill() -> None:
                nonlocal killed
                killed = time.monotonic()
                os.kill(pids[1], number)

            timer = threading.Timer(0.5, kill)
            timer.start()
            worked = time.thread_time()
            if where == "check":  # it never waits itself
                timer.join()
                await_death(pids[1])
            with pytest.raises(WorkerDied) as caught:
                WAITS[where](pool, command)
            assert time.monotonic() - killed < 2.0
            assert time.thread_time() - worked < 0.3, "a wait must leave the core to the workers"
            timer.join()
            message = str(caught.value)
            assert f"updater worker 1 (pid {pids[1]})" in message
            name = "SIGRTMIN+1" if number > signal.SIGRTMIN else signal.Signals(number).name
            assert name in message or str(int(number)) in message
            assert ("out-of-memory" in message) == (number == signal.SIGKILL)
            assert "checkpoint" in message
            assert [state_of(pid) for pid in pids] == ["", ""], "the other one is stopped too"
            assert pool.closed
        finally:
            pool.close()

    def test_after_a_death_every_call_says_so_again(self) -> None:
        pool = UpdaterPool(spec())
        try:
            command = post(pool, ACC)
            os.kill(pool.pids[0], signal.SIGKILL)
            await_death(pool.pids[0])
            with pytest.raises(WorkerDied, match="SIGKILL"):
                pool.check()
            for error in errors(pool, command).values():
                assert isinstance(error, WorkerDied), repr(error)
                assert "SIGKILL" in str(error)
        finally:
            pool.close()

    def test_an_exception_in_a_lane_comes_with_its_traceback(self) -> None:
        """A real one: the lane is told that it owns part of a matrix of which it has no chunk."""
        pool = UpdaterPool(spec(2, rows=1))  # matrix 0 is one chunk, and belongs to lane 0
        try:
            pids = pool.pids
            pool.arena.done[1][0] = 0
            with pytest.raises(WorkerDied, match=r"worker 1 .* failed with an exception") as caught:
                pool.wait(0, post(pool, ACC))
            message = str(caught.value)
            assert "Its traceback:\nTraceback (most recent call last)" in message
            assert "in start_command" in message
            assert message.rstrip().endswith("KeyError: 0")
            assert [state_of(pid) for pid in pids] == ["", ""]
        finally:
            pool.close()

    def test_a_worker_that_cannot_start(self, capfd: pytest.CaptureFixture[str]) -> None:
        """CPUs that this machine does not have: the worker fails before its lanes run."""
        before = set(children())
        with pytest.raises(WorkerDied, match="updater worker 0") as caught:
            UpdaterPool(HostSpec(spec().matrices, 1, 1, 1, affinity=[[1 << 14]]))
        assert "OSError" in str(caught.value) + capfd.readouterr().err, "the reason is shown"
        assert set(children()) <= before


class TestClose:
    def test_it_ends_everything_and_may_be_repeated(self) -> None:
        pool = UpdaterPool(spec(2))
        pids = pool.pids
        assert not pool.closed
        pool.close()
        assert pool.closed
        assert [state_of(pid) for pid in pids] == ["", ""]
        pool.close()

    def test_a_closed_pool_says_so(self) -> None:
        pool = UpdaterPool(spec())
        pool.close()
        for error in errors(pool, 1).values():
            assert isinstance(error, RuntimeError), repr(error)
            assert "closed" in str(error)

    def test_busy_workers_are_not_waited_for(self) -> None:
        pool = UpdaterPool(spec(2, delay_us=FOREVER_US))
        post(pool, ACC)
        pids = pool.pids
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < 2.0
        assert [state_of(pid) for pid in pids] == ["", ""]

    def test_workers_that_do_not_answer_are_killed(self) -> None:
        pool = UpdaterPool(spec(2))
        pids = pool.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        pool.close()
        assert [state_of(pid) for pid in pids] == ["", ""]

    def test_garbage_collection_ends_it(self) -> None:
        before = sorted(open_descriptors().values())
        pool = UpdaterPool(spec())
        (pid,), gone = pool.pids, weakref.ref(pool)
        pool.wait(0, post(pool, ACC))
        del pool
        gc.collect()
        assert gone() is None
        assert state_of(pid) == ""
        assert sorted(open_descriptors().values()) == before, "the arena's memory is still held"

    @pytest.mark.parametrize("end", ["", "raise ValueError", "os._exit(3)"])
    def test_the_interpreter_ends_without_close(self, end: str) -> None:
        script = f"""
            import json, os, sys
            from lightning_zenflow.host.layout import HostMatrix, HostSpec
            from lightning_zenflow.host.pool import UpdaterPool

            pool = UpdaterPool(HostSpec([HostMatrix(4, 4, "float32")], 1, 1, 1))
            print(json.dumps(pool.pids), flush=True)
            {end}
        """
        source = "\n".join(line.removeprefix(" " * 12) for line in script.splitlines())
        result = subprocess.run(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert result.returncode == (1 if "raise" in end else 3 if end else 0)
        pids = json.loads(result.stdout)
        assert len(pids) == 1
        # A zombie ("Z") is dead: it waits for whoever inherited it.
        until(lambda: all(state_of(pid) in "Z" for pid in pids), "workers gone", seconds=2.0)
