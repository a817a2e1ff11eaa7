"""The settings of ZenFlow, checked once when they are given, and the import of DeepSpeed's.

Only the standard library is imported here, so that a configuration can be built and checked
before torch or Lightning is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# Measured (docs/benchmarks.md, from scratch at S = 4): 1 ends 0.9 % above AdamW's loss, 1.5 0.5 % below, this one at it.
DEFAULT_GAIN = 1.25

_LOGGER = logging.getLogger("lightning_zenflow")

# What a DeepSpeed field becomes: our field, its value, and a remark.
_Mapped: TypeAlias = tuple[str, Any, str]

# Field: (least value, whether "auto" is a value, what it means and what to do).
_INTEGER_FIELDS = {
    "update_interval": (1, False, "it is the window in optimizer steps (4 is a good start)"),
    "select_interval": (1, True, 'it is the steps between selections ("auto" is 4 windows)'),
    "warmup_steps": (0, False, "it counts the first steps that update all columns (0: none)"),
    "min_offload_numel": (0, False, "smaller matrices stay on the device (0 offloads them all)"),
    "num_workers": (1, True, 'it counts the updater processes per rank ("auto": by machine)'),
    "threads_per_worker": (1, True, 'it counts the threads of an updater ("auto": by machine)'),
    "chunk_elements": (1, False, "it is the cache block of the host update (524288 is good)"),
}


def _integer(name: str, value: object, minimum: int, remedy: str, also: str = "") -> int:
    """Return an integer-like ``value`` as an int; bool, float and str raise TypeError."""
    message = f"{name} must be an integer of at least {minimum}{also}, got {value!r}; {remedy}"
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(message) from None
    if number < minimum:
        raise ValueError(message)
    return number


def _real(
    name: str, value: object, valid: Callable[[float], bool], expected: str, remedy: str
) -> float:
    """Return a real ``value`` as a float; bool and str raise TypeError."""
    message = f"{name} must be {expected}, got {value!r}; {remedy}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not valid(number):
        raise ValueError(message)
    return number


def _choice(name: str, value: object, allowed: tuple[str, ...], remedy: str) -> str:
    names = " or ".join(f'"{choice}"' for choice in allowed)
    message = f"{name} must be {names}, got {value!r}; {remedy}"
    if not isinstance(value, str):
        raise TypeError(message)
    if value not in allowed:
        raise ValueError(message)
    return value


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


@dataclass(frozen=True, kw_only=True)
class ZenFlowConfig:
    """Settings of one ZenFlow engine. A *step* is an optimizer step, after accumulation.

    Args:
        topk_ratio: share of columns that are hot, updated on the device at every step; 0 to 1.
        update_interval: S, length of a window in steps.
        update_lag: L, steps between the submission of a host update and its merge; 0 to S.
            0 waits for the update at the boundary. None is 1 under "replay" (0 if S = 1), and S, one
            whole window, under "mean".
        cold_rule: what becomes of a window's cold gradients. "replay" makes one AdamW step of each, so
            that the masters are exactly those of AdamW; "mean", the paper's, one of their mean.
        preview: whether the device's cold weights run ahead of the masters that it has been sent
            (only under "replay"). It changes no master.
        preview_gain: how strongly they react to each gradient at once: 1 is AdamW's immediate
            reaction, 0 none (then they are only extrapolated). The default allows for what momentum
            would add before the gradient's own update is merged.
        select_interval: R, least number of steps between two selections of the hot columns;
            a selection happens at the first boundary after them. "auto" is 4 * S.
        warmup_steps: W, first steps in which all columns are updated synchronously.
        schedule: "window" (all matrices share their boundaries), "staggered" (each step is the
            boundary of about 1/S of the elements), or "auto": staggered under "replay".
        min_offload_numel: matrices with fewer elements stay on the device.
        cold_lr_scale: factor on the learning rate of the host updates (only under "mean").
        num_workers: updater processes per rank; "auto" follows the machine.
        threads_per_worker: threads of each of them; "auto" follows the machine.
        kernels: device kernels, "auto" or "torch". "cupy" is refused in this version.
        stream_gradients: whether gradients leave the device during backward (Lightning only; an engine
            in a loop of one's own has a method for it): True, False, or "auto" for where nothing else
            needs them.
        chunk_elements: elements in a cache block of the host update.

    Raises:
        TypeError: a value has the wrong type (True is not 1, "4" is not 4).
        ValueError: a value is out of range, or ``update_lag`` exceeds ``update_interval``.
    """

    topk_ratio: float = 0.1
    update_interval: int = 4
    update_lag: int | None = None
    select_interval: int | Literal["auto"] = "auto"
    warmup_steps: int = 0
    schedule: Literal["auto", "window", "staggered"] = "auto"
    cold_rule: Literal["replay", "mean"] = "replay"
    preview: bool = True
    preview_gain: float = DEFAULT_GAIN
    min_offload_numel: int = 65536
    cold_lr_scale: float = 1.0
    num_workers: int | Literal["auto"] = "auto"
    threads_per_worker: int | Literal["auto"] = "auto"
    kernels: Literal["auto", "cupy", "torch"] = "auto"
    stream_gradients: Literal["auto"] | bool = False
    chunk_elements: int = 524288

    def __post_init__(self) -> None:
        for name, (minimum, has_auto, remedy) in _INTEGER_FIELDS.items():
            value = getattr(self, name)
            if not (has_auto and _is_auto(value)):
                also = ' or "auto"' if has_auto else ""
                self._store(name, _integer(name, value, minimum, remedy, also))
        self._check_lag()
        self._check_reals()
        remedy = 'use "staggered" to spread the boundaries over the window, else "window"'
        _choice("schedule", self.schedule, ("auto", "window", "staggered"), remedy)
        self._check_rule()
        remedy = 'the CuPy kernels are not part of this version yet, use "auto" or "torch"'
        _choice("kernels", self.kernels, ("auto", "torch"), remedy)
        if not (isinstance(self.stream_gradients, bool) or _is_auto(self.stream_gradients)):
            raise TypeError(
                f'stream_gradients must be True, False or "auto", got {self.stream_gradients!r}; "auto" '
                "streams wherever nothing needs .grad between backward and the step"
            )

    def _store(self, name: str, value: object) -> None:
        # The plain int or float replaces an integer-like or real-like value that was given.
        object.__setattr__(self, name, value)

    def _check_lag(self) -> None:
        if self.update_lag is None:
            return
        remedy = "it counts the steps from a boundary to its merge (0 waits, None is one window)"
        lag = _integer("update_lag", self.update_lag, 0, remedy, " or None")
        if lag > self.update_interval:
            raise ValueError(
                f"update_lag must be between 0 and update_interval={self.update_interval}, "
                f"got {lag!r}; lower it, use None to let it follow the window, or raise "
                f"update_interval to at least {lag}"
            )
        self._store("update_lag", lag)

    def _check_reals(self) -> None:
        ratio = _real(
            "topk_ratio",
            self.topk_ratio,
            lambda x: 0.0 <= x <= 1.0,
            "between 0 and 1",
            "it is the share of columns updated on the device at every step (0.1 is a good start)",
        )
        scale = _real(
            "cold_lr_scale",
            self.cold_lr_scale,
            lambda x: 0.0 < x < math.inf,
            "a finite number above 0",
            "it multiplies the learning rate of the host updates (1.0 leaves it unchanged)",
        )
        gain = _real(
            "preview_gain",
            self.preview_gain,
            lambda x: 0.0 <= x < math.inf,
            "a finite number of at least 0",
            "1.0 is AdamW's immediate reaction to a gradient, 0.0 none",
        )
        self._store("topk_ratio", ratio)
        self._store("preview_gain", gain)
        self._store("cold_lr_scale", scale)

    def _check_rule(self) -> None:
        remedy = '"replay" keeps AdamW\'s masters exactly, "mean" is the paper\'s rule'
        _choice("cold_rule", self.cold_rule, ("replay", "mean"), remedy)
        if not isinstance(self.preview, bool):
            raise TypeError(
                f"preview must be a bool, got {self.preview!r}; True lets the device's cold weights run "
                "ahead of the masters it has been sent, False shows them as they were sent"
            )
        if self.cold_rule == "replay" and self.cold_lr_scale != 1.0:
            raise ValueError(
                f'cold_lr_scale={self.cold_lr_scale!r} has no place under cold_rule="replay", which makes '
                'exactly AdamW\'s steps; remove it, or use cold_rule="mean"'
            )
        if self.preview_gain != DEFAULT_GAIN and not (self.preview and self.cold_rule == "replay"):
            raise ValueError(
                f"preview_gain={self.preview_gain!r} without a preview (cold_rule={self.cold_rule!r}, "
                f'preview={self.preview!r}): remove it, or use cold_rule="replay" with preview=True'
            )

    @property
    def lag(self) -> int:
        """L in steps, 0 to ``update_interval``; None is a whole window under "mean", else 1 (0 if S = 1)."""
        if self.update_lag is not None:
            return self.update_lag
        if self.cold_rule == "mean":
            return self.update_interval
        return 1 if self.update_interval > 1 else 0

    def describe_rule(self) -> str:
        """In words: what happens to the cold half's gradients."""
        s, lag = self.update_interval, self.lag
        when = f"boundaries {'staggered' if self.staggered else 'together'} every {s} steps"
        when += f", merged {lag} later" if lag else ", merged at once"
        if self.cold_rule == "mean":
            return f'cold_rule="mean", the paper\'s: one update a window with the mean gradient, {when}'
        preview = f"previewed {self.horizon} steps ahead" if self.previews else "no preview"
        return f'cold_rule="replay": AdamW\'s step for each gradient, {when}, {preview}'

    @property
    def staggered(self) -> bool:
        """Whether each matrix has boundaries of its own."""
        if self.schedule == "auto":
            return self.cold_rule == "replay"
        return self.schedule == "staggered"

    @property
    def previews(self) -> bool:
        """Whether the device's cold weights run ahead: not where each update is merged at once."""
        late = self.update_interval > 1 or self.lag > 0
        return self.preview and self.cold_rule == "replay" and late

    @property
    def horizon(self) -> int:
        """Steps that merged values look ahead: the mean age at which the device uses them."""
        return self.lag + self.update_interval // 2 if self.previews else 0

    @property
    def eager_gain(self) -> float:
        """``preview_gain``, or 0 where nothing is previewed."""
        return self.preview_gain if self.previews else 0.0

    @property
    def select_every(self) -> int:
        """R in steps; ``select_interval="auto"`` is four windows."""
        if self.select_interval == "auto":
            return 4 * self.update_interval
        return self.select_interval

    def with_update_interval(self, update_interval: int) -> ZenFlowConfig:
        """Return a copy with another window; a lag of None and an "auto" selection follow it.

        Raises:
            TypeError: ``update_interval`` is not an integer.
            ValueError: it is below 1, or below a lag that was given as a number.
        """
        return dataclasses.replace(self, update_interval=update_interval)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as given (None and "auto" unresolved): ``ZenFlowConfig(**d)``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any]) -> ZenFlowConfig:
        """Import the ``zenflow`` block of a DeepSpeed configuration.

        What was taken, what has no meaning here and why goes to the logger
        ``lightning_zenflow`` as one message at INFO level; :func:`explain_deepspeed` returns it.

        Args:
            config: the DeepSpeed configuration, its ``zero_optimization`` block, or the
                ``zenflow`` block.

        Raises:
            TypeError: ``config`` or one of the blocks is not a dict.
            ValueError: there is no ``zenflow`` block, or it is refused (with that message).
        """
        report = explain_deepspeed(config)
        if report.config is None:
            raise ValueError(report.message)
        _LOGGER.info("%s", report.message)
        return report.config


