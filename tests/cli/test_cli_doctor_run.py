"""`raynforce doctor RUN`: what it tells of a run, and how it shows a fault again."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_envs
import pytest
from cli_helpers import PLAIN, SICK, Answer, contents

from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import FaultHistory

Cli = Callable[..., Answer]
HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}


def broken(fault: str, steps: int = 3, **changes: Any) -> dict[str, Any]:
    """`EnvFault.facts()` of a `Plain` that broke in this way."""
    facts = {"env": PLAIN, "args": {"fault": fault}, "kind": "raised", "lane": 0, "seed": 5, "step": steps}
    facts |= {"cause": "step raised RuntimeError: no licence", "trace": "", "actions": [0] * steps, "dtype": "int64"}
    return facts | changes


@pytest.fixture
def history(run: Path) -> FaultHistory:
    """Of `run`, in the current directory of `cli`."""
    return FaultHistory(RunDirectory(run))


def fragment_of(run: Path) -> dict[str, Any]:
    saved = checkpoint.load(run / "last")
    return {"sampler": saved["sampler_0"], "versions": {"0": saved["policy"]["version"]}}


# -- what it tells ----------------------------------------------------------------------------------------------------


def test_a_quiet_run_is_one_line(cli: Cli, run: Path) -> None:
    before = contents(run)
    answer = cli("doctor", "run")
    assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 1)
    assert answer.out.startswith("run: no faults in 64 steps and ")
    assert answer.out.endswith("(steps done)\n")
    assert cli("doctor", "run", "--json").json["faults"] == 0
    assert contents(run) == before


def test_faults_are_told_with_what_to_do_about_them(cli: Cli, history: FaultHistory) -> None:
    trace = 'Traceback (most recent call last):\n  File "/far/sims.py", line 41, in step\nRuntimeError: no licence\n'
    for seed in range(5):
        history.env_fault(f"sampler {seed % 2}", broken("step raises", seed=seed, trace=trace), 1000 * seed)
    history.role_fault("sampler 1", "died", "sampler 1 was killed by SIGKILL", "restarted", 1, 7000)
    history.recovered("sampler 1", 0.5)
    history.role_fault("sampler 0", "died", "sampler 0 was killed by SIGSEGV", "restarted", 1, 7000)
    history.recovered("sampler 0", 1.5)
    for role in ("sampler 3", "sampler 4"):
        history.role_fault(role, "died", f"{role} died: its node was lost", "restarted", 1, 7500)
    stack = 'Thread 0x1 (most recent call first):\n  File "/far/sims.py", line 7 in wait\n  File "/x.py", line 1 in y\n'
    hangs = "sampler 2 hangs; if it needs that long, raise a limit"
    history.role_fault("sampler 2", "hung", hangs, "given up", 3, 8000, said=stack, facts={"lost": 32})
    history.absent("sampler 2", "given up")
    answer = cli("doctor", "run")
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 100
    words = answer.out.split()
    text = " ".join(words)
    for part in (
        "run ppo on cli_envs:Sick",
        "faults 10: 5 restarts of environments, 4 restarts of roles",
        "back sampler after 1.0 s (median; 1.5 s at most)",
        "lost 32 steps",
        "given up: sampler 2",
        "5 × an environment raised, in samplers 0 and 1 step raised RuntimeError: no licence",
        "no licence at /far/sims.py:41 in step",
        "at step 0 to",
        "at step 4,000; environment restarted",
        "doctor run --replay 3",
        "1 × sampler 1 died was killed by SIGKILL",
        "2 × samplers 3 and 4 died its node was lost",
        "faults.memory_mb",
        "most likely the simulator",
        "1 × sampler 2 hung hangs at /far/sims.py:7 in wait",
        "faults.sample_seconds (now 300)",
    ):
        assert part in text
    assert text.index("sampler 2 hung") < text.index("an environment raised")  # what was given up comes first
    assert "\x1b" not in answer.out
    data = cli("doctor", "run", "--json").json
    assert (data["faults"], data["given_up"], data["lost_steps"]) == (10, ["sampler 2"], 32)
    assert [g["count"] for g in data["groups"]] == [1, 5, 2, 1, 1]
    assert all(g["advice"] for g in data["groups"])


def test_colours_are_for_terminals(cli: Cli, history: FaultHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    history.env_fault("sampler 0", broken("step raises"), 1)
    plain = cli("doctor", "run").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    coloured = cli("doctor", "run").out
    assert "\x1b[1mrun\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli("doctor", "run").out == plain


def test_runs_that_are_running_were_killed_or_failed(cli: Cli, run: Path) -> None:
    directory = RunDirectory(run)
    directory.event("started", steps=64)
    with directory.locked():
        assert cli("doctor", "run").out.endswith("(still running)\n")
    answer = cli("doctor", "run")
    assert "resumed once" in answer.out
    assert "it left no word of its end" in answer.out
    with directory.metrics.open("a") as file:
        file.write('{"step": 68, "charts/SPS": 1.0}\n{"step": 66, "eval/return": 1.0}\n{"st')
    assert "ended   68 steps in " in cli("doctor", "run").out
    directory.event("failed", steps=70, reason="EnvError: no licence")
    assert "ended   70 steps in " in cli("doctor", "run").out
    assert "failed, EnvError: no licence" in cli("doctor", "run").out


@pytest.mark.parametrize("damage", ["no events", "torn events", "spoilt config"])
def test_a_damaged_run_is_told_of_as_far_as_possible(cli: Cli, run: Path, damage: str) -> None:
    if damage == "no events":
        (run / "events.jsonl").unlink()
    elif damage == "torn events":
        (run / "events.jsonl").write_text('{"time": 1.0, "eve')
    else:
        (run / "config.yaml").write_text("][")
    answer = cli("doctor", "run")
    assert (answer.code, answer.err) == (0, "")
    assert ("no faults" if damage == "spoilt config" else "nothing has happened yet") in answer.out
    assert cli("doctor", "run", "--json").json["faults"] == 0


@pytest.mark.parametrize("path", ["empty", "./none", "run/none", "/none", "..", "run/config.yaml", "empty/", "~/none"])
def test_a_path_that_is_no_run(cli: Cli, run: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    answer = cli("doctor", path)
    answer.refused(2, str(Path(path)), "run")
    assert "gymnasium" not in answer.err
    assert "did you mean" not in answer.err


def test_an_environment_is_not_taken_for_a_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "CartPole-v1").mkdir()
    assert "ready to train" in cli("doctor", "CartPole-v1").out
    cli("doctor", "ALE/Nothing-v5").refused(2, "not registered")


WRONG = {
    "replay of an environment": (["CartPole-v1", "--replay"], ["--replay is for a run"]),
    "replay of nothing": (["--replay", "2"], ["--replay is for a run"]),
    "run after replay": (["--replay", "run"], ["doctor RUN --replay"]),
    "debugger of an environment": (["CartPole-v1", "--debugger"], ["--debugger is for a run"]),
    "debugger alone": (["run", "--debugger"], ["--debugger goes with --replay"]),
    "seconds alone": (["run", "--seconds", "3"], ["--seconds goes with --replay"]),
    "set": (["run", "--set", "env_args.x=1"], ["--set is for an environment"]),
    "no number": (["run", "--replay", "x"], ["--replay", "'x'"]),
    "number 0": (["run", "--replay", "0"], ["--replay", "from 1"]),
    "no seconds": (["run", "--replay", "1", "--seconds", "0"], ["--seconds"]),
    "not there": (["run", "--replay", "9"], ["run has no recorded fault 9: there is 1, 2"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(cli: Cli, history: FaultHistory, name: str) -> None:
    history.env_fault("sampler 0", broken("step raises"), 1)
    history.env_fault("sampler 0", broken("step raises"), 1)
    words, expected = WRONG[name]
    cli("doctor", *words).refused(2, *expected)


def test_a_run_without_evidence(cli: Cli, run: Path) -> None:
    cli("doctor", "run", "--replay").refused(2, "no recorded fault")


# -- seeing it again --------------------------------------------------------------------------------------------------


def test_an_environment_that_raises_again(cli: Cli, history: FaultHistory) -> None:
    history.env_fault("sampler 0", broken("none of it"), 1)
    history.env_fault("sampler 0", broken("step raises", steps=1), 1)
    answer = cli("doctor", "run", "--replay")
    assert (answer.code, answer.err) == (1, "")
    assert answer.out.startswith("recorded fault 2 of run: sampler 0: step raised RuntimeError: no licence\nTraceback")
    assert "cli_envs.py" in answer.out
    assert "replay.py" not in answer.out
    assert answer.out.splitlines()[-1] == "broke again at step 1: RuntimeError: no licence"
    data = cli("doctor", "run", "--replay", "2", "--json").json
    assert (data["broke"], data["step"], data["evidence"], data["kind"]) == (True, 1, 2, "episode")


GARBAGE = {
    "nan obs": "the observation 'obs' has nan at [0]; expected finite numbers",
    "shape": "the observation 'obs' has shape (2,); expected (1,)",
    "none": "the observation 'obs' is a NoneType",
    "nan reward": "the reward is nan; expected a finite number",
    "text reward": "the reward is '1' (str); expected one number",
}


@pytest.mark.parametrize("fault", GARBAGE)
def test_an_environment_that_returns_garbage_again(cli: Cli, history: FaultHistory, fault: str) -> None:
    history.env_fault("sampler 0", broken(fault, steps=1, kind="garbage"), 1)
    answer = cli("doctor", "run", "--replay", "1")
    assert (answer.code, answer.err) == (1, "")
    assert f"broke again at step 1: {GARBAGE[fault]}" in answer.out


def test_an_environment_whose_reset_raises_again(cli: Cli, history: FaultHistory) -> None:
    history.env_fault("sampler 0", broken("reset raises", steps=0), 1)
    assert "broke again in reset: RuntimeError: no licence" in cli("doctor", "run", "--replay").out


def test_environments_that_do_not_break_as_they_did(cli: Cli, history: FaultHistory) -> None:
    history.env_fault("sampler 0", broken(""), 1)
    history.env_fault("sampler 0", broken("", steps=9, cause="b"), 1)
    history.env_fault("sampler 0", broken("step raises", steps=4, cause="c"), 1)
    first, second, third = (cli("doctor", "run", "--replay", n) for n in "123")
    assert "did not break in 3 steps. Either it is not determined by its seed" in first.out
    assert "did not break: here the episode ended at step 5" in second.out
    assert "broke at step 1, in the run at step 4: RuntimeError" in third.out
    assert (first.code, second.code, third.code) == (0, 0, 1)


def test_torn_evidence_and_an_environment_that_is_gone(cli: Cli, run: Path, history: FaultHistory) -> None:
    history.env_fault("sampler 0", broken("", env="cli_envs:Gone"), 1)
    cli("doctor", "run", "--replay").refused(2, "cli_envs", "Gone")
    path = run / "faults" / "0001.json"
    path.write_text(json.dumps({"kind": "episode", "env": PLAIN}))
    cli("doctor", "run", "--replay").refused(2, "torn", "seed")
    path.write_text("{")
    cli("doctor", "run", "--replay").refused(2, "no recorded fault")


def test_post_mortem_stops_in_the_environment(cli: Cli, history: FaultHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    history.env_fault("sampler 0", broken("step raises", steps=1), 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p where\nup\np action, self.t\nq\n"))
    answer = cli("doctor", "run", "--replay", "--debugger")
    assert answer.code == 1
    assert "cli_envs.py" in answer.out
    assert "(Pdb) 'step'" in answer.out
    assert "(Pdb) (0, 1)" in answer.out


def test_before_stops_right_before_the_step_that_broke(
    cli: Cli, history: FaultHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.env_fault("sampler 0", broken("", env=SICK, args={"fault": "step raises"}, step=3), 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p step, action, env.t\nq\n"))
    answer = cli("doctor", "run", "--replay", "--before")
    assert (answer.code, "(Pdb) (3, 0, 2)" in answer.out) == (0, True)
    assert answer.out.endswith("left by the debugger\n")


MY_ENV = """
import json
from cli_envs import Plain

