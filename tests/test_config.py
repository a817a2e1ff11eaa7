"""ZenFlowConfig: defaults, refusals, derived values, and the import of a DeepSpeed block."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import math
import pickle
import re
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zenflow import config as config_module
from lightning_zenflow.config import ZenFlowConfig, explain_deepspeed


class IndexLike:
    """The number three in the integer type of a foreign library."""

    def __index__(self) -> int:
        return 3


THREE: Any = IndexLike()


DEFAULTS = {
    "topk_ratio": 0.1,
    "update_interval": 4,
    "update_lag": None,
    "select_interval": "auto",
    "warmup_steps": 0,
    "schedule": "auto",
    "cold_rule": "replay",
    "preview": True,
    "preview_gain": 1.25,
    "min_offload_numel": 65536,
    "cold_lr_scale": 1.0,
    "num_workers": "auto",
    "threads_per_worker": "auto",
    "kernels": "auto",
    "stream_gradients": False,
    "chunk_elements": 524288,
}


def test_defaults() -> None:
    config = ZenFlowConfig()
    assert config.to_dict() == DEFAULTS
    assert (config.lag, config.select_every, config.staggered) == (1, 16, True)
    assert (config.previews, config.horizon, config.eager_gain) == (True, 3, 1.25)


def test_the_papers_rule_has_the_papers_defaults() -> None:
    config = ZenFlowConfig(cold_rule="mean")
    assert (config.lag, config.select_every, config.staggered) == (4, 16, False)
    assert (config.previews, config.horizon, config.eager_gain) == (False, 0, 0.0)


@pytest.mark.parametrize(
    ("interval", "lag", "expected", "horizon"),
    [(1, None, 0, 0), (1, 1, 1, 1), (2, None, 1, 2), (8, None, 1, 5), (3, 0, 0, 1), (4, 4, 4, 6)],
)
def test_lag_and_horizon(interval: int, lag: int | None, expected: int, horizon: int) -> None:
    config = ZenFlowConfig(update_interval=interval, update_lag=lag)
    assert (config.lag, config.horizon) == (expected, horizon)
    plain = ZenFlowConfig(update_interval=interval, update_lag=lag, preview=False)
    assert (plain.lag, plain.horizon, plain.eager_gain) == (expected, 0, 0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cold_lr_scale": 2.0}, 'cold_lr_scale=2.0 has no place under cold_rule="replay"'),
        ({"preview_gain": 1.0, "preview": False}, "preview_gain=1.0 without a preview"),
        ({"preview_gain": 0.5, "cold_rule": "mean"}, "preview_gain=0.5 without a preview"),
    ],
)
def test_settings_that_contradict_the_rule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZenFlowConfig(**fields)


def test_only_the_standard_library_is_imported() -> None:
    with open(config_module.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "dataclasses" in names
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


SHARE = "(0.1 is a good start)"
WINDOW = "(4 is a good start)"
SELECTION = '("auto" is 4 windows)'
LAG = "(0 waits, None is one window)"
MACHINE = '("auto": by machine)'
SCALE = "(1.0 leaves it unchanged)"
KERNELS = 'use "auto" or "torch"'
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("topk_ratio", 1.5, ValueError, SHARE),
    ("topk_ratio", -0.1, ValueError, SHARE),
    ("topk_ratio", math.nan, ValueError, SHARE),
    ("topk_ratio", 10**400, ValueError, SHARE),
    ("topk_ratio", True, TypeError, SHARE),
    ("topk_ratio", "0.1", TypeError, SHARE),
    ("update_interval", 0, ValueError, WINDOW),
    ("update_interval", 4.0, TypeError, WINDOW),
    ("update_interval", "4", TypeError, WINDOW),
    ("update_interval", "auto", TypeError, WINDOW),
    ("update_interval", True, TypeError, WINDOW),
    ("update_lag", 5, ValueError, "raise update_interval to at least 5"),
    ("update_lag", -1, ValueError, LAG),
    ("update_lag", False, TypeError, LAG),
    ("update_lag", "auto", TypeError, LAG),
    ("select_interval", 0, ValueError, SELECTION),
    ("select_interval", "Auto", TypeError, SELECTION),
    ("select_interval", 16.5, TypeError, SELECTION),
    ("warmup_steps", -1, ValueError, "(0: none)"),
    ("warmup_steps", math.inf, TypeError, "(0: none)"),
    ("schedule", "stagered", ValueError, 'use "staggered"'),
    ("schedule", None, TypeError, 'use "staggered"'),
    ("min_offload_numel", -1, ValueError, "(0 offloads them all)"),
    ("cold_lr_scale", 0.0, ValueError, SCALE),
    ("cold_lr_scale", math.inf, ValueError, SCALE),
    ("cold_lr_scale", math.nan, ValueError, SCALE),
    ("cold_lr_scale", [1.0], TypeError, SCALE),
    ("cold_lr_scale", True, TypeError, SCALE),
    ("num_workers", 0, ValueError, MACHINE),
    ("num_workers", "2", TypeError, MACHINE),
    ("threads_per_worker", -2, ValueError, MACHINE),
    ("cold_rule", "paper", ValueError, '"mean" is the paper'),
    ("preview", 1, TypeError, "False shows them as they were sent"),
    ("preview_gain", -0.1, ValueError, "1.0 is AdamW's immediate reaction"),
    ("preview_gain", math.nan, ValueError, "1.0 is AdamW's immediate reaction"),
    ("preview_gain", "1", TypeError, "1.0 is AdamW's immediate reaction"),
    ("kernels", "cupy", ValueError, "not part of this version yet, " + KERNELS),
    ("kernels", "triton", ValueError, KERNELS),
    ("chunk_elements", 0, ValueError, "(524288 is good)"),
    ("chunk_elements", "512K", TypeError, "(524288 is good)"),
]


@pytest.mark.parametrize(("field", "value", "error", "remedy"), WRONG)
def test_wrong_value(field: str, value: Any, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error) as caught:
        ZenFlowConfig(**{field: value})
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith(f"{field} must be ")
    assert f"got {value!r};" in message
    assert remedy in message


def test_fields_are_keyword_only_and_known() -> None:
    with pytest.raises(TypeError, match="positional"):
        ZenFlowConfig(0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="overlap_step"):
        ZenFlowConfig(overlap_step=True)  # type: ignore[call-arg]


def test_frozen_and_comparable() -> None:
    config = ZenFlowConfig(update_interval=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.update_interval = 3  # type: ignore[misc]
    assert hash(config) == hash(ZenFlowConfig(update_interval=2))
    assert pickle.loads(pickle.dumps(config)) == config != ZenFlowConfig()


def test_number_like_values_become_plain() -> None:
    given: dict[str, Any] = {"topk_ratio": Fraction(1, 4), "cold_lr_scale": 2, "cold_rule": "mean"}
    config = ZenFlowConfig(**given, **dict.fromkeys(["update_interval", "update_lag"], THREE))
    stored = [config.topk_ratio, config.cold_lr_scale, config.update_interval, config.update_lag]
    assert stored == [0.25, 2.0, 3, 3]
    assert [type(value) for value in stored] == [float, float, int, int]


@pytest.mark.parametrize("ratio", [0, 0.0, 1, 1.0])
def test_bounds_are_included(ratio: float) -> None:
    config = ZenFlowConfig(topk_ratio=ratio, update_interval=1, update_lag=1, min_offload_numel=0)
    assert config.topk_ratio == ratio
    assert config.lag == 1


def test_with_update_interval() -> None:
    config = ZenFlowConfig(topk_ratio=0.3, cold_rule="mean")
    copy = config.with_update_interval(6)
    assert (copy.lag, copy.select_every, copy.topk_ratio) == (6, 24, 0.3)
    assert (config.lag, config.select_every) == (4, 16)

    explicit = ZenFlowConfig(update_lag=3, select_interval=9).with_update_interval(3)
    assert (explicit.lag, explicit.select_every) == (3, 9)
    with pytest.raises(ValueError, match=r"update_lag must be between 0 and update_interval=2, "):
        explicit.with_update_interval(2)
    with pytest.raises(ValueError, match=r"update_interval must be .* got 0;"):
        config.with_update_interval(0)


SCALES = st.floats(0, exclude_min=True, allow_infinity=False)
AUTO_OR_COUNT = st.just("auto") | st.integers(1, 10**6)


@st.composite
def valid_fields(draw: st.DrawFn) -> dict[str, Any]:
    interval, preview = draw(st.integers(1, 10**4)), draw(st.booleans())
    rule = draw(st.sampled_from(["replay", "mean"]))
    return {
        "topk_ratio": draw(st.floats(0, 1) | st.integers(0, 1)),
        "update_interval": interval,
        "update_lag": draw(st.none() | st.integers(0, interval)),
        "select_interval": draw(AUTO_OR_COUNT),
        "warmup_steps": draw(st.integers(0, 10**9)),
        "schedule": draw(st.sampled_from(["auto", "window", "staggered"])),
        "cold_rule": rule,
        "preview": preview,
        "preview_gain": draw(st.floats(0, 10)) if preview and rule == "replay" else 1.25,
        "min_offload_numel": draw(st.integers(0, 2**63)),
        "cold_lr_scale": draw(SCALES) if rule == "mean" else 1.0,
        "num_workers": draw(AUTO_OR_COUNT),
        "threads_per_worker": draw(AUTO_OR_COUNT),
        "kernels": draw(st.sampled_from(["auto", "torch"])),
        "stream_gradients": draw(st.sampled_from(["auto", True, False])),
        "chunk_elements": draw(st.integers(1, 2**40)),
    }


@settings(deadline=None, derandomize=True, database=None)
@given(valid_fields())
def test_every_valid_draw_builds(fields: dict[str, Any]) -> None:
    config = ZenFlowConfig(**fields)
    assert fields.keys() == DEFAULTS.keys()
    assert config.to_dict() == fields
    assert 0 <= config.lag <= config.update_interval
    assert fields["update_lag"] in (None, config.lag)
    auto = 4 * config.update_interval
    assert config.select_every == (
        auto if fields["select_interval"] == "auto" else fields["select_interval"]
    )


FULL_JSON = """{
  "train_batch_size": 8,
  "gradient_accumulation_steps": 1,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "zenflow": {
      "topk_ratio": 0.05,
      "select_strategy": "step",
      "select_interval": 10,
      "update_interval": 3,
      "overlap_step": true,
      "offload": false,
      "auto_ratio": 0.99,
      "full_warm_up_rounds": 7,
      "pt_reserved_cores_perc": 0.5
    }
  }
}"""


def test_deepspeed_full_json_in_one_message(caplog: pytest.LogCaptureFixture) -> None:
    source = json.loads(FULL_JSON)
    with caplog.at_level(logging.INFO, logger="lightning_zenflow"):
        config = ZenFlowConfig.from_deepspeed(source)
    assert config == ZenFlowConfig(
        topk_ratio=0.05, update_interval=3, update_lag=None, select_interval=10, warmup_steps=7
    )
    report = explain_deepspeed(source)
    assert report.config == config
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("lightning_zenflow", "INFO", report.message)
    ]
    assert source == json.loads(FULL_JSON)
    assert report.ignored.keys() == {"offload", "auto_ratio", "pt_reserved_cores_perc"}
    assert not report.refused
    assert report.mapped["full_warm_up_rounds"] == "warmup_steps=7"
    for part in (
        "block imported",
        "mapped: topk_ratio (0.05) -> topk_ratio=0.05",
        "mapped: overlap_step (True) -> update_lag=None: host updates overlap the steps",
        "mapped: select_interval (10) -> select_interval=10: at the first boundary after",
        "multiple of the window or not",
        "no meaning here: offload=False: ",
        "no meaning here: pt_reserved_cores_perc=0.5: use num_workers",
        "accumulate_grad_batches=1 both are the same",
    ):
        assert part in report.message


def test_deepspeed_block_is_found_at_every_level() -> None:
    source = json.loads(FULL_JSON)
    zero = source["zero_optimization"]
    reports = [explain_deepspeed(level) for level in (source, zero, zero["zenflow"])]
    assert reports[0] == reports[1] == reports[2]


def test_deepspeed_defaults_are_deepspeeds() -> None:
    report = explain_deepspeed({"zenflow": {}})
    assert report.config == ZenFlowConfig(update_lag=0)
    assert "overlap_step (left at DeepSpeed's default False) -> update_lag=0" in report.message
    assert "update_interval=4, our default" in report.message
    assert not report.ignored
    autos = dict.fromkeys(report.mapped, "auto") | {"select_strategy": "auto"}
    assert ZenFlowConfig.from_deepspeed({"zenflow": autos}) == report.config


STEP: dict[str, Any] = {"select_strategy": "step"}
EPOCH: dict[str, Any] = {"select_strategy": "epoch", "select_interval": 2}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"update_interval": "auto"}, {"update_interval": 4}),
        ({"overlap_step": False}, {"update_lag": 0}),
        ({"overlap_step": True, "update_interval": 8}, {"update_interval": 8, "update_lag": None}),
        ({"full_warm_up_rounds": 5}, {"warmup_steps": 5}),
        (STEP | {"select_interval": 1}, {"select_interval": 1}),
        (EPOCH | {"steps_per_epoch": 50}, {"select_interval": 100}),
        ({"select_strategy": "auto", "steps_per_epoch": 50}, {"select_interval": 50}),
        ({"select_strategy": "auto", "select_interval": "auto"}, {"select_interval": "auto"}),
    ],
)
def test_deepspeed_mapping(block: dict[str, Any], expected: dict[str, Any]) -> None:
    report = explain_deepspeed({"zenflow": block})
    assert report.config == ZenFlowConfig(**({"update_lag": 0} | expected))
    assert block.keys() <= report.mapped.keys()
    assert not report.ignored


def test_deepspeed_steps_per_epoch_is_ignored_where_it_is_not_read() -> None:
    report = explain_deepspeed(STEP | {"select_interval": 8, "steps_per_epoch": 50})
    assert report.config == ZenFlowConfig(update_lag=0, select_interval=8)
    assert report.ignored.keys() == {"steps_per_epoch"}
    assert "only used when select_interval counts epochs" in report.message


@pytest.mark.parametrize(
    ("block", "field", "remedy"),
    [
        ({"topk_ratio": 1.5}, "topk_ratio", SHARE),
        ({"update_interval": 0}, "update_interval", WINDOW),
        ({"update_interval": "4"}, "update_interval", WINDOW),
        ({"overlap_step": 1}, "overlap_step", "use true or false"),
        ({"full_warm_up_rounds": -1}, "full_warm_up_rounds", "(0: none)"),
        ({"select_strategy": "batch"}, "select_strategy", '"auto" or "step" or "epoch"'),
        ({"select_interval": 16}, "select_interval", "change one of the two"),
        (STEP, "select_interval", "change one of the two"),
        (STEP | {"select_interval": 0}, "select_interval", "more than the steps of the run"),
        (EPOCH, "steps_per_epoch", 'use select_strategy "step"'),
        (EPOCH | {"steps_per_epoch": 0}, "steps_per_epoch", "give the optimizer steps of an epoch"),
        (EPOCH | {"select_interval": 0, "steps_per_epoch": 9}, "select_interval", "more than the"),
        ({"topk_ration": 0.1}, "topk_ration", "did you mean 'topk_ratio'?"),
        ({"foo": 1}, "foo", "known are topk_ratio, update_interval, "),
        ({"update_lag": 0}, "update_lag", "not a zenflow field of DeepSpeed"),
    ],
)
def test_deepspeed_refusals(block: dict[str, Any], field: str, remedy: str) -> None:
    report = explain_deepspeed({"zenflow": block})
    assert report.config is None
    waiting = report.refused.keys() - {field}
    assert waiting <= {"select_interval"}
    assert all(f"until {field} is put right" in report.refused[name] for name in waiting)
    assert remedy in report.refused[field]
    value = block.get(field, "auto" if field == "select_interval" else None)
    assert f"refused: {field}={value!r}: {report.refused[field]}" in report.message
    with pytest.raises(ValueError, match=f"^{re.escape(report.message)}$"):
        ZenFlowConfig.from_deepspeed({"zenflow": block})


def test_deepspeed_refusals_come_together(caplog: pytest.LogCaptureFixture) -> None:
    block = {"topk_ratio": 2, "updat_interval": 4, "overlap_step": True, "offload": True}
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(ValueError, match="refused, nothing is imported") as caught,
    ):
        ZenFlowConfig.from_deepspeed(block)
    assert not caplog.records
    for part in (
        "refused: topk_ratio=2: topk_ratio must be between 0 and 1",
        "refused: updat_interval=4: updat_interval is not a zenflow field of DeepSpeed; did you "
        "mean 'update_interval'?",
        "mapped: overlap_step (True) -> update_lag=None",
        "no meaning here: offload=True",
    ):
        assert part in str(caught.value)


ANY_VALUE: list[Any] = [None, True, "auto", "step", "epoch", -1, 0, 4, 0.5, []]
VALUES = st.sampled_from(ANY_VALUE)
NAMES = st.sampled_from([*config_module._DEEPSPEED_DEFAULTS, "unknown"])


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(st.dictionaries(NAMES, VALUES))
def test_deepspeed_every_given_field_is_accounted_for_once(block: dict[str, Any]) -> None:
    report = explain_deepspeed({"zenflow": block})
    named = [*report.mapped, *report.ignored, *report.refused]
    assert len(named) == len(set(named))
    assert block.keys() <= set(named)
    assert (report.config is None) == bool(report.refused)
    for name in named:
        assert len(re.findall(rf"^  [a-z ]+: {name}\b", report.message, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ({}, "config"),
        ({"train_batch_size": 8}, "config"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization"),
        ({"zero_optimization": {"stage": 2, "zenflow": None}}, "zero_optimization"),
        ({"stage": 2, "overlap_comm": True}, "config"),
    ],
)
def test_deepspeed_without_a_zenflow_block(source: dict[str, Any], where: str) -> None:
    keys = re.escape(repr(list((source.get("zero_optimization") or source).keys())))
    with pytest.raises(ValueError, match=rf"^{where} must contain a zenflow block.*{keys}; give"):
        ZenFlowConfig.from_deepspeed(source)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        (FULL_JSON, "config"),
        (None, "config"),
        ({"zero_optimization": True}, "zero_optimization"),
        ({"zero_optimization": {"zenflow": [1]}}, "zenflow"),
    ],
)
def test_deepspeed_of_the_wrong_type(source: Any, where: str) -> None:
    with pytest.raises(TypeError, match=rf"^{where} must be a dict, got .*; json\.load reads"):
        ZenFlowConfig.from_deepspeed(source)