@dataclass(frozen=True)
class DeepSpeedImport:
    """What became of a DeepSpeed ``zenflow`` block. The keys of the dicts are DeepSpeed's names.

    Args:
        config: the imported configuration; None if anything was refused.
        mapped: fields with a counterpart here, also those left at DeepSpeed's default, with
            the field and value they become.
        ignored: fields that were given and have no meaning here, with the reason.
        refused: fields that cannot be imported, with the reason and the remedy.
        message: all of it, to be read.
    """

    config: ZenFlowConfig | None
    mapped: dict[str, str]
    ignored: dict[str, str]
    refused: dict[str, str]
    message: str


# The fields of DeepSpeed 0.19 with its defaults; "auto" given for any of them is the default.
_DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "topk_ratio": 0.1,
    "update_interval": "auto",
    "overlap_step": False,
    "full_warm_up_rounds": 0,
    "select_strategy": "auto",
    "select_interval": "auto",
    "steps_per_epoch": None,
    "offload": False,
    "auto_ratio": 0.99,
    "pt_reserved_cores_perc": 0.5,
}

_NO_MEANING = {
    "offload": "it moves the moments of the hot columns to the host; here they stay on the device "
    "and the cold state always lives in shared host memory (a lower topk_ratio saves memory)",
    "auto_ratio": "it steers an adaptive update_interval; here the window has a fixed length",
    "pt_reserved_cores_perc": "use num_workers and threads_per_worker to share out the cores",
    "steps_per_epoch": "it is only used when select_interval counts epochs",
}

