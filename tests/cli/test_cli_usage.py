"""Wrong use of the command line is one clear line and exit code 2; settings come from where they should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import PLAIN, TINY, Answer

Cli = Callable[..., Answer]
CARTPOLE = ["train", "ppo", "CartPole-v1"]
SMALL = ["--set", "algorithm.buffer_size=300"]


def config(cli: Cli, *words: str) -> dict[str, Any]:
    """The settings that a command line comes to."""
    answer = cli("train", *words, "--no-preset", "--print-config")
    assert (answer.code, answer.err) == (0, "")
    found: dict[str, Any] = yaml.safe_load(answer.out)
    return found


# -- commands and options ---------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], ["--help"]),
    "command": (["tarin"], ["'tarin'", "did you mean 'train'", "resume, eval, record, runs, show, plot"]),
    "option": ([*CARTPOLE, "--setps", "5"], ["'--setps'", "did you mean '--steps'"]),
    "option with value": ([*CARTPOLE, "--sed=1"], ["--sed", "did you mean '--seed'"]),
    "no abbreviations": ([*CARTPOLE, "--step", "5"], ["did you mean '--steps'"]),
    "option before": (["--jsn", *CARTPOLE], ["'--jsn'", "did you mean '--json'"]),
    "eval's option": (["eval", "x", "--chekpoint", "last"], ["did you mean '--checkpoint'"]),
    "eval's choice": (["eval", "x", "--checkpoint", "worst"], ["'worst'", "best", "last"]),
    "no value": ([*CARTPOLE, "--steps"], ["--steps", "expected one argument"]),
    "value for a flag": ([*CARTPOLE, "--json=1"], ["--json"]),
    "too much": ([*CARTPOLE, "extra"], ["'extra'"]),
    "no env": (["train", "ppo"], ["ALGO and ENV", "raynforce train ppo CartPole-v1"]),
    "no algo and env": (["train"], ["CartPole-v1"]),
    "no run": (["resume"], ["RUN"]),
    "no run to evaluate": (["eval"], ["RUN"]),
    # algorithms
    "algo": (
        ["train", "pppo", "CartPole-v1"],
        ["'pppo'", "did you mean 'ppo'", "ppo, dqn, sac, td3, impala, a3c", "module:Class"],
    ),
    "algo in capitals": (["train", "DQN", "CartPole-v1"], ["did you mean 'dqn'"]),
    "an option for another runtime": (
        ["train", "ppo", "CartPole-v1", "--runtime", "process", "--sampler-cpus", "2"],
        ["--sampler-cpus is for Ray", "the runtime is process", "--runtime ray"],
    ),
    "algo empty": (["train", "", "CartPole-v1"], ["''", "ppo, dqn, sac, td3, impala, a3c"]),
    "algo unicode": (["train", "日本", "CartPole-v1"], ["'日本'"]),
    "swapped": (["train", "CartPole-v1", "ppo"], ["ALGO comes before ENV", "raynforce train ppo CartPole-v1"]),
    "algo is a function": (["train", "os:getcwd", "CartPole-v1"], ["os:getcwd", "subclass of raynforce.Algorithm"]),
    "algo without a name": (["train", "os:", "CartPole-v1"], ["'os:'", "module:name"]),
    "algo misspelt": (["train", "raynforce.algos.ppo:PPO2", "CartPole-v1"], ["did you mean 'PPO'"]),
    # environments
    "env": (["train", "ppo", "Cartpole-v1"], ["'Cartpole-v1'", "did you mean 'CartPole-v1'"]),
    "env's version": (["train", "ppo", "CartPole-v9"], ["no such version", "did you mean 'CartPole-v1'"]),
    "env empty": (["train", "ppo", ""], ["ENV"]),
    "env unicode": (["train", "ppo", "日本語"], ["'日本語'"]),
    "env with a line break": (["train", "ppo", "Cart\nPole"], ["'Cart\\nPole'"]),
    "env without a name": (["train", "ppo", "module:"], ["'module:'", "module:name"]),
    "env without a module": (["train", "ppo", ":x"], ["':x'", "module:name"]),
    "env's module": (["train", "ppo", "no_such_module:x"], ["no module named 'no_such_module'"]),
    "env's file": (["train", "ppo", "cli_envs.py:Plain"], ["write 'cli_envs'"]),
    "env's name": (["train", "ppo", "cli_envs:plain"], ["'plain'", "did you mean 'Plain'"]),
    "env is no env": (["train", "ppo", "os:getcwd"], ["returned a builtins.str", "gymnasium.Env"]),
    "env is a number": (["train", "ppo", "cli_envs:number"], ["a int", "class or function"]),
    "env's factory": (["train", "ppo", PLAIN, "--set", "env_args.fault=make raises"], ["RuntimeError: no licence"]),
    "env's arguments": (["train", "ppo", PLAIN, "--set", "env_args.colour=1"], ["'colour'", "it takes fault"]),
    "gymnasium's arguments": ([*CARTPOLE, "--set", "env_args.colour=1"], ["'colour'"]),
    "keys that are no words": ([*CARTPOLE, "--set", "env_args={1: 2}"], ["keywords must be strings"]),
    "dqn on continuous actions": (["train", "dqn", "Pendulum-v1"], ["dqn needs discrete actions", "use ppo"]),
    "dqn on a user's continuous actions": (["train", "dqn", "cli_envs:Continuous"], ["discrete", "use ppo"]),
    # numbers
    "steps negative": ([*CARTPOLE, "--steps", "-5"], ["steps = '-5'", "whole number from 1"]),
    "steps zero": ([*CARTPOLE, "--steps", "0"], ["steps = '0'"]),
    "steps absurd": ([*CARTPOLE, "--steps", "1e99"], ["steps = '1e99'", "to 1e+12"]),
    "steps infinite": ([*CARTPOLE, "--steps", "inf"], ["steps = 'inf'"]),
    "steps not a number": ([*CARTPOLE, "--steps", "nan"], ["steps = 'nan'"]),
    "steps a fraction": ([*CARTPOLE, "--steps", "1.5"], ["whole number"]),
    "steps empty": ([*CARTPOLE, "--steps", ""], ["steps = ''"]),
    "steps beyond all numbers": ([*CARTPOLE, "--set", f"steps={'9' * 400}"], ["whole number from 1"]),
    "seed": ([*CARTPOLE, "--seed", "x"], ["seed = 'x'", "whole number from 0"]),
    "seed negative": ([*CARTPOLE, "--seed", "-1"], ["seed = '-1'"]),
    "envs zero": ([*CARTPOLE, "--envs", "0"], ["sampling.envs = '0'", "from 1 to 100000"]),
    "envs absurd": ([*CARTPOLE, "--envs", "1e9"], ["sampling.envs = '1e9'"]),
    "samplers": ([*CARTPOLE, "--samplers", "-3"], ["sampling.samplers = '-3'"]),
    "target": ([*CARTPOLE, "--target", "high"], ["target = 'high'", "a number"]),
    "target infinite": ([*CARTPOLE, "--target", "inf"], ["target = 'inf'"]),
    "episodes": (["eval", "x", "--episodes", "0"], ["--episodes = '0'", "from 1"]),
    "episodes absurd": (["eval", "x", "--episodes", "1e9"], ["--episodes = '1e9'"]),
    "eval's seed": (["eval", "x", "--seed", "-1"], ["--seed = '-1'"]),
    "a buffer of one": (["train", "dqn", "CartPole-v1", "--set", "algorithm.buffer_size=1"], ["buffer_size"]),
    "a buffer beyond the memory": (["train", "dqn", "CartPole-v1", "--set", "algorithm.buffer_size=1e12"], ["GB"]),
    # settings
    "set without its section": ([*CARTPOLE, "--set", "gamma=1"], ["did you mean 'algorithm.gamma'"]),
    "set another's": ([*CARTPOLE, "--set", "algorithm.buffer_size=9"], ["unknown setting 'algorithm.buffer_size'"]),
    "set no value": ([*CARTPOLE, "--set", "sampling.envs"], ["section.setting=value"]),
    "set an empty value": ([*CARTPOLE, "--set", "sampling.envs="], ["sampling.envs = ''"]),
    "set no key": ([*CARTPOLE, "--set", "=3"], ["section.setting=value"]),
    "set nothing": ([*CARTPOLE, "--set", ""], ["section.setting=value"]),
    "set dots": ([*CARTPOLE, "--set", "..=3"], ["unknown setting"]),
    "set a section": ([*CARTPOLE, "--set", "algorithm=3"], ["algorithm = 3", "not a section"]),
    "set a section twice": ([*CARTPOLE, "--set", "sampling=3", "--set", "sampling.envs=1"], ["cannot both be set"]),
    "set a list": ([*CARTPOLE, "--set", "algorithm.gamma=[1]"], ["algorithm.gamma = [1]", "a number from 0 to 1"]),
    "set a choice": ([*CARTPOLE, "--set", "network.activation=tan"], ["tanh, relu", "did you mean 'tanh'"]),
    "set widths": ([*CARTPOLE, "--set", "network.hidden=[64, a]"], ["network.hidden = 'a'"]),
    "set code": ([*CARTPOLE, "--set", "steps=!!python/object/apply:os.getcwd []"], ["steps = "]),
    "set itself": ([*CARTPOLE, "--set", "steps=&a [*a]"], ["steps = [[...]]"]),
    "set bytes that are no text": ([*CARTPOLE, "--set", "\udcff=1"], ["unknown setting"]),
    "set another format": ([*CARTPOLE, "--set", "config_version=2"], ["config_version = 2", "reads 1"]),
    "set a device": ([*CARTPOLE, "--set", "learner.device=gpu"], ["'gpu'", "auto, cpu, cuda"]),
    "runtime": ([*CARTPOLE, "--runtime", "inlin"], ["runtime = 'inlin'", "did you mean 'inline'"]),
    "topology": ([*CARTPOLE, "--topology", "ring"], ["topology = 'ring'", "sync"]),
    "PPO's gradients": ([*CARTPOLE, "--topology", "shared-agent"], ["'shared-agent'", "dqn or a3c", "ppo"]),
    "more workers than the bound": (
        ["train", "a3c", "CartPole-v1", "--topology", "shared-agent", "--samplers", "40"],
        ["stream.max_lag = 32", "40 samplers", "stream.max_lag=160"],
    ),
    "rewards scaled by workers": (
        ["train", "a3c", "CartPole-v1", "--topology", "shared-agent", "--set", "learner.scale_rewards=true"],
        ["learner.scale_rewards", "shared-agent"],
    ),
    "a buffer too small to share": (
        ["train", "dqn", "CartPole-v1", "--topology", "shared-agent", "--samplers", "4", *SMALL],
        ["algorithm.buffer_size = 300", "each of 4 workers 75", "it takes 448"],
    ),
    "set for the doctor": (["doctor", "CartPole-v1", "--set", "steps=3"], ["env_args.KEY=VALUE"]),
    "doctor": (["doctor", "Cartpole"], ["did you mean 'CartPole-v1'"]),
    "config missing": ([*CARTPOLE, "--config", "no.yaml"], ["'no.yaml'", "No such file"]),
    "config a directory": ([*CARTPOLE, "--config", "."], ["'.'", "Is a directory"]),
    "one letter wrong": ([*CARTPOLE, "--set", "sampling.env=3"], ["'sampling.env'", "did you mean 'sampling.envs'"]),
    "option alone": (["--bogus"], ["--bogus"]),
    "out empty": ([*CARTPOLE, *TINY, "--out", ""], ["--out"]),
    "config empty": ([*CARTPOLE, "--config", "", "--print-config"], ["--config"]),
    "target empty": ([*CARTPOLE, "--target", "", "--print-config"], ["target"]),
    "an argument too much": ([*CARTPOLE, "extra"], ["argument 'extra'"]),
    "a device far away": ([*CARTPOLE, "--set", f"learner.device=cuda:{10**20}", "--out", "x"], ["learner.device"]),
    "an unfinished algorithm": (["train", "cli_envs:Unfinished", "CartPole-v1"], ["cli_envs:Unfinished", "heads"]),
    "an algorithm that is a mapping": (
        ["train", "--set", "env=CartPole-v1", "--set", "algo={a: 1}"],
        ["algo = {'a': 1}"],
    ),
    "env_args that are none": (["doctor", "CartPole-v1", "--set", "env_args=3"], ["env_args = 3"]),
    "a factory that exits": (["train", "ppo", PLAIN, "--set", "env_args.fault=make exits"], [PLAIN, "SystemExit"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path, name: str) -> None:
    words, expected = WRONG[name]
    answer = cli(*words)
    answer.refused(2, *expected)
    assert os.listdir(tmp_path) == []


FILES: dict[str, tuple[bytes, str]] = {
    "brackets": (b"a: [\n", "line 2"),
    "tab": (b"sampling:\n\tenvs: 3\n", "line 2"),
    "two documents": (b"seed: 1\n---\nseed: 2\n", "line 2"),
    "code": (b"seed: !!python/object/apply:os.system [echo]\n", "line 1"),
    "binary": (b"\xff\xfe\x00\x01", "not valid YAML"),
    "nul": (b"seed: \x00\n", "not valid YAML"),
    "list": (b"- 1\n", "key: value"),
    "text": (b"hello\n", "key: value"),
    "unknown": (b"sampling: {env_s: 3}\n", "did you mean 'sampling.envs'"),
    "number for a section": (b"sampling: 3\n", "sampling = 3"),
    "numbers as keys": (b"1: 2\n", "unknown setting '1'"),
    "out of range": (b"steps: -1\n", "steps = -1"),
    "dotted": (b"sampling.envs: 3\n", "section"),
    "itself": (b"sampling: &a\n  envs: *a\n", "sampling.envs = "),
    "another format": (b"config_version: 2\n", "config_version = 2"),
    "nested without end": (b"[" * 2000, "not valid YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_config_file_is_one_line(cli: Cli, tmp_path: Path, name: str) -> None:
    data, expected = FILES[name]
    (tmp_path / "my.yaml").write_bytes(data)
    cli(*CARTPOLE, "--config", "my.yaml").refused(2, expected)


def test_debug_adds_the_traceback_and_the_line_stays_last(cli: Cli) -> None:
    answer = cli("train", "ppo", "Cartpole-v1", "--debug")
    assert answer.code == 2
    assert answer.err.startswith("Traceback (most recent call last):\n")
    assert answer.err.splitlines()[-1].startswith("raynforce: env 'Cartpole-v1'")


@pytest.mark.parametrize("command", ["", "train", "resume", "eval", "runs", "show", "doctor"])
def test_help(cli: Cli, command: str) -> None:
    answer = cli(*command.split(), "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"usage: raynforce {command}".rstrip())


def test_version(cli: Cli) -> None:
    from raynforce import __version__

    assert cli("--version") == Answer(0, f"{__version__}\n", "")


def test_mistakes_are_found_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from raynforce.cli import main; assert main(['tarin']) == 2; "
        "print(sorted({'torch', 'numpy', 'gymnasium', 'yaml', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- where settings come from -----------------------------------------------------------------------------


def test_flags_win_over_set_and_set_over_the_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "algo: dqn\nenv: Acrobot-v1\nseed: 1\nsteps: 1000\ntarget: 5\nsampling: {envs: 3, samplers: 4, fragment: 5}\n"
    )
    file = ["--config", "my.yaml"]
    found = config(cli, *file)
    assert (found["algo"], found["env"], found["seed"], found["target"]) == ("dqn", "Acrobot-v1", 1, 5.0)
    rest = {"samplers": 4, "fragment": 5, "parallel": "auto", "inference": "server", "exact_resume": True}
    rest["agent_ids"] = False
    assert found["sampling"] == {"envs": 3, **rest}

    sets = ["--set", "seed=2", "--set", "sampling.envs=30", "--set", "steps=2e3"]
    found = config(cli, *file, *sets)
    assert (found["seed"], found["steps"], found["target"]) == (2, 2000, 5.0)
    assert found["sampling"] == {"envs": 30, **rest}

    flags = ["--seed", "3", "--envs", "31", "--samplers", "2", "--steps", "1e4", "--target", "-1.5"]
    found = config(cli, *file, *flags, *sets)  # the order of the words makes no difference
    assert (found["seed"], found["steps"], found["target"]) == (3, 10_000, -1.5)
    assert found["sampling"] == {**rest, "envs": 31, "samplers": 2}

    found = config(cli, "ppo", "CartPole-v1", *file)
    assert (found["algo"], found["env"], found["seed"]) == ("ppo", "CartPole-v1", 1)
    found = config(cli, "ppo", *file)
    assert (found["algo"], found["env"]) == ("ppo", "Acrobot-v1")


def test_the_algorithms_own_defaults_yield_to_everything(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("sampling: {fragment: 7}\n")
    assert config(cli, "dqn", "CartPole-v1")["sampling"]["fragment"] == 16
    assert config(cli, "ppo", "CartPole-v1")["sampling"]["fragment"] == 256
    assert config(cli, "dqn", "CartPole-v1", "--config", "my.yaml")["sampling"]["fragment"] == 7


def test_the_last_set_wins(cli: Cli) -> None:
    assert config(cli, "ppo", "CartPole-v1", "--set", "seed=1", "--set", "seed=2")["seed"] == 2


ODD_VALUES = {
    "text": ["yes", "null", "1e3", "", " padded ", "a: b", "# no comment", "日本", "two\nlines", "'", "\x07"],
    "numbers": [1e-300, -0.0, 2**70, 1.0],
    "nested": {"deep": {"deeper": [None, True, {}]}},
}


def test_print_config_can_be_fed_back(cli: Cli, tmp_path: Path) -> None:
    odd = yaml.safe_dump(ODD_VALUES, default_flow_style=True, width=10**6)
    for words in (
        ["ppo", "CartPole-v1"],
        ["dqn", "Acrobot-v1", "--target", "-80.5", "--seed", "12", "--set", "algorithm.max_grad_norm=none"],
        ["ppo", "x:y", "--set", "network.hidden=", "--set", f"env_args={odd}", "--set", "algorithm.learning_rate=1e-5"],
        ["ppo", "x:y", "--set", "network.hidden=[1, 2, 3]", "--set", "network.normalize_obs=true"],
    ):
        first = cli("train", *words, "--print-config")
        assert first.code == 0
        (tmp_path / "my.yaml").write_text(first.out)
        again = cli("train", "--config", "my.yaml", "--print-config")
        assert again == first
    assert config(cli, "ppo", "x:y", "--set", f"env_args={odd}")["env_args"] == ODD_VALUES


def test_print_config_explains_every_setting(cli: Cli) -> None:
    lines = cli(*CARTPOLE, "--print-config").out.splitlines()
    plain = [n for n, line in enumerate(lines) if not line.lstrip().startswith("#") and not line.endswith(":")]
    assert len(plain) > 30
    assert all(lines[n - 1].lstrip().startswith("# ") for n in plain)


def test_print_config_makes_nothing(cli: Cli, tmp_path: Path) -> None:
    assert cli(*CARTPOLE, "--print-config", "--out", "x").code == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["0", "7", "1_000", "1e3", "4503599627370497"])
def test_a_seed_is_taken_exactly(cli: Cli, text: str) -> None:
    assert config(cli, "ppo", "CartPole-v1", "--seed", text)["seed"] == int(float(text))


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1])
def test_a_large_seed_is_taken_exactly(cli: Cli, seed: int) -> None:
    assert config(cli, "ppo", "CartPole-v1", "--set", f"seed={seed}")["seed"] == seed
    assert config(cli, "ppo", "CartPole-v1", "--seed", str(seed))["seed"] == seed


@pytest.mark.parametrize("text", ["10k", "1e4", "10_000", "0.01M"])
def test_counts_may_be_written_short(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "short.yaml").write_text(f"steps: {text}\nalgorithm:\n  minibatch_size: {text}\n")
    given = {
        "option": ["--steps", text, "--set", f"algorithm.minibatch_size={text}"],
        "set": ["--set", f"steps={text}", "--set", f"algorithm.minibatch_size={text}"],
        "file": ["--config", "short.yaml"],
    }
    for words in given.values():
        found = cli("train", "ppo", "CartPole-v1", "--print-config", *words).out.splitlines()
        assert "steps: 10000" in found
        assert "  minibatch_size: 10000" in found


def test_a_negative_target_may_have_an_exponent(cli: Cli) -> None:
    assert config(cli, "ppo", "CartPole-v1", "--target", "-1e3")["target"] == -1000.0


def test_the_environment_may_come_from_set(cli: Cli) -> None:
    assert config(cli, "ppo", "--set", "env=CartPole-v1")["env"] == "CartPole-v1"
