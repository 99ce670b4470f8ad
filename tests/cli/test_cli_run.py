"""What the commands do when all is well: train, its JSON, resume, eval, doctor."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_envs
import pytest
import yaml
from cli_helpers import KEYS, PLAIN, SICK, TINY, Answer, contents
from running import events, metrics

from raynforce import api
from raynforce.runs import checkpoint

Cli = Callable[..., Answer]
IDENTITY = "raynforce.envs.tiny:Identity"


def steps(path: Path) -> int:
    found: int = checkpoint.manifest(path / "last")["step"]
    return found


# -- train ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_json_is_one_object_with_the_promised_keys(cli: Cli, tmp_path: Path, algo: str) -> None:
    words = ["--steps", "2000", "--envs", "2", "--seed", "3", "--no-preset", "--json", "--out", "mine"]
    answer = cli(
        "train", algo, IDENTITY, *words, "--set", "algorithm.learning_starts=100" if algo == "dqn" else "seed=9"
    )
    assert answer.code == 0
    assert answer.out.count("\n") == 1
    result = answer.json
    assert list(result)[: len(KEYS)] == KEYS
    assert {k: result[k] for k in ("run", "algo", "env", "runtime", "topology", "seed")} == {
        "run": "mine",
        "algo": algo,
        "env": IDENTITY,
        "runtime": "inline",
        "topology": "sync",
        "seed": 3,
    }
    assert 2000 <= result["steps"] < 2000 + 2 * 128
    assert result["episodes"] == result["steps"]  # each episode is one step long
    assert result["updates"] > 0
    assert 0 < result["startup_seconds"] <= result["seconds"]
    assert result["steps_per_second"] > 0
    assert 0 <= result["return_mean"] <= 1
    assert 0 <= result["eval_return"] <= 1
    assert (result["solved_at"], result["solved_steps"], result["restarts"], result["dropped_steps"]) == (
        None,
        None,
        0,
        0,
    )
    params = checkpoint.load(tmp_path / "mine" / "last")["policy"]["version"]["params"]
    assert result["weights_sha256"] == hashlib.sha256(params.tobytes()).hexdigest()
    assert "Traceback" not in answer.err
    assert "trained:" in answer.err  # people read stderr then


def test_a_target_that_is_met_ends_the_run_and_is_reported(cli: Cli) -> None:
    answer = cli("train", "ppo", PLAIN, *TINY, "--steps", "1e6", "--target", "5", "--set", "eval.every=32", "--json")
    result = answer.json
    assert (answer.code, result["solved_steps"], result["eval_return"]) == (0, 32, 5.0)
    assert 0 < result["solved_at"] <= result["seconds"]


def test_equal_seeds_give_equal_runs(cli: Cli) -> None:
    hashes = [cli("train", "ppo", PLAIN, *TINY, "--json", "--seed", s).json["weights_sha256"] for s in ("1", "1", "2")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_last_line_is_the_result_however_much_the_environment_prints(cli: Cli) -> None:
    answer = cli("train", "ppo", "cli_envs:Talkative", *TINY, "--json")
    assert list(answer.json)[: len(KEYS)] == KEYS
    assert "noise" in answer.out


def test_without_out_each_run_has_a_directory_of_its_own(cli: Cli, tmp_path: Path) -> None:
    for _ in range(3):  # within one second, too
        assert cli("train", "ppo", PLAIN, *TINY).code == 0
    names = os.listdir(tmp_path / "runs")
    assert len(names) == 3
    assert all(name.startswith("ppo-Plain-seed0-") for name in names)


def test_quiet_says_where_the_run_is(cli: Cli, tmp_path: Path) -> None:
    answer = cli("train", "ppo", PLAIN, *TINY)
    assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 1)
    run = answer.out.strip()
    assert (tmp_path / run / "config.yaml").is_file()
    assert cli("resume", run, "--steps", "96", "--quiet") == Answer(0, f"{run}\n", "")


def test_a_run_too_short_to_learn_says_so(cli: Cli) -> None:
    answer = cli("train", "dqn", PLAIN, *(word for word in TINY if word != "--quiet"))
    assert answer.code == 0
    told = " ".join((answer.out + answer.err).split())
    assert "nothing was learned: so few steps lead to no update (algorithm.learning_starts = 1,000)" in told


def test_quiet_tells_of_faults(cli: Cli) -> None:
    answer = cli("train", "ppo", "cli_envs:Stumbling", *TINY, "--out", "run", "--steps", "256")
    assert (answer.code, answer.out) == (0, "run\n")
    first, *others = answer.err.splitlines()
    assert "step raised RuntimeError: it stumbled" in first
    assert all("restarted" in line for line in others)


def test_resume_takes_the_number_of_samplers_and_environments(cli: Cli) -> None:
    assert cli("train", "ppo", PLAIN, *TINY, "--out", "run").code == 0
    assert cli("resume", "run", "--steps", "96", "--envs", "3", "--samplers", "2", "--quiet").code == 0
    assert (
        yaml.safe_load(Path("run/config.yaml").read_text())["sampling"] | {"envs": 3, "samplers": 2}
        == (yaml.safe_load(Path("run/config.yaml").read_text())["sampling"])
    )
    cli("resume", "run", "--envs", "").refused(2, "--envs is empty")
    cli("resume", "run", "--envs", "many").refused(2, "sampling.envs", "many")


def test_the_run_directory_holds_what_is_promised(cli: Cli, tmp_path: Path) -> None:
    assert cli("train", "ppo", PLAIN, *TINY, "--set", "log_every=32", "--out", "a/b/mine").code == 0
    run = tmp_path / "a" / "b" / "mine"
    assert sorted(os.listdir(run)) == [
        *("best", "checkpoints", "config.yaml", "events.jsonl", "last", "live.json", "metrics.jsonl", "run.lock"),
        "tensorboard",
    ]
    assert yaml.safe_load((run / "config.yaml").read_text())["config_version"] == 1
    assert [e["event"] for e in events(run)] == ["started", "stopped", "result"]
    lines = metrics(run)
    assert [line["step"] for line in lines] == [32, 64, 64]
    assert lines[0]["charts/episodic_return"] == 5.0


def test_the_config_of_a_run_can_be_trained_again(cli: Cli) -> None:
    first = cli("train", "ppo", PLAIN, *TINY, "--seed", "5", "--json", "--out", "one").json
    again = cli("train", "--config", "one/config.yaml", "--json", "--quiet", "--out", "two").json
    assert again["weights_sha256"] == first["weights_sha256"]


@pytest.mark.parametrize(("name", "parallel"), [("mine", "threads"), ("my run; ls", "auto")])
def test_what_to_type_next_can_be_typed(cli: Cli, name: str, parallel: str) -> None:
    loud = [word for word in TINY if word != "--quiet"]
    answer = cli("train", "ppo", PLAIN, *loud, "--out", name, "--set", f"sampling.parallel={parallel}")
    lines = [line.strip() for line in answer.out.partition("what to type next:")[2].splitlines()]
    commands = {
        word: line.partition(f" {word} ")[2] for word in ("eval", "resume") for line in lines if f" {word} " in line
    }
    for command, rest in commands.items():
        assert cli(command, *shlex.split(rest), "--json").code == 0
    assert len(commands) == 2
    assert commands["eval"].endswith(" --parallel threads") == (parallel == "threads")


def test_a_tilde_is_the_home_directory(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli("train", "ppo", PLAIN, *TINY, "--out=~/mine").code == 0
    assert (tmp_path / "home" / "mine").is_dir()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("name", ["日本/語", "with space", "\udcff", "-dash"])
def test_any_name_will_do_for_a_run(cli: Cli, tmp_path: Path, name: str) -> None:
    assert cli("train", "ppo", PLAIN, *TINY, f"--out={name}").code == 0
    assert cli("eval", f"./{name}", "--json", "--episodes", "1").json["mean"] == 5.0


# -- resume -----------------------------------------------------------------------------------------------


def test_resume_goes_on_as_if_it_had_never_stopped(cli: Cli, tmp_path: Path) -> None:
    tiny = [*TINY, "--json", "--seed", "4"]
    whole = cli("train", "ppo", "CartPole-v1", *tiny, "--steps", "400", "--out", "whole").json
    cli("train", "ppo", "CartPole-v1", *tiny, "--steps", "200", "--out", "parts")
    parts = cli("resume", "parts", "--steps", "400", "--json", "--quiet").json
    same = ("seed", "steps", "episodes", "updates", "return_mean", "weights_sha256")
    assert {k: parts[k] for k in same} == {k: whole[k] for k in same}
    assert yaml.safe_load((tmp_path / "parts" / "config.yaml").read_text())["steps"] == 400


def test_resume_takes_settings(cli: Cli, run: Path) -> None:
    answer = cli("resume", "run", "--steps", "128", "--set", "algorithm.learning_rate=1e-5", "--target", "99", "--json")
    assert (answer.code, answer.json["steps"]) == (0, 128)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["steps"], saved["target"], saved["algorithm"]["learning_rate"]) == (128, 99.0, 1e-5)


def test_resume_appends_to_the_metrics_and_keeps_their_order(cli: Cli, run: Path) -> None:
    before = (run / "metrics.jsonl").read_text()
    assert cli("resume", "run", "--steps", "200", "--set", "log_every=32", "--quiet").code == 0
    after = (run / "metrics.jsonl").read_text()
    assert after.startswith(before)
    seen = [json.loads(line)["step"] for line in after.splitlines()]
    assert seen == sorted(seen)
    assert seen[-1] == steps(run) >= 200


def test_resume_of_a_finished_run_does_no_harm(cli: Cli, run: Path) -> None:
    weights = checkpoint.load(run / "last", only=["policy"])["policy"]["version"]["params"]
    answer = cli("resume", "run", "--json", "--quiet")
    assert (answer.code, answer.json["steps"]) == (0, 64)
    assert answer.json["weights_sha256"] == hashlib.sha256(weights.tobytes()).hexdigest()
    assert cli("eval", "run").code == 0


def test_resume_refuses_options_of_another_runtime(cli: Cli, run: Path) -> None:
    before = contents(run)
    cli("resume", "run", "--address", "auto").refused(2, "--address is for Ray", "inline", "--runtime ray")
    cli("resume", "run", "--runtime", "process", "--sampler-cpus", "2").refused(2, "--sampler-cpus", "process")
    cli("resume", "run", "--set", "runtime=process", "--learner-gpus", "1").refused(2, "--learner-gpus", "process")
    cli("resume", "run", "--runtime", "auto", "--address", "nowhere").refused(2, "ray.address = 'nowhere'")
    cli("resume", "none", "--address", "auto").refused(2, "no run at none")
    assert contents(run) == before


def test_resume_to_fewer_steps_than_there_are_is_refused(cli: Cli, run: Path) -> None:
    before = contents(run)
    cli("resume", "run", "--steps", "10").refused(2, "steps", "10", "64")
    assert contents(run) == before


REFUSED = {
    "another algorithm": (["algo=dqn"], ["algo", "ppo", "dqn"]),
    "an env": (["env=CartPole-v1", "env_args={}"], ["env"]),
    "a seed": (["seed=99"], ["seed", "cannot become 99"]),
    "an unknown setting": (["algorithm.gama=1"], ["did you mean 'algorithm.gamma'"]),
    "a bad number": (["steps=-1"], ["steps = -1"]),
    "another format": (["config_version=2"], ["config_version"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_resume_refuses_what_does_not_fit_and_changes_nothing(cli: Cli, run: Path, name: str) -> None:
    before = contents(run)
    sets, expected = REFUSED[name]
    answer = cli("resume", "run", "--quiet", *(word for item in sets for word in ("--set", item)))
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert all(word in line for word in expected)
    assert contents(run) == before


# -- eval -------------------------------------------------------------------------------------------------


def test_eval_of_a_run_and_of_a_checkpoint(cli: Cli, run: Path) -> None:
    expected = "mean return 5.000 over 100 greedy episodes (deviation 0.0, from 5.000 to 5.000)\n"
    assert cli("eval", "run") == Answer(0, f"run/best: {expected}", "")
    assert cli("eval", "run/") == Answer(0, f"run/best: {expected}", "")
    assert cli("eval", "run/last") == Answer(0, f"run/last: {expected}", "")
    assert cli("eval", "run", "--checkpoint", "last") == Answer(0, f"run/last: {expected}", "")
    assert cli("eval", "run/checkpoints/step_000000000032").code == 0
    assert cli("eval", str(run / "best")).code == 0


def test_eval_of_slow_environments(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stepped side by side, and it is told how far it is."""

    def slow(self: cli_envs.Plain, action: int) -> Any:
        threads.add(threading.current_thread())
        time.sleep(0.05)
        return fast(self, action)

    fast, threads = cli_envs.Plain.step, set()
    monkeypatch.setattr(cli_envs.Plain, "step", slow)
    monkeypatch.setattr(api, "TELL_AFTER", 0.1)
    answer = cli("eval", "run", "--parallel", "threads", "--episodes", "40")
    assert len(threads) == 20
    assert answer.out == "run/best: mean return 5.000 over 40 greedy episodes (deviation 0.0, from 5.000 to 5.000)\n"
    assert answer.err.startswith("evaluating: 0 of 40 episodes\n")
    cli("eval", "run", "--parallel", "both").refused(2, "--parallel", "threads")


