"""The names are registered without an import of ours, and nothing of ours can break anyone's import."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightning_zenflow
from tests.scripts import output, run_python

NAMES = [
    name + suffix
    for name in ("zenflow", "zenflow_spawn", "zenflow_fork", "zenflow_notebook")
    for suffix in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
]

TRAIN = """
from tiny import *
trainer = pl.Trainer(strategy="zenflow", devices=1, **SILENT)
trainer.fit(Tiny(), data())
print("trained with", type(trainer.strategy).__module__, trainer.global_step)
"""

IMPORTS = [
    "import lightning",
    "from lightning.pytorch import Trainer",
    "import torch",
    "import torch, lightning.pytorch.strategies",
    "import pytorch_lightning, lightning",
]


@pytest.mark.parametrize("first", IMPORTS)
def test_trains_without_an_import_of_ours(tmp_path: Path, first: str) -> None:
    said = output(run_python(first + TRAIN, tmp_path))
    assert "trained with lightning_zenflow.strategy 12" in said


@pytest.mark.parametrize(
    "order",
    ["import lightning_zenflow, lightning.pytorch", "import lightning.pytorch, lightning_zenflow"],
)
def test_with_autoload_switched_off_an_import_is_enough(tmp_path: Path, order: str) -> None:
    result = run_python(order + TRAIN, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "trained with lightning_zenflow.strategy 12" in output(result)


def test_with_autoload_switched_off_and_no_import_lightning_says_so(tmp_path: Path) -> None:
    result = run_python(TRAIN, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode != 0
    assert "invalid strategy name" in result.stderr


def test_all_names_and_their_start_methods(tmp_path: Path) -> None:
    source = f"""
    from lightning.pytorch.strategies import StrategyRegistry
    for name in {NAMES}:
        ours, theirs = StrategyRegistry.get(name), StrategyRegistry.get(name.replace("zenflow", "ddp"))
        assert type(ours).__name__ == "ZenFlowStrategy", ours
        assert ours._start_method == theirs._start_method, name
        wanted = {{"gradient_as_bucket_view": True}} | theirs._ddp_kwargs
        assert ours._ddp_kwargs == wanted, (name, ours._ddp_kwargs)
    import lightning_zenflow.registration as registration
    registration.register(StrategyRegistry)
    found = [n for n in StrategyRegistry.available_strategies() if "zenflow" in n]
    assert sorted(found) == sorted({NAMES}), found
    import lightning.pytorch.strategies as module
    assert "exec_module" not in vars(module.__spec__.loader)
    """
    output(run_python(source, tmp_path))


def test_importing_the_package_is_light(tmp_path: Path) -> None:
    source = """
    import os, sys, threading
    import lightning_zenflow
    heavy = {"torch", "lightning", "pytorch_lightning", "numpy", "cupy", "rich"} & set(sys.modules)
    assert not heavy, heavy
    assert threading.active_count() == 1
    assert not open("/proc/self/task/%d/children" % os.getpid()).read()
    assert {"ZenFlowStrategy", "ZenFlowEngine"} <= set(dir(lightning_zenflow))
    try:
        lightning_zenflow.ZenFlowStategy
    except AttributeError as error:
        assert "ZenFlowStategy" in str(error)
    else:
        raise AssertionError
    """
    output(run_python(source, tmp_path))


def test_every_public_name_is_there() -> None:
    for name in lightning_zenflow.__all__:
        assert getattr(lightning_zenflow, name) is not None, name


@pytest.mark.parametrize(
    "sabotage",
    [
        # Our registration fails, in Lightning's registry as it is there.
        "import lightning_zenflow.registration as r\n"
        "def broken(registry, make): raise KeyError('broken')\n"
        "r._register = broken\n",
        # A later release has a registry of another kind.
        "import lightning_zenflow._autoload as a\n"
        "original = a._register_in\n"
        "def changed(module):\n"
        "    real, module.StrategyRegistry = module.StrategyRegistry, object()\n"
        "    original(module)\n"
        "    module.StrategyRegistry = real\n"
        "a._register_in = changed\n",
    ],
)
def test_a_broken_registration_only_warns(tmp_path: Path, sabotage: str) -> None:
    source = (
        "import warnings\n"
        + sabotage
        + """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, lightning.pytorch.strategies
said = [str(w.message) for w in caught if "zenflow" in str(w.message)]
assert len(said) == 1 and "ZenFlowStrategy()" in said[0], said
from lightning.pytorch.strategies.ddp import DDPStrategy
"""
    )
    output(run_python(source, tmp_path))


def test_an_error_in_lightning_itself_comes_through_and_can_be_retried(tmp_path: Path) -> None:
    source = """
    import sys, torch
    sys.modules["lightning.pytorch.strategies.ddp"] = None  # makes its import fail
    try:
        import lightning.pytorch.strategies
    except ImportError:
        pass
    else:
        raise AssertionError("the error was swallowed")
    for name in [n for n in sys.modules if n.split(".")[0] == "lightning"]:
        del sys.modules[name]
    from lightning.pytorch.strategies import StrategyRegistry
    assert "zenflow" in StrategyRegistry
    """
    output(run_python(source, tmp_path))


def test_the_other_namespace_says_what_to_do(tmp_path: Path) -> None:
    source = """
    import pytorch_lightning
    pytorch_lightning.Trainer(strategy="zenflow", accelerator="cpu", devices=1, logger=False)
    """
    result = run_python(source, tmp_path)
    assert result.returncode != 0
    assert (
        "TypeError: strategy='zenflow' works with the Trainer of lightning.pytorch" in result.stderr
    )
    assert "import lightning.pytorch as pl" in result.stderr
