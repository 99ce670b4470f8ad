"""A run by RLlib whose module our network spec has no layers for is served as any other, from here and on Ray."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.serve", reason="there is no Ray Serve: pip install 'raynforce[serve]'")
pytest.importorskip("ray.rllib", reason="there is no RLlib: pip install 'raynforce[rllib]'")

from served_policies import TOKEN

import raynforce
from raynforce.ops.serving.service import serve

QUICK = {"algorithm.epochs": 1, "eval.episodes": 1, "eval.final_episodes": 1, "sampling.fragment": 32}
OBS = np.random.default_rng(0).normal(0, 1, (100, 4)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_module_that_is_kept_as_torch_is_served_on_ray_too(
    no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**QUICK, "rllib.rl_module.model_config.fcnet_activation": "GELU"}
    run = raynforce.train("CartPole-v1", engine="rllib", steps=256, out=tmp_path / "run", settings=settings)
    policy = raynforce.load(run.path)
    assert policy.spec.acts_with == "torch"
    expected = policy.act(OBS).tolist()
    assert len(set(expected)) == 2
    for local in (True, False):
        with serve(run.path, port=0, token=TOKEN, local=local) as service, service.client() as client:
            assert client.act(OBS).tolist() == expected, local
            assert [int(client.act(obs)) for obs in OBS[:10]] == expected[:10]
            assert json.loads(json.dumps(client.info()))
