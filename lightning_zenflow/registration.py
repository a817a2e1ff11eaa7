"""The strategy names that Lightning's Trainer and CLI accept."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# DDP's names for its ways to start ranks, with "zenflow" for "ddp".
_START_METHODS = {
    "zenflow": "popen",
    "zenflow_spawn": "spawn",
    "zenflow_fork": "fork",
    "zenflow_notebook": "fork",
}


def _entries() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, start_method in _START_METHODS.items():
        yield name, {"start_method": start_method}
        for unused in (False, True):
            yield (
                f"{name}_find_unused_parameters_{str(unused).lower()}",
                {"start_method": start_method, "find_unused_parameters": unused},
            )


def create_strategy(**kwargs: Any) -> Any:
    """A :class:`~lightning_zenflow.strategy.ZenFlowStrategy`; loads torch and Lightning only now."""
    return importlib.import_module("lightning_zenflow.strategy").ZenFlowStrategy(**kwargs)


def _refuse(name: str, **_: Any) -> NoReturn:
    raise TypeError(
        f"strategy={name!r} works with the Trainer of lightning.pytorch only, and this one is from "
        "pytorch_lightning, whose classes are unrelated copies; write "
        "'import lightning.pytorch as pl' instead of 'import pytorch_lightning as pl'"
    )


def _register(registry: Any, make: Callable[[str], Callable[..., Any]]) -> None:
    for name, init_params in _entries():
        if name not in registry:
            registry.register(
                name, make(name), description=f"ZenFlow with {init_params}", **init_params
            )


def register(registry: Any) -> None:
    """Add our names to ``lightning.pytorch.strategies.StrategyRegistry``; names already there stay."""
    _register(registry, lambda name: create_strategy)


def register_refusals(registry: Any) -> None:
    """Make ``pytorch_lightning``'s Trainer say what to do instead of "invalid strategy name"."""
    _register(registry, lambda name: functools.partial(_refuse, name))
