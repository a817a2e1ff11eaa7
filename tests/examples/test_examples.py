"""The examples run as the README says, and their parts do what they claim."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.scripts import clean_environment, output

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--steps=8", "--layers=1", "--width=64", "--block-size=16", "--val-windows=8"]

sys.path.insert(0, str(EXAMPLES))

import gpt  # noqa: E402
import text  # noqa: E402


def run_example(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), *arguments],
        cwd=cwd,
        env=clean_environment(COLUMNS="160"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_trains_and_prints_its_table(tmp_path: Path) -> None:
    said = output(run_example(tmp_path, *SMALL, "--topk-ratio=0.2", "--width=256"))
    for row in (
        "validation loss",
        "unigram entropy",
        "stall: update",
        "stall: ring",
        "stall: selection",
        "stall: flush",
        "stall: copy",
        "hidden share of it",
    ):
        assert row in said, said
    assert re.search(r"optimizer steps +│ +8 ", said), said
    # fp32 at S = 4: masters and moments 12, the outgoing copy 4, 2.75 gradients 11; small matrices waste some.
    [found] = re.findall(r"host bytes a cold parameter │ +(\d+\.\d+)", said)
    assert 27.0 <= float(found) < 31.0
    [log] = tmp_path.glob("runs/**/metrics.csv")
    assert "val_loss" in log.read_text()


def test_the_same_job_runs_with_plain_ddp(tmp_path: Path) -> None:
    said = output(run_example(tmp_path, *SMALL, "--strategy=ddp"))
    assert "validation loss" in said
    assert "host bytes" not in said


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--topk-ratio=2", "topk_ratio must be between 0 and 1, got 2.0"),
        ("--update-interval=0", "update_interval must be an integer of at least 1, got 0"),
        ("--width=66", "width=66 cannot be split over heads=4"),
        ("--block-size=0", "choose block_size"),
        ("--schedule=never", "invalid choice: 'never'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, option: str, message: str) -> None:
    result = run_example(tmp_path, *SMALL, option)
    assert result.returncode != 0
    assert message in result.stderr


def test_a_file_is_in_one_half_only() -> None:
    files = text.source_files(text.stdlib_root())
    held_out = [path for path in files if text.is_validation(path)]
    assert len(files) > 200
    assert 0.05 < len(held_out) / len(files) < 0.2
    assert files == text.source_files(text.stdlib_root())
    assert not any({"test", "site-packages"} & set(path.parts) for path in files)


def test_unigram_entropy_of_a_hand_made_text() -> None:
    """Training bytes 0, 0, 1 counted once more than seen: 3, 2 and 254 times 1, of 259."""
    halves = text.Text(
        torch.tensor([0, 0, 1], dtype=torch.uint8), torch.tensor([0, 1, 1, 2], dtype=torch.uint8)
    )
    expected = -(math.log(3 / 259) + 2 * math.log(2 / 259) + math.log(1 / 259)) / 4
    assert text.unigram_entropy(halves) == pytest.approx(expected, rel=1e-12)


def test_windows_depend_on_seed_and_index_alone() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    first = [text.RandomWindows(data, 10, seed=1)[i].tolist() for i in range(25)]
    assert first == [text.RandomWindows(data, 10, seed=1)[i].tolist() for i in range(25)]
    assert first != [text.RandomWindows(data, 10, seed=2)[i].tolist() for i in range(25)]
    fixed = text.FixedWindows(data, 10, count=7)
    covered = [value for i in range(len(fixed)) for value in fixed[i].tolist()]
    assert len(fixed) == 7
    assert len(set(covered)) == len(covered), "validation windows overlap"


def test_the_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(layers=2, width=32, heads=4, block_size=12).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :7], after[0, :7], atol=1e-6)
    assert not torch.allclose(before[0, 7:], after[0, 7:], atol=1e-3)
