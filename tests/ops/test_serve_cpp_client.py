"""The client of the C++ SDK asks a served policy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="there is no uvicorn: pip install 'raynforce[serve]'")

from served_policies import TOKEN, save

import raynforce
from raynforce.ops.serving.service import serve
from raynforce.policy import load

ROOT = Path(raynforce.__file__).parents[1]
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the client with (Debian: apt install g++)")
    program = str(tmp_path_factory.mktemp("client") / "client")
    words = [compiler, "-std=c++17", "-O0", *WARNINGS, "-pthread", f"-I{ROOT / 'sdk' / 'cpp'}"]
    done = subprocess.run([*words, str(ROOT / "tests/ops/client.cpp"), "-o", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_actions_equal_those_of_load(env: str, client: str, tmp_path: Path) -> None:
    path, space = save(tmp_path / "policy", env=env)
    obs = np.random.default_rng(0).normal(0, 1, (20, *space.shape)).astype(np.float32)
    lines = "\n".join(" ".join(map(str, row)) for row in obs.tolist())
    with serve(path, port=0, token=TOKEN, local=True) as service:
        words = [client, service.url, TOKEN]
        done = subprocess.run(words, input=f"{lines}\n1 2 3 4 5 6\n", capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
        *answers, refused = done.stdout.splitlines()
        assert refused.startswith("refused 422 obs has shape [6]")
        assert all(answer.split()[-1] == env for answer in answers)
        found = np.array([[float(word) for word in answer.split()[:-1]] for answer in answers])
        np.testing.assert_allclose(found, load(path).act(obs).reshape(20, -1), rtol=1e-5, atol=1e-6)
        stranger = subprocess.run([client, service.url, "wrong"], input="0 0 0 0\n", capture_output=True, text=True)
        assert "refused 401" in stranger.stdout
    gone = subprocess.run(words, input="0 0 0 0\n", capture_output=True, text=True, timeout=60)
    assert (gone.returncode, "cannot be reached" in gone.stdout) == (2, True)
