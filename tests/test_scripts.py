"""Scripts as people write them: a run in processes started at module level, without ceremony."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import slowly
from rays import TOKEN, Head

import raynforce

ROOT = Path(raynforce.__file__).parents[1]
DEADLINE = 60.0

ENV = """
    import gymnasium, numpy as np
    from gymnasium import spaces

    class Count(gymnasium.Env):
        \"\"\"Counts to five, one point for each step.\"\"\"

        observation_space, action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.full(1, self.t, np.float32), 1.0, self.t >= 5, False, {}

    def make():
        return Count()
"""
ALGORITHM = (ROOT / "examples" / "own_algorithm.py").read_text()
SETTINGS = {"sampling.envs": 2, "sampling.fragment": 16, "eval.episodes": 2, "eval.final_episodes": 2}
SMALL = f'dict(runtime="process", steps=64, progress="quiet", settings={SETTINGS})'

Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script and its neighbours, and run it as `python script.py` in its directory or another."""

    def run(text: str, *, cwd: Path | None = None, **neighbours: str) -> subprocess.CompletedProcess[str]:
        for name, content in {"script": text, **neighbours}.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            cwd=cwd or tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    return run


def worked(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_script_without_a_guard(script: Script, tmp_path: Path) -> None:
    """It runs once, whatever processes are started; its own environment and algorithm are its neighbours'."""
    lines = worked(
        script(
            f"""
            import raynforce
            from my_envs import make
            from my_algos import Reinforce
            print("script")
            run = raynforce.train(make, Reinforce, out="run", **{SMALL})
            print(run.result.stopped, run.result.algo, run.result.env, run.result.eval_return)
            print(run.policy().act([3.0]) in (0, 1))
            """,
            my_envs=ENV,
            my_algos=ALGORITHM,
        )
    )
    assert lines == ["script", "steps done my_algos:Reinforce my_envs:make 5.0", "True"]
    assert json.loads((tmp_path / "run" / "last" / "manifest.json").read_text())["step"] >= 64


@pytest.mark.parametrize("runtime", ["process", *slowly("inline")])
def test_a_script_that_names_its_own_functions_is_told(script: Script, tmp_path: Path, runtime: str) -> None:
    """To find `script:make` the script is imported, and would start itself again and again."""
    done = script(
        textwrap.dedent(ENV)
        + textwrap.dedent(
            f"""
            import raynforce
            print("script")
            raynforce.train("script:make", out="run", **{SMALL.replace("process", runtime)})
            """
        )
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["script", "script"], "once as the script, once as the module"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("raynforce.errors.UsageError: module 'script' starts a run when it is imported")
    assert "__main__" in last
    assert not (tmp_path / "run").exists()


def test_a_script_trains_on_its_own_class_in_processes(script: Script, tmp_path: Path) -> None:
    """It has no guard, and its environment uses another class and a global of the script."""
    text = textwrap.dedent(ENV) + textwrap.dedent(
        f"""
        import raynforce
        LENGTH = 3
        class Short(Count):
            def step(self, action):
                *found, end, cut, info = super().step(action)
                return *found, self.t >= LENGTH, cut, info
        print("script")
        runs = [raynforce.train(Short, out=name, **{SMALL} | dict(runtime=name)) for name in ("inline", "process")]
        print([run.result.eval_return for run in runs], len({{run.result.weights_sha256 for run in runs}}))
        """
    )
    assert worked(script(text)) == ["script", "[3.0, 3.0] 1"]
    config = (tmp_path / "process" / "config.yaml").read_text()
    assert f"env: '__main__:Short@{tmp_path}/script.py'\n" in config, "a reader sees where it is from"
    again = text.partition("runs = ")[0] + textwrap.dedent(
        """
        run = raynforce.resume("process", steps=128, runtime="inline", progress="quiet")
        print(run.result.steps, raynforce.evaluate("process", episodes=2)[0])
        """
    )
    assert worked(script(again)) == ["script", "128 [3. 3.]"], "the same script knows the name"
    (tmp_path / "script.py").rename(tmp_path / "moved.py")
    for words in (["resume", "process"], ["eval", "process"]):
        command = [sys.executable, "-m", "raynforce", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        (line,) = done.stderr.splitlines()
        assert (done.returncode, line.partition(": in Python, ")[0]) == (
            2,
            f"raynforce: '__main__:Short' was defined in {tmp_path}/script.py, not in a module",
        )
        assert "raynforce.resume(run, env=Short) or raynforce.evaluate(run, env=Short)" in line


@pytest.mark.slow
def test_an_algorithm_and_a_network_of_the_script_itself(script: Script) -> None:
    network = (ROOT / "examples" / "own_network.py").read_text().partition("from __future__ import annotations\n")[2]
    lines = worked(
        script(
            ALGORITHM
            + network
            + textwrap.dedent(
                f"""
                import raynforce
                small = {SMALL}
                first = raynforce.train("CartPole-v1", Reinforce, out="algo", **small)
                small["settings"] |= {{"network.factory": lambda *given: make(*given)}}
                second = raynforce.train("CartPole-v1", out="network", **small)
                print(first.result.algo.partition("@")[0], second.config.network.factory.partition("@")[0])
                print(second.policy().act([0.0, 0.0, 0.0, 0.0]) in (0, 1))
                """
            )
        )
    )
    assert lines == ["__main__:Reinforce __main__:<lambda>", "True"]


@pytest.mark.slow
def test_a_script_and_its_neighbour_go_to_a_ray_elsewhere(
    script: Script, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none of its files are: the class is sent, and the module that it imports is shipped."""
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    text = textwrap.dedent(ENV) + textwrap.dedent(
        f"""
        import os, raynforce
        import my_length
        class Short(Count):
            def step(self, action):
                *found, end, cut, info = super().step(action)
                return *found, self.t >= my_length.LENGTH, cut, info
        small = {SMALL} | dict(runtime="ray")
        small["settings"] |= {{"ray.address": {head.address!r}, "ray.ship_code": "always"}}
        print(raynforce.train(Short, out="run", **small).result.eval_return)
        """
    )
    assert worked(script(text, my_length="LENGTH = 3"))[-1] == "3.0"


@pytest.mark.slow
def test_a_guarded_script_may_name_its_own_functions(script: Script) -> None:
    lines = worked(
        script(
            textwrap.dedent(ENV)
            + textwrap.dedent(
                f"""
                if __name__ == "__main__":
                    import raynforce
                    print(raynforce.train("script:make", out="run", **{SMALL}).result.eval_return)
                """
            )
        )
    )
    assert lines == ["5.0"]


@pytest.mark.slow
def test_two_runs_one_of_them_in_a_thread_and_the_directory_changed(script: Script, tmp_path: Path) -> None:
    """The script lives elsewhere than it runs, another directory joins the search path, and the run moves about."""
    elsewhere, more = tmp_path / "elsewhere", tmp_path / "more"
    elsewhere.mkdir()
    more.mkdir()
    (more / "late_envs.py").write_text(textwrap.dedent(ENV))
    lines = worked(
        script(
            f"""
            import os, sys, threading
            import raynforce
            first = raynforce.train("my_envs:make", out="first", **{SMALL})
            sys.path.append({str(more)!r})
            os.chdir("/")
            found = []
            def work():
                found.append(raynforce.train("late_envs:make", out={str(elsewhere / "second")!r}, **{SMALL}))
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            print(first.result.eval_return, found[0].result.eval_return)
            print(first.result.weights_sha256 == found[0].result.weights_sha256)
            print(sorted(threading.enumerate(), key=str) == [threading.main_thread()])
            """,
            cwd=elsewhere,
            my_envs=ENV,
        )
    )
    assert lines == ["5.0 5.0", "True", "True"]
    assert (elsewhere / "first" / "last").exists()


@pytest.mark.slow
def test_resuming_in_other_processes(script: Script, tmp_path: Path) -> None:
    lines = worked(
        script(
            f"""
            import raynforce
            small = {SMALL}
            raynforce.train("my_envs:make", out="run", **small | dict(runtime="inline"))
            run = raynforce.resume("run", steps=128, runtime="process", progress="quiet")
            whole = raynforce.train("my_envs:make", out="whole", **small | dict(runtime="inline", steps=128))
            print(run.result.runtime, run.result.steps, run.result.weights_sha256 == whole.result.weights_sha256)
            """,
            my_envs=ENV,
        )
    )
    assert lines == ["process 128 True"]


@pytest.mark.slow
def test_what_a_neighbour_prints_or_breaks_is_said_once(script: Script) -> None:
    """An environment that breaks in a process: one error, with where it was raised."""
    broken = textwrap.dedent(ENV).replace("self.t += 1", "raise RuntimeError('no licence')")
    done = script(
        f"""
        import raynforce
        raynforce.train("my_envs:make", out="run", **{SMALL})
        """,
        my_envs=broken,
    )
    assert done.returncode == 1
    assert "sampler 0: " in done.stderr.splitlines()[-1]
    assert "no licence" in done.stderr.splitlines()[-1]
    assert 'my_envs.py", line' in done.stderr, "the traceback leads into the user's file"
