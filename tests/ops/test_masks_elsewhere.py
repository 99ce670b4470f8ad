"""Policies that were trained with action masks, served and exported: forbidden choices are taken nowhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_policies import TOKEN, save

from raynforce.client import Client
from raynforce.errors import UsageError
from raynforce.ops.exporting import export
from raynforce.ops.serving.service import serve
from raynforce.policy import load

GRID = "raynforce.envs.tiny:MaskedGrid"
OBS = np.random.default_rng(0).random((50, 2)).astype(np.float32)
MASKS = np.random.default_rng(1).integers(0, 2, (50, 8))
MASKS[:, 5] = 1


@pytest.fixture(params=["ppo", "dqn"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "policy", GRID, request.param, env_args={"masks": "obs"})[0]


def test_a_server_takes_masks_beside_or_in_the_observation_and_refuses_others(policy: Path) -> None:
    pytest.importorskip("uvicorn", reason="there is no uvicorn: pip install 'raynforce[serve]'")
    here, service = load(policy), serve(policy, port=0, token=TOKEN, local=True)
    try:
        with Client(service.url, token=TOKEN) as client:
            wanted = [here.act({"place": obs}, mask=mask) for obs, mask in zip(OBS, MASKS, strict=True)]
            assert MASKS[np.arange(50), wanted].all()
            both = {"place": OBS, "action_mask": MASKS}
            assert client.act(both).tolist() == client.act({"place": OBS}, mask=MASKS).tolist() == wanted
            if here.spec.exploration == "policy":
                assert MASKS[np.arange(50), client.act(both, greedy=False)].all()
            assert client.act({"place": OBS[0]}, mask=np.arange(8) == 3) == 3
            wrong: dict[str, Any] = {
                'send "mask"': None,
                "mask has shape [5]; allowed are [8] and [1, 8]": np.ones(5, int),
                "mask allows no choice at all": np.zeros(8, int),
                "expected true or false for each choice": np.full(8, 2),
            }
            for said, mask in wrong.items():
                with pytest.raises(UsageError) as error:
                    client.act({"place": OBS[0]}, mask=mask)
                assert said in str(error.value)
    finally:
        service.stop()


@pytest.mark.parametrize("to", ["numpy", "onnx", "torchscript", pytest.param("cpp", marks=pytest.mark.slow)])
def test_an_export_takes_allowed_choices_alone(to: str, policy: Path, tmp_path: Path) -> None:
    """It is held against `load(…).act` on random observations and masks before it is written."""
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    if to == "cpp" and shutil.which("g++") is None:
        pytest.skip("there is no g++")
    made = export(policy, to, tmp_path / "out")
    assert made.error < 1e-5
    assert "1 for each choice that is allowed" in (tmp_path / "out" / "README.md").read_text()
    if to == "numpy":
        given: dict[str, Any] = {"__file__": str(tmp_path / "out" / "predict.py"), "__name__": "predict"}
        exec((tmp_path / "out" / "predict.py").read_text(), given)
        assert given["act"]({"place": OBS[0]}, mask=[0, 0, 0, 1, 0, 0, 0, 0]) == 3
        assert json.loads((tmp_path / "out" / "policy.json").read_text())["obs"][1]["path"] == "obs/action_mask"
        for mask in (None, [0] * 8):
            with pytest.raises(ValueError, match="needs a mask of 8 flags that allows a choice"):
                given["act"]({"place": OBS[0]}, mask=mask)


@pytest.mark.parametrize("to", ["numpy", "onnx", "torchscript"])
def test_an_export_needs_a_choice_for_each_element_of_each_row(to: str, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    policy = save(tmp_path / "policy", "masked_envs:Locks", "ppo")[0]
    export(policy, to, tmp_path / "out", observations=20)
    given: dict[str, Any] = {"__file__": str(tmp_path / "out" / "predict.py"), "__name__": "predict"}
    exec((tmp_path / "out" / "predict.py").read_text(), given)
    act, obs = given["act"], np.zeros((2, *load(policy).spec.env.obs[0].shape), np.float32)
    for wrong in ([1, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [[1] * 7, [0, 0, 0, 1, 1, 1, 1]]):
        with pytest.raises(ValueError, match="needs a mask of 7 flags that allows a choice"):
            act(obs if np.ndim(wrong) > 1 else obs[0], mask=wrong)
    assert act(obs[0], mask=[0, 1, 0, 0, 0, 0, 1]).tolist() == [6, 3]
    assert act(obs, mask=[0, 1, 0, 0, 0, 0, 1]).tolist() == [[6, 3]] * 2  # one mask for all rows
