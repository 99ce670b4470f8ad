"""An exported folder acts as the policy does, and needs nothing of ours; where it does not, it is not written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import CASES, SEEN, acting, layered, nested, saved
from gymnasium import spaces

import raynforce
from raynforce.cli import main
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.exporting import FORMATS, export, verifying
from raynforce.policies.acting import ActingSpec
from raynforce.policy import read_policy

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'raynforce[onnx]'")
MANY = 10_000
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ (Debian: apt install g++)")


def spec_of(name: str) -> ActingSpec:
    return layered(name) if name in ("wide", "squashed") else acting(*CASES[name])


def observations(path: Path, count: int) -> dict[str, np.ndarray]:
    return verifying.random_observations(*read_policy(path), count)


@pytest.mark.parametrize("name", [*CASES, "wide", "squashed"])
def test_onnx_equals_load_on_many_observations(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, spec_of(name))
    made = export(path, "onnx", tmp_path / "onnx")
    session = onnxruntime.InferenceSession(made.path / "policy.onnx", providers=["CPUExecutionProvider"])
    seen = observations(path, MANY)
    found, scores = session.run(None, seen)
    wanted = raynforce.load(path).act(nested(seen))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype == np.int64:
        best = np.sort(scores, axis=1)
        clear = slice(None) if name == "planes" else best[:, -1] - best[:, -2] > 2e-5
        assert (found[clear] == wanted[clear]).mean() > (0.999 if name == "planes" else 0.9999999)
    else:
        span = 500 if name in ("continuous", "dict", "wide", "squashed") else np.maximum(1, np.abs(wanted))
        assert (np.abs(found - wanted) <= 1e-5 * span).all()
    assert len(np.unique(found.reshape(MANY, -1), axis=0)) > 1, "an answer that is always the same proves nothing"


@pytest.mark.parametrize("name", ["dict", "planes", "squashed", "dqn"])
def test_numpy_alone_acts_the_same(name: str, tmp_path: Path) -> None:
    made = export(saved(tmp_path, spec_of(name)), "numpy", tmp_path / "out")
    assert (made.observations, made.error <= 1e-5) == (1000, True)
    assert made.files == ["README.md", "policy.json", "predict.py", "weights.npz"]


@pytest.mark.parametrize("name", ["dict", pytest.param("squashed", marks=pytest.mark.slow)])
def test_torchscript_acts_the_same(name: str, tmp_path: Path) -> None:
    assert export(saved(tmp_path, spec_of(name)), "torchscript", tmp_path / "out").error <= 1e-5


@compiles
def test_cpp_acts_the_same(tmp_path: Path) -> None:
    made = export(saved(tmp_path, spec_of("dict")), "cpp", tmp_path / "out")
    assert made.error <= 1e-5
    assert "act.cpp" in made.files


@pytest.mark.parametrize("to", ["onnx", "numpy", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_predict_takes_what_the_environment_gives_and_is_short(to: str, tmp_path: Path) -> None:
    path = saved(tmp_path, spec_of("mlp discrete"))
    folder = export(path, to, tmp_path / "out").path
    assert len((folder / "predict.py").read_text().splitlines()) <= 50
    assert "raynforce" not in (folder / "predict.py").read_text()
    obs = [0.5, -1, 2, 0, 1]
    done = subprocess.run(
        [sys.executable, "-P", "predict.py", json.dumps(obs)], cwd=folder, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == raynforce.load(path).act(np.array(obs, np.float32))
    readme = (folder / "README.md").read_text()
    assert "| `obs` | `[N, 5]` | float32 |" in readme
    assert "| `action` | `[N]` | int64" in readme


def test_a_folder_that_answers_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, spec_of("continuous"))
    right = verifying.expected

    def wrong(*args: Any) -> Any:
        found = right(*args)
        return found._replace(action=found.action + np.float32(0.02))  # of a range that is 1000 wide: 4e-5 of its half

    monkeypatch.setattr(verifying, "expected", wrong)
    with pytest.raises(RaynforceError, match=r"differs from load\(…\).act by 4e-05 .* at most 1e-05 .* nothing was"):
        export(path, "numpy", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy"]


def test_a_wrong_choice_is_found_and_a_tie_is_forgiven(tmp_path: Path) -> None:
    spec = spec_of("planes")
    scores = np.zeros((2, 7), np.float32)
    scores[:, 1], scores[0, 4] = 1, 1
    wanted = verifying.Wanted(np.array([[2, 0], [2, -1]]), scores)
    assert verifying.compare(spec, wanted, np.array([[2, 0], [2, 2]])).error == 0  # of the second all four are equal
    for wrong in ([[3, 0], [2, -1]], [[2, 1], [2, -1]], [[9, 0], [2, -1]]):
        with pytest.raises(RaynforceError, match="differs"):
            verifying.compare(spec, wanted, np.array(wrong))


def own_net(leaves: Sequence[Any], outputs: Mapping[str, int]) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(5, 8)
            self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(8, size) for name, size in outputs.items()})

        def forward(self, obs: Any) -> Any:
            return {name: head(torch.sin(self.body(obs))) for name, head in self.heads.items()}

    return Net()


@pytest.mark.parametrize("done", [spaces.Discrete(3), pytest.param(spaces.Box(-2, 2, (2,)), marks=pytest.mark.slow)])
def test_a_torch_module_goes_to_torchscript_and_says_so_elsewhere(done: Any, tmp_path: Path) -> None:
    from raynforce.policies.acting import PolicyVersion
    from raynforce.policies.torch_net import TorchActor
    from raynforce.runs import checkpoint

    spec = acting(SEEN["vector"], done, "ppo", {"factory": "test_export:own_net", "normalize_obs": True})
    params = TorchActor(spec)._net.flat.numpy().copy()
    normaliser = np.full(5, 0.5, np.float32), np.full(5, 0.1, np.float32)
    policy = {"acting": spec.to_json(), "version": PolicyVersion(1, params, *normaliser).state()}
    checkpoint.save(tmp_path / "policy", {"policy": policy}, step=1)
    for to in set(FORMATS) - {"torchscript"}:
        with pytest.raises(UsageError, match=r"torch module .* use --to torchscript"):
            export(tmp_path / "policy", to, tmp_path / "out")
    assert export(tmp_path / "policy", "torchscript", tmp_path / "out").error <= 1e-5


@pytest.mark.slow
def test_rllibs_modules_converted_and_kept(tmp_path: Path) -> None:
    ppo = pytest.importorskip("ray.rllib.algorithms.ppo", reason="pip install 'raynforce[rllib]'")
    from raynforce.engines.rllib.kept import keep
    from raynforce.engines.rllib.modules import convert
    from raynforce.envs.describe import describe
    from raynforce.policies.acting import PolicyVersion
    from raynforce.runs import checkpoint

    seen, done = SEEN["vector"], spaces.Box(-2, 2, (2,))
    spec = ppo.PPOConfig().get_rl_module_spec(spaces={"default_policy": (seen, done)}, inference_only=False)
    module = spec.build()
    for name, formats in {"converted": FORMATS, "kept": ("torchscript",)}.items():
        made = (keep if name == "kept" else convert)(module, describe("env", seen, done), normalize=False)
        policy = {"acting": made.acting.to_json(), "version": PolicyVersion(1, made.params(module)).state()}
        checkpoint.save(tmp_path / name, {"policy": policy}, step=1)
        for to in formats:
            assert export(tmp_path / name, to, tmp_path / f"{name}-{to}").error <= 1e-5


def test_the_command_and_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, spec_of("mlp discrete"))
    assert main(["export", "policy", "--to", "numpy", "out", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["to"], told["observations"], Path(told["path"]).name) == ("numpy", 1000, "out")
    for words, says in {
        ("policy", "out", "--to", "numpy"): "is there already",
        ("policy", "new", "--to", "onxx"): "did you mean 'onnx'",
        ("nothing", "new", "--to", "onnx"): "there is no run or checkpoint at nothing",
        ("policy", "new"): "--to",
        (".", "new", "--to", "onnx"): "holds no checkpoint",
    }.items():
        assert main(["export", *words]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "new").exists()