def test_eval_json(cli: Cli, run: Path) -> None:
    answer = cli("eval", "run", "--json", "--episodes", "7")
    assert answer.out.count("\n") == 1
    assert answer.json == {
        "run": "run",
        "checkpoint": "run/best",
        "episodes": 7,
        "mean": 5.0,
        "deviation": 0.0,
        "min": 5.0,
        "max": 5.0,
    }


def test_eval_on_another_environment(cli: Cli, run: Path) -> None:
    """With the same spaces; the run's own arguments are kept, but for those that are given."""
    longer = "raynforce.envs.tiny:Endless"
    answer = cli("eval", "run", "--env", "cli_envs:Plain", "--episodes", "3")
    expected = "mean return 5.000 over 3 greedy episodes on cli_envs:Plain (deviation 0.0, from 5.000 to 5.000)\n"
    assert answer == Answer(0, f"run/best: {expected}", "")
    found = cli("eval", "run", "--env", longer, "--set", "env_args.length=7", "--episodes", "3", "--json").json
    assert (found["env"], found["mean"]) == (longer, 7.0)
    broken = ["--env", "cli_envs:Plain", "--set", "env_args.fault=make raises"]
    cli("eval", "run", *broken).refused(2, "no licence")


def test_eval_on_unequal_spaces_is_one_line(cli: Cli, run: Path) -> None:
    answer = cli("eval", "run", "--env", "CartPole-v1")
    answer.refused(2, "'CartPole-v1' has other spaces than 'cli_envs:Sick'", "box (4,) float32, not box (1,) float32")
    cli("eval", "run", "--env", "Pendulum-v1").refused(
        2, "its actions are box (1,) float32 from -2 to 2, not discrete 2"
    )
    cli("eval", "run", "--env", "").refused(2, "--env is empty")
    cli("eval", "run", "--set", "env=CartPole-v1").refused(2, "not 'env'; another environment is --env ENV")
    cli("eval", "run", "--set", "seed=1").refused(2, "eval takes --set env_args.KEY=VALUE only, not 'seed'")


