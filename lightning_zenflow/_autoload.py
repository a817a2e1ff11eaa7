"""Registers our names as soon as Lightning's strategy registry exists, without importing anything.

``autoload`` is what torch calls at the end of ``import torch`` (entry-point group ``torch.backends``), so
that ``Trainer(strategy="zenflow")`` works in a script that never names this package. At that moment
Lightning may be half imported. So it only leaves a finder on ``sys.meta_path``, which waits for the
module that holds the registry and registers right after that module has run.

Nothing here may break ``import torch`` or ``import lightning``: every error of ours becomes a warning.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lightning_zenflow.registration import register, register_refusals

_REGISTRARS = {
    "lightning.pytorch.strategies": register,
    "pytorch_lightning.strategies": register_refusals,
}


def _register_in(module: ModuleType) -> None:
    try:
        _REGISTRARS[module.__name__](module.StrategyRegistry)
    except Exception as error:  # Lightning must stay usable with all its other strategies
        warnings.warn(
            f"strategy='zenflow' could not be registered with {module.__name__} "
            f"({type(error).__name__}: {error}); pass "
            "strategy=lightning_zenflow.ZenFlowStrategy() instead",
            stacklevel=2,
        )


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Finds the registry's module as everyone else would, and has it registered in once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _REGISTRARS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _hook(spec)
                return spec
        return None


def _hook(spec: importlib.machinery.ModuleSpec) -> None:
    """Make this spec's loader register after it has executed the module, once."""
    loader: Any = spec.loader
    try:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's method shows again
            execute(module)
            _register_in(module)

        loader.exec_module = exec_module
    except AttributeError:  # a loader without exec_module, or one that cannot be changed
        return


def install() -> None:
    """Register where the registry is there already, and wait for it where it is not. Idempotent."""
    for name in _REGISTRARS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "StrategyRegistry"):
            _register_in(module)
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def autoload() -> None:
    """torch's entry point. Importing this module has already run ``install`` (package ``__init__``)."""