_STEP_NOTE = (
    "DeepSpeed counts intervals and warm-up in engine.step() calls (micro-batches; update_interval "
    "replaces its gradient_accumulation_steps). Here they count optimizer steps, after "
    "accumulate_grad_batches; with accumulate_grad_batches=1 both are the same."
)
_RULE_NOTE = (
    'DeepSpeed updates cold columns with a mean gradient, our cold_rule="mean"; imported is our default, '
    "\"replay\", which keeps AdamW's masters exactly. For DeepSpeed's: "
    'dataclasses.replace(config, cold_rule="mean").'
)


def explain_deepspeed(config: Mapping[str, Any]) -> DeepSpeedImport:
    """Tell what :meth:`ZenFlowConfig.from_deepspeed` makes of ``config``, refusals included.

    Raises:
        TypeError: ``config`` or one of the blocks is not a dict.
        ValueError: there is no ``zenflow`` block.
    """
    block = _zenflow_block(config)
    values = _DEEPSPEED_DEFAULTS | {k: v for k, v in block.items() if not _is_auto(v)}
    fields: dict[str, Any] = {}
    mapped: dict[str, str] = {}
    refused = {name: _unknown(name) for name in block if name not in _DEEPSPEED_DEFAULTS}
    for name, rule in _RULES.items():
        try:
            field, value, note = rule(values)
            fields[field] = getattr(ZenFlowConfig(**{field: value}), field)
        except (TypeError, ValueError) as error:
            # A message starts with the field at fault: a rule may read more fields than its own.
            first = str(error).split(maxsplit=1)[0]
            at_fault = first if first in _DEEPSPEED_DEFAULTS else name
            refused[at_fault] = str(error)
            if name in block and name not in refused:
                refused[name] = f"{name} cannot be read until {at_fault} is put right"
        else:
            mapped[name] = f"{field}={fields[field]!r}{note}"
    counts_epochs = values["select_strategy"] != "step" and values["steps_per_epoch"] is not None
    for name in ("select_strategy", "steps_per_epoch")[: 2 if counts_epochs else 1]:
        if name in block and name not in refused:
            mapped[name] = "select_interval, with which it is read"
    left = block.keys() - mapped.keys() - refused.keys()
    ignored = {name: why for name, why in _NO_MEANING.items() if name in left}
    result = None if refused else ZenFlowConfig(**fields)
    message = _message(block, mapped, ignored, refused)
    return DeepSpeedImport(result, mapped, ignored, refused, message)