class Mine(Plain):
    def step(self, action):
        limit = 2
        if self.t >= limit:
            json.loads("{")
        return super().step(action)
"""


def test_it_works_from_a_shell_with_a_module_of_the_current_directory(
    run: Path, history: FaultHistory, tmp_path: Path
) -> None:
    """The debugger reads its commands from a pipe, and stops in the environment, not in the library it called."""
    (tmp_path / "my_env.py").write_text(MY_ENV)
    history.env_fault("sampler 0", broken("", env="my_env:Mine", args={}), 1)

    def shell(*words: str, commands: str = "") -> tuple[int, str]:
        command = [sys.executable, "-m", "raynforce", "doctor", "run", "--replay", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, input=commands, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout

    code, out = shell("--before", commands="p step\nq\n")
    assert (code, "(Pdb) 3\n" in out) == (0, True)
    code, out = shell("--debugger", commands="p limit\nq\n")
    assert (code, "(Pdb) 2\n" in out) == (1, True)
    assert "broke again at step 3: JSONDecodeError: " in out.splitlines()[-1]


def test_an_episode_too_long_to_be_kept_is_refused_in_one_line(cli: Cli, history: FaultHistory) -> None:
    facts = broken("step raises", step=2_000_000, too_long=True)
    del facts["actions"], facts["dtype"]
    history.env_fault("sampler 0", facts, 1)
    answer = cli("doctor", "run", "--replay")
    answer.refused(2, "too long to be replayed: it broke at step 2,000,000, ", "reset(seed=5)")


def test_a_fragment_is_sampled_again(
    cli: Cli, run: Path, history: FaultHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.role_fault("sampler 0", "died", "killed", "restarted", 1, 1, evidence=lambda: fragment_of(run))
    answer = cli("doctor", "run", "--replay")
    assert (answer.code, answer.err) == (0, "")
    assert "did not break: 32 steps in" in answer.out

    def bad(self: Any, version: Any) -> Any:
        raise OSError("the server is gone")

    monkeypatch.setattr("raynforce.roles.sampler.Sampler.sample", bad)
    answer = cli("doctor", "run", "--replay", "1")
    assert (answer.code, "broke again: OSError: the server is gone" in answer.out) == (1, True)


def test_a_fragment_that_does_not_fit_the_run(cli: Cli, run: Path, history: FaultHistory) -> None:
    history.role_fault(
        "sampler 0", "died", "killed", "restarted", 1, 1, evidence=lambda: {"sampler": {}, "versions": {"0": {}}}
    )
    cli("doctor", "run", "--replay").refused(2, "does not fit")
    (run / "faults" / "0001" / "sampler.json").unlink()
    cli("doctor", "run", "--replay").refused(2, "torn")


NO_RETURN = """
import ctypes, os, time
from cli_envs import Plain

