"""examples/rllib_ppo.py does what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import raynforce

EXAMPLE = Path(raynforce.__file__).parents[1] / "examples" / "rllib_ppo.py"


@pytest.mark.usefixtures("shared_ray")
def test_the_example_trains_restores_and_evaluates_on_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("rllib_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    mean = example.main(2_000)
    said = capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    assert "resuming" in said
    assert f"mean return {mean:.1f} over 20 greedy episodes" in said
    assert 1 <= mean <= 500
    assert "played by hand" in said
    steps = next(line for line in said.splitlines() if line.endswith("updates")).split()[0]
    assert 4_000 <= int(steps.replace(",", "")) < 7_000
    assert (run / "last" / "rllib.safetensors").is_file()