def _zenflow_block(config: object) -> Mapping[Any, Any]:
    """Find the ``zenflow`` block in a whole configuration, in its ZeRO block, or in itself."""
    block, where = config, "config"
    for name in ("zero_optimization", "zenflow"):
        if isinstance(block, Mapping) and block.get(name) is not None:
            block, where = block[name], name
    if not isinstance(block, Mapping):
        raise TypeError(f"{where} must be a dict, got {block!r}; json.load reads a DeepSpeed JSON")
    if where == "zenflow" or (where == "config" and block.keys() & _DEEPSPEED_DEFAULTS):
        return block
    raise ValueError(
        f"{where} must contain a zenflow block, got the keys {list(block)!r}; give the DeepSpeed "
        'configuration {"zero_optimization": {"zenflow": {...}}}, its zero_optimization block or '
        "its zenflow block, or build a ZenFlowConfig directly"
    )


def _unknown(name: object) -> str:
    close = difflib.get_close_matches(str(name), _DEEPSPEED_DEFAULTS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_DEEPSPEED_DEFAULTS)}"
    return f"{name} is not a zenflow field of DeepSpeed; {hint}"


def _import_window(values: Mapping[str, Any]) -> _Mapped:
    if not _is_auto(values["update_interval"]):
        return "update_interval", values["update_interval"], ""
    note = ", our default: DeepSpeed adapts its window, here it has a fixed length"
    return "update_interval", ZenFlowConfig.update_interval, note


