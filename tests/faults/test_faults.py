"""Runs that end badly: a real Trainer in a process of its own, and nothing left behind.

Every process of a script inherits a mark in its environment, so that afterwards each one that is
left, whoever its parent has become, is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MARK = "ZENFLOW_FAULT_TEST"
START_S = 120.0  # for imports and workers on a loaded machine
END_S = 60.0

# What every script imports: a model small enough for thousands of steps a second.
TINY = '''
import json, os, signal, time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

OUT = os.environ["ZENFLOW_FAULT_OUT"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it


def say(event, **facts):
    """Tell the test; one line is one write, so lines of several processes do not mix."""
    line = json.dumps({"event": event, "pid": os.getpid(), "time": time.monotonic(), **facts})
    with open(OUT, "a") as out:
        out.write(line + "\\n")


class Tiny(LightningModule):
    def __init__(self, pause=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)
        )
        self.pause = pause

    def training_step(self, batch, index):
        time.sleep(self.pause)
        return torch.nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """Says when training runs, what the workers are, and with what error it ended."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == 9:
            say("training", workers=trainer.strategy.engine.pool.pids)

    def on_exception(self, trainer, module, error):
        say("exception", kind=type(error).__name__, message=str(error))


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.ones(16) * (index % 7)


def data(workers=0, batches=50_000):
    return DataLoader(Rows(4 * batches), batch_size=4, num_workers=workers)


def strategy(num_workers=2):
    from lightning_zenflow import ZenFlowStrategy

    return ZenFlowStrategy(min_offload_numel=0, num_workers=num_workers)


def trainer(**options):
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    ours = {"strategy": strategy(), "max_epochs": 1, "callbacks": [Watch()]}
    return Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **ours, **options})
