"""What is installed is complete: from a wheel, and in editable form."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_zenflow
from tests.scripts import clean_environment, output, run_python

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
from tiny import *
trainer = pl.Trainer(strategy="zenflow", devices=1, **SILENT)
trainer.fit(Tiny(), data())
import sys
print("package at", sys.modules["lightning_zenflow"].__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left in the working tree."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "lightning_zenflow", source / "lightning_zenflow")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = place.glob("*.whl")
    return built


def test_contents_of_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lightning_zenflow").rglob("*")
        if path.suffix in (".py", ".typed") and "__pycache__" not in path.parts
    }
    assert ours <= names
    rest = {name for name in names - ours if ".dist-info/" not in name}
    assert not rest, f"not part of the package: {rest}"
    info = f"lightning_zenflow-{lightning_zenflow.__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in names
    entry_points = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert (
        "[torch.backends]\nlightning_zenflow = lightning_zenflow._autoload:autoload" in entry_points
    )


def test_a_script_trains_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "target", tmp_path / "work"
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, env=clean_environment())
    said = output(run_python(TRAIN, work, PYTHONPATH=str(target)))
    assert f"package at {target}{os.sep}" in said


def test_a_script_trains_with_the_installed_package(tmp_path: Path) -> None:
    """In a development environment, and in CI, that is an editable install of this tree."""
    said = output(run_python(TRAIN, tmp_path))
    assert f"package at {ROOT}{os.sep}" in said