def _import_overlap(values: Mapping[str, Any]) -> _Mapped:
    overlap = values["overlap_step"]
    if not isinstance(overlap, bool):
        raise TypeError(f"overlap_step must be a bool, got {overlap!r}; use true or false")
    if overlap:
        return "update_lag", None, ": host updates overlap the steps after them"
    return "update_lag", 0, ": a boundary waits for its host update (None would overlap it)"


def _import_selection(values: Mapping[str, Any]) -> _Mapped:
    strategy, interval, steps = (
        values[name] for name in ("select_strategy", "select_interval", "steps_per_epoch")
    )
    remedy = "it says what select_interval counts"
    _choice("select_strategy", strategy, ("auto", "step", "epoch"), remedy)
    if (strategy == "auto") != _is_auto(interval):
        raise ValueError(
            'select_interval must be "auto" with select_strategy "auto" and a number with "step" '
            f'or "epoch", got {interval!r} with {strategy!r}; change one of the two (DeepSpeed '
            "refuses this pair as well)"
        )
    if strategy == "auto" and steps is None:
        return "select_interval", "auto", ", every 4 windows: DeepSpeed selects once per epoch"
    # In DeepSpeed "auto" is one epoch.
    remedy = "to keep the first selection for good, give more than the steps of the run"
    count = 1 if strategy == "auto" else _integer("select_interval", interval, 1, remedy)
    if strategy != "step":
        remedy = 'give the optimizer steps of an epoch, or use select_strategy "step"'
        count *= _integer("steps_per_epoch", steps, 1, remedy)
    note = ": at the first boundary after so many steps, whether a multiple of the window or not"
    return "select_interval", count, note


_RULES: dict[str, Callable[[Mapping[str, Any]], _Mapped]] = {
    "topk_ratio": lambda values: ("topk_ratio", values["topk_ratio"], ""),
    "update_interval": _import_window,
    "overlap_step": _import_overlap,
    "full_warm_up_rounds": lambda values: ("warmup_steps", values["full_warm_up_rounds"], ""),
    "select_interval": _import_selection,
}


def _message(
    block: Mapping[Any, Any],
    mapped: Mapping[str, str],
    ignored: Mapping[str, str],
    refused: Mapping[str, str],
) -> str:
    verdict = "refused, nothing is imported" if refused else "imported"
    lines = [f"DeepSpeed zenflow block {verdict}."]
    for name, target in mapped.items():
        default = f"left at DeepSpeed's default {_DEEPSPEED_DEFAULTS[name]!r}"
        given = repr(block[name]) if name in block else default
        lines.append(f"  mapped: {name} ({given}) -> {target}")
    lines += [f"  no meaning here: {k}={block[k]!r}: {why}" for k, why in ignored.items()]
    for name, why in refused.items():
        given = repr(block.get(name, _DEEPSPEED_DEFAULTS.get(name)))
        lines.append(f"  refused: {name}={given}: {why}")
    return "\n".join([*lines, f"  note: {_STEP_NOTE}", f"  note: {_RULE_NOTE}"])