'''


@dataclass
class Script:
    """A running script and what it has said."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    log: Path

    def events(self, event: str) -> list[dict[str, Any]]:
        if not self.out.exists():
            return []
        lines = [json.loads(line) for line in self.out.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def await_event(self, event: str) -> dict[str, Any]:
        until(
            lambda: bool(self.events(event)) or self.process.poll() is not None,
            f"{event}; the script wrote:\n{self.output()}",
            START_S,
        )
        assert self.events(event), f"the script ended before {event}:\n{self.output()}"
        return self.events(event)[0]

    def await_training(self) -> list[int]:
        """Wait until fit is well under way; returns the workers' process ids."""
        workers: list[int] = self.await_event("training")["workers"]
        assert set(workers) <= set(self.processes())
        return workers

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def exit_code(self) -> int:
        return self.process.wait(END_S)

    def processes(self) -> dict[int, str]:
        """Living processes that carry the mark, and their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        words = (entry / "cmdline").read_bytes().split(b"\0")
                        found[int(entry.name)] = b" ".join(words).decode()
        return found

    def assert_nothing_left(self) -> None:
        """No process of the script is left two seconds after it ended."""
        assert self.process.returncode is not None
        deadline = time.monotonic() + 2.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"processes left: {left}"

    def kill_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {what}"
        time.sleep(0.01)


Run = Callable[..., Script]


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[Run]:
    """Starts ``source`` as a script (or with ``python -c``) in a process group of its own."""
    scripts: list[Script] = []
    (tmp_path / "tiny.py").write_text(TINY)
    shm_before = set(os.listdir("/dev/shm"))

    def run(source: str, *, inline: bool = False, **env: str) -> Script:
        source = textwrap.dedent(source)
        (tmp_path / "script.py").write_text(source)
        mark, out, log = uuid.uuid4().hex, tmp_path / "events", tmp_path / "log"
        path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *(["-c", source] if inline else ["script.py"])],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "ZENFLOW_FAULT_OUT": str(out),
                    MARK: mark,
                    **env,
                },
            )
        scripts.append(Script(process, mark, out, log))
        return scripts[-1]

    yield run
    try:
        for script in scripts:
            script.assert_nothing_left()
        ours = {str(e["pid"]) for s in scripts for e in s.events("training")}
        new = set(os.listdir("/dev/shm")) - shm_before
        assert not [n for n in new if "zenflow" in n or any(pid in n for pid in ours)]
    finally:
        for script in scripts:
            script.kill_all()
            script.process.wait(END_S)


FIT = """
    from tiny import *

    trainer().fit(Tiny(), data())
"""


def test_a_killed_worker_ends_fit_within_two_seconds(run_script: Run) -> None:
    script = run_script(FIT)
    pids = script.await_training()
    for pid in (script.process.pid, *pids):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "/memfd:zenflow" in maps
        assert "/dev/shm" not in maps, "a container has 64 MB there"
    killed = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    assert script.exit_code() == 1
    found = script.await_event("exception")
    assert found["time"] - killed < 2.0
    assert found["kind"] == "WorkerDied"
    for words in (f"updater worker 1 (pid {pids[1]})", "SIGKILL", "checkpoint"):
        assert words in found["message"]
        assert words in script.output()


def test_a_worker_killed_during_validation(run_script: Run) -> None:
    """Nothing waits for the workers there; the next step, at the latest, says so."""
    script = run_script("""
        from tiny import *

        class Validated(Tiny):
            def validation_step(self, batch, index):
                if self.global_step:
                    workers = self.trainer.strategy.engine.pool.pids
                    if index == 0:
                        os.kill(workers[1], 9)
                        say("killed")
                    time.sleep(0.01)

        trainer(val_check_interval=20, limit_val_batches=20).fit(Validated(), data(), data())
    """)
    assert script.exit_code() == 1
    found = script.await_event("exception")
    assert found["time"] - script.await_event("killed")["time"] < 2.0
    assert found["kind"] == "WorkerDied"
    assert "updater worker 1" in found["message"]


def test_a_checkpoint_written_on_the_way_out_does_not_hide_the_reason(run_script: Run) -> None:
    """OnExceptionCheckpoint asks for the optimizer's state when the workers are gone."""
    script = run_script("""
        from lightning.pytorch.callbacks import OnExceptionCheckpoint
        from tiny import *

        callbacks = [Watch(), OnExceptionCheckpoint(".")]
        trainer(callbacks=callbacks, enable_checkpointing=True).fit(Tiny(), data())
    """)
    pids = script.await_training()
    os.kill(pids[0], signal.SIGKILL)
    assert script.exit_code() == 1
    errors = [
        line
        for line in script.output().splitlines()
        if re.match(r"(\[rank0\]: )?[\w.]+(Error|Died): ", line)
    ]
    assert errors
    for line in errors:
        assert "updater worker 0" in line, script.output()


ENDS = {
    "an exception in training_step": (
        """
            class Ends(Tiny):
                def training_step(self, batch, index):
                    if self.global_step == 20:
                        raise ValueError("the user's own")
                    return super().training_step(batch, index)
        """,
        1,
        "ValueError",
    ),
    "sys.exit in a hook": (
        """
            import sys

            class Ends(Tiny):
                def on_train_batch_end(self, outputs, batch, index):
                    if self.global_step == 20:
                        sys.exit(5)
        """,
        5,
        "SystemExit",
    ),
    "os._exit": (
        """
            class Ends(Tiny):
                def training_step(self, batch, index):
                    if self.global_step == 20:
                        os._exit(3)
                    return super().training_step(batch, index)
        """,
        3,
        None,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_user_code_that_ends_the_run(run_script: Run, end: str) -> None:
    source, code, kind = ENDS[end]
    start = "from tiny import *\n"
    script = run_script(start + textwrap.dedent(source) + "trainer().fit(Ends(), data())\n")
    script.await_training()
    assert script.exit_code() == code, script.output()
    assert [e["kind"] for e in script.events("exception")] == ([kind] if kind else [])
    if kind == "ValueError":
        assert "ValueError: the user's own" in script.output()


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_ctrl_c(run_script: Run, group: bool) -> None:
    script = run_script(FIT)
    workers = script.await_training()
    if group:
        os.killpg(script.process.pid, signal.SIGINT)
    else:
        os.kill(script.process.pid, signal.SIGINT)
    assert script.exit_code() != 0
    (found,) = script.events("exception")
    assert found["kind"] == "KeyboardInterrupt"
    assert "WorkerDied" not in script.output()
    assert not set(workers) & set(script.processes()), "gone before the trainer is"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_signal_to_the_trainer(run_script: Run, number: signal.Signals) -> None:
    """SIGTERM Lightning turns into an orderly end; SIGKILL nobody survives."""
    script = run_script(FIT)
    script.await_training()
    os.kill(script.process.pid, number)
    code = script.exit_code()
    if number == signal.SIGTERM:
        assert script.events("exception")[0]["kind"] == "SIGTERMException"
        assert "WorkerDied" not in script.output()
    else:
        assert code == -number


def test_the_trainer_is_killed_while_the_workers_start(run_script: Run) -> None:
    """A worker that is still importing torch notices as soon as it watches."""
    script = run_script(FIT)

    def started() -> list[str]:
        return [c for c in script.processes().values() if "lightning_zenflow.host.worker" in c]

    until(lambda: bool(started()), "a worker has been started", START_S)
    script.process.kill()
    assert script.exit_code() == -signal.SIGKILL
    until(lambda: not script.processes(), "all are gone", START_S)


def test_data_loader_workers_neither_end_nor_outlive_the_updaters(run_script: Run) -> None:
    """They are forked children, which inherit all of the trainer's descriptors and finalizers."""
    script = run_script("""
        from tiny import *

        for epoch in range(2):  # the first one's loader workers end while the second's are to come
            fit = trainer(max_epochs=2)
            fit.fit(Tiny(), data(workers=2, batches=20))
            say("done", step=fit.global_step)
    """)
    assert script.exit_code() == 0, script.output()
    assert [e["step"] for e in script.events("done")] == [40, 40]
    assert script.events("exception") == []


def test_data_loader_workers_do_not_keep_the_updaters_alive(run_script: Run) -> None:
    """The trainer is killed; its loader workers may notice later, the updaters at once."""
    script = run_script("""
        from tiny import *

        trainer().fit(Tiny(pause=0.01), data(workers=2))
    """)
    updaters = set(script.await_training())
    loaders = set(script.processes()) - updaters - {script.process.pid}
    assert len(loaders) >= 2
    for pid in loaders:
        os.kill(pid, signal.SIGSTOP)  # they cannot end by themselves
    script.process.kill()
    assert script.exit_code() == -signal.SIGKILL
    until(lambda: not updaters & set(script.processes()), "updaters gone", 2.0)
    for pid in loaders:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("inline", [False, True], ids=["script", "python -c"])
def test_no_main_guard_is_needed(run_script: Run, inline: bool) -> None:
    script = run_script(
        """
        from tiny import *

        say("started")
        fit = trainer(max_steps=12)
        fit.fit(Tiny(), data())
        say("done", step=fit.global_step, cold=fit.strategy.host_memory.cold_parameters)
        """,
        inline=inline,
    )
    assert script.exit_code() == 0, script.output()
    assert len(script.events("started")) == 1, "a worker has run the user's script again"
    (done,) = script.events("done")
    assert done["step"] == 12
    assert done["cold"] > 0


def test_two_fits_in_one_process(run_script: Run) -> None:
    """Each has its own workers; the first ones are gone when fit returns. One error between them."""
    script = run_script("""
        from tiny import *
        from tests.support import children, open_descriptors

        class Fails(Tiny):
            def training_step(self, batch, index):
                if self.global_step == 10:
                    raise ValueError
                return super().training_step(batch, index)

        for model in (Tiny(), Fails(), Tiny()):
            try:
                trainer(max_steps=12).fit(model, data())
            except ValueError:
                pass
            names = open_descriptors().values()
            ours = [n for n in names if any(k in n for k in ("zenflow", "eventfd", "pidfd"))]
            say("after", children=children(), descriptors=ours)
    """)
    assert script.exit_code() == 0, script.output()
    pids = [pid for e in script.events("training") for pid in e["workers"]]
    assert len(pids) == len(set(pids)) == 6
    after = script.events("after")
    assert [e["children"] for e in after] == [[], [], []]
    # The process group of torch.distributed keeps an eventfd of its own from the first fit on.
    assert after[0]["descriptors"] == after[1]["descriptors"] == after[2]["descriptors"]
    assert set(after[0]["descriptors"]) <= {"anon_inode:[eventfd]"}


def test_an_engine_that_is_dropped_gives_everything_back(run_script: Run) -> None:
    """Without close, in a reference cycle: garbage collection ends workers and frees the arena."""
    script = run_script("""
        import gc
        from tiny import *
        from lightning_zenflow.config import ZenFlowConfig
        from lightning_zenflow.engine import ZenFlowEngine
        from tests.support import children, open_descriptors

        def train():
            model = Tiny()
            optimizer = model.configure_optimizers()
            engine = ZenFlowEngine(optimizer, ZenFlowConfig(min_offload_numel=0, num_workers=2))
            engine.myself = engine
            for step in range(6):
                model.training_step(torch.randn(4, 16), step).backward()
                engine.step()
            say("trained", workers=engine.pool.pids)

        train()
        gc.collect()
        names = open_descriptors().values()
        with open("/proc/self/maps") as maps:
            mapped = [line for line in maps if "zenflow" in line and "memfd" in line]
        left = [n for n in names if any(k in n for k in ("zenflow", "eventfd", "pidfd"))]
        say("after", children=children(), descriptors=left, mapped=mapped)
    """)
    assert script.exit_code() == 0, script.output()
    (after,) = script.events("after")
    assert after["children"] == []
    assert after["mapped"] == []
    assert after["descriptors"] == []
