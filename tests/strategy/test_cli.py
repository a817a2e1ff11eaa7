"""LightningCLI with both YAML forms, in scripts that never name our package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_zenflow import ZenFlowConfig
from tests.scripts import clean_environment, output

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SMALL = [
    "--trainer.max_steps=6",
    "--trainer.val_check_interval=3",
    "--model.layers=1",
    "--model.width=32",
    "--model.block_size=16",
    "--data.val_windows=4",
]


def cli(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "cli.py"), "fit", *arguments],
        cwd=cwd,
        env=clean_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("form", ["config.yaml", "config_class_path.yaml"])
def test_both_forms_train(form: str, tmp_path: Path) -> None:
    said = output(cli(tmp_path, "--config", str(EXAMPLES / form), *SMALL))
    assert "stall" in said
    [log] = tmp_path.glob("runs/**/metrics.csv")
    assert "val_loss" in log.read_text()
    [saved] = tmp_path.glob("runs/**/config.yaml")
    assert "zenflow" in saved.read_text()


def test_the_two_forms_are_the_same_job() -> None:
    named, by_class = (
        yaml.safe_load((EXAMPLES / form).read_text())
        for form in ("config.yaml", "config_class_path.yaml")
    )
    assert named["trainer"].pop("strategy") == "zenflow"
    given = by_class["trainer"].pop("strategy")
    assert given["class_path"] == "lightning_zenflow.ZenFlowStrategy"
    assert ZenFlowConfig(**given["init_args"]) == ZenFlowConfig(), (
        "other settings than the defaults"
    )
    assert named == by_class


def test_a_misspelt_argument_is_refused(tmp_path: Path) -> None:
    config = str(EXAMPLES / "config_class_path.yaml")
    result = cli(tmp_path, "--config", config, "--trainer.strategy.init_args.update_intervall=8")
    assert result.returncode != 0
    assert "update_intervall" in result.stderr


def test_a_wrong_value_is_refused_with_our_message(tmp_path: Path) -> None:
    config = str(EXAMPLES / "config_class_path.yaml")
    result = cli(
        tmp_path, "--config", config, "--trainer.strategy.init_args.topk_ratio=1.5", *SMALL
    )
    assert result.returncode != 0
    assert "topk_ratio must be between 0 and 1, got 1.5" in result.stderr


def test_help_lists_our_arguments(tmp_path: Path) -> None:
    said = output(cli(tmp_path, "--trainer.strategy.help", "lightning_zenflow.ZenFlowStrategy"))
    for name in ("topk_ratio", "update_interval", "update_lag", "schedule", "num_workers"):
        assert f"--trainer.strategy.{name} " in said, said
    assert "find_unused_parameters" in said, "DDP's own arguments are missing"