def test_eval_with_a_seed_plays_the_same_episodes(cli: Cli) -> None:
    assert cli("train", "ppo", "CartPole-v1", *TINY, "--out", "cart").code == 0

    def play(seed: str) -> dict[str, float]:
        return cli("eval", "cart", "--json", "--episodes", "30", "--seed", seed).json

    assert play("1") == play("1") != play("2")


def test_eval_changes_nothing(cli: Cli, run: Path) -> None:
    before = contents(run)
    assert cli("eval", "run").code == 0
    assert contents(run) == before


def test_eval_needs_only_the_checkpoint(cli: Cli, run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step_000000000064").rename(tmp_path / "alone")
    assert cli("eval", "alone", "--episodes", "2").code == 0


# -- doctor -----------------------------------------------------------------------------------------------


def test_doctor_looks_at_the_machine(cli: Cli) -> None:
    answer = cli("doctor")
    assert (answer.code, answer.err) == (0, "")
    for word in ("python", "numpy", "torch", "gymnasium", "cores", "memory", "disk", "ready to train"):
        assert word in answer.out
    report = cli("doctor", "--json")
    assert (report.code, report.json["ok"], report.out.count("\n")) == (0, True, 1)


@pytest.mark.parametrize("env", ["CartPole-v1", IDENTITY, PLAIN])
def test_doctor_of_a_sound_environment(cli: Cli, env: str) -> None:
    answer = cli("doctor", env, "--steps", "200")
    assert (answer.code, answer.err) == (0, "")
    told = ", with 2 warnings" if env == PLAIN else ""
    assert answer.out.endswith(f"\nready to train{told}\n")


@pytest.mark.parametrize(
    ("fault", "title"),
    [
        ("make raises", "cannot be made"),
        ("reset raises", "reset raises"),
        ("step raises", "step raises"),
        ("nan obs", "the observation is not finite"),
        ("nan reward", "the reward is not finite"),
        ("shape", "the observation does not fit its space"),
        ("text reward", "the reward is not a number"),
    ],
)
def test_doctor_of_a_bad_environment_says_what_is_wrong(cli: Cli, fault: str, title: str) -> None:
    words = ["doctor", PLAIN, "--set", f"env_args.fault={fault}", "--steps", "200"]
    answer = cli(*words)
    assert (answer.code, answer.err) == (1, "")
    assert f"error    {title}:" in answer.out
    assert "fix the errors above" in answer.out
    report = cli(*words, "--json")
    assert (report.code, report.json["ok"]) == (1, False)
    assert [f["title"] for f in report.json["findings"] if f["level"] == "error"] == [title]


@pytest.mark.parametrize("fault", ["make exits", "reset exits", "step exits"])
def test_doctor_of_an_environment_that_exits(cli: Cli, fault: str) -> None:
    answer = cli("doctor", PLAIN, "--set", f"env_args.fault={fault}")
    assert answer.code == 1
    assert "SystemExit" in answer.out


def test_doctor_gives_env_args_to_the_environment(cli: Cli) -> None:
    assert cli("doctor", IDENTITY, "--set", "env_args.n=7", "--steps", "50").out.count("Discrete(7)") == 2
    answer = cli("doctor", SICK, "--set", "env_args.colour=1")
    assert (answer.code, "it takes fault" in answer.out) == (1, True)


def test_results_are_finite_numbers(cli: Cli) -> None:
    result = cli("train", "ppo", PLAIN, *TINY, "--json").json
    assert all(math.isfinite(v) for v in result.values() if isinstance(v, float))