class NoReturn(Plain):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def step(self, action):
        if self.how == "sleep":
            time.sleep(99)
        elif self.how == "hold the lock":
            ctypes.PyDLL(None).sleep(99)
        elif self.how == "crash":
            ctypes.string_at(0)
        os._exit(7)
"""


def no_return(how: str, history: FaultHistory, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "no_return.py").write_text(NO_RETURN)
    history.env_fault("sampler 0", broken("", env="no_return:NoReturn", args={"how": how}), 1)
    command = [sys.executable, "-m", "raynforce", "doctor", "run", "--replay", "--seconds", "0.5", *words]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def test_a_hang_shows_its_stack_and_ends(history: FaultHistory, tmp_path: Path) -> None:
    done = no_return("sleep", history, tmp_path)
    assert done.returncode == 1
    assert "no_return.py" in done.stderr
    assert done.stdout.startswith("recorded fault 1 of run")


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        ("sleep", "broke: it hung for 0:00:00.500000 in step (no_return.py:12)"),
        ("hold the lock", "broke: it hung for 0:00:00.500000 in step (no_return.py:14)"),
        ("crash", "broke: its process was killed by SIGSEGV"),
        ("exit", "broke: its process ended with exit code 7"),
    ],
)
def test_json_says_so_if_it_never_returns(history: FaultHistory, tmp_path: Path, how: str, verdict: str) -> None:
    done = no_return(how, history, tmp_path, "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout.splitlines()[-1])
    assert (data["broke"], data["verdict"], data["hung"]) == (True, verdict, "hung" in verdict)
    assert ("no_return.py" in data["trace"]) == (how != "exit")


def test_json_is_not_printed_for_what_cannot_be_replayed(cli: Cli, history: FaultHistory) -> None:
    history.env_fault("sampler 0", broken("", env="cli_envs:Gone"), 1)
    cli("doctor", "run", "--replay", "--json").refused(2, "cli_envs", "Gone")


def test_progress_is_shown_when_it_takes_long(cli: Cli, history: FaultHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.cli.replay.TELL_AFTER", 0.02)
    step = cli_envs.Plain.step

    def slow(self: cli_envs.Plain, action: int) -> Any:
        time.sleep(0.05)
        return step(self, action)

    monkeypatch.setattr(cli_envs.Plain, "step", slow)
    history.env_fault("sampler 0", broken(""), 1)
    assert "of 3, 0 s; after 30 s without progress its stack is shown\n" in cli("doctor", "run", "--replay").err
