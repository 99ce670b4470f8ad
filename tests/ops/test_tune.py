"""Searches for settings, as far as they need no Ray: spaces, halving, files, checks, and what is said at the end."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raynforce
from raynforce.algos import BUILT_IN
from raynforce.cli import main
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experiment import resolve
from raynforce.ops.tuning import space as spaces
from raynforce.ops.tuning.defaults import SPACES, default_space
from raynforce.ops.tuning.halving import Rungs
from raynforce.ops.tuning.importance import _correlations, importance
from raynforce.ops.tuning.searching import drawn, gridded
from raynforce.ops.tuning.study import Plan, SeedState, Study, Trial
from raynforce.ops.tuning.trial_runs import TrialRuns
from raynforce.ops.tuning.tuner import finish, prepare, require_room
from raynforce.ops.tuning.view import TuneView

TINY = {"steps": 1024, "runtime": "inline", "topology": "sync", "preset": "none"}
TINY |= {"sampling": {"envs": 2, "fragment": 64}, "eval": {"every": 256, "episodes": 2, "final_episodes": 2, "envs": 2}}


def config(**changes: Any) -> Config:
    return resolve(TINY, {"env": "CartPole-v1"}, changes)[0]


def plan(**changes: Any) -> Plan:
    search = spaces.read({"algorithm.learning_rate": "log(1e-5,1e-2)", "algorithm.epochs": "int(1,4)"})
    base = Plan("ppo", "CartPole-v1", "return", search, "asha", (0,), 4, 0, 1000, None, 1.0, 0.0, 0.0)
    return replace(base, **changes)


# -- what is searched ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("log(1e-5,1e-2)", 1e-5, 1e-2), ("uniform(-1, 1)", -1, 1), ("uniform(0,1,0.25)", 0, 1), ("int(2,20)", 2, 20),
     ("int(2,20,6)", 2, 20), ("logint(16,512)", 16, 512)],
)  # fmt: skip
def test_values_are_drawn_from_the_whole_range_and_never_outside(text: str, low: float, high: float) -> None:
    domain = spaces.domain("a.b", text)
    rng = np.random.default_rng(0)
    values = [domain.sample(rng) for _ in range(2000)]
    assert min(values) >= low
    assert max(values) <= high
    assert all(isinstance(value, int) for value in values) == domain.whole
    places = [domain.position(value) for value in values]
    assert np.mean(places) == pytest.approx(0.5, abs=0.05)
    assert min(places) < 0.06
    assert max(places) > 0.94
    assert spaces.Domain.from_json(json.loads(json.dumps(domain.to_json()))) == domain
    assert spaces.domain("a.b", str(domain)) == domain


def test_choices_may_be_lists_and_numbers_that_yaml_takes_for_text(tmp_path: Path) -> None:
    domain = spaces.domain("network.hidden", "choice([64,64],[256,256])")
    assert domain.grid() == [[64, 64], [256, 256]]
    assert spaces.domain("a", "choice(1e-3,1e-4)").grid() == [1e-3, 1e-4]
    file = tmp_path / "space.yaml"
    file.write_text(
        "algorithm:\n  learning_rate: log(1e-5,1e-2)\n  gamma: [0.9, 0.99]\nnetwork.activation: choice(tanh,relu)\n"
    )
    found = spaces.read([str(file), "algorithm.epochs=int(2,20)"])
    kinds = {key: domain.kind for key, domain in found.items()}
    assert kinds == {
        "algorithm.learning_rate": "log", "algorithm.gamma": "choice", "network.activation": "choice",
        "algorithm.epochs": "int",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("algorithm.lr=log(1e-5,1e-2)", ["algorithm.lr", "algorithm.learning_rate"]),
        ("algorithm.learning_rat=log(1e-5,1e-2)", ["did you mean", "algorithm.learning_rate"]),
        ("algorithm.gamma=uniform(0.99,0.9)", ["empty range", "0.99 must be below 0.9"]),
        ("algorithm.gamma=choice()", ["empty range", "choice"]),
        ("algorithm.learning_rate=log(0,1)", ["above 0"]),
        ("algorithm.gamma=uniform(0.9,2)", ["algorithm.gamma = 2.0", "from 0 to 1"]),
        ("algorithm.epochs=uniform(2,20)", ["whole number", "int(2,20)"]),
        ("network.activation=choice(tanh,gelu)", ["gelu", "tanh, relu"]),
        ("algorithm.gamma=normal(0,1)", ["normal", "log(LOW,HIGH)"]),
        ("algorithm.gamma=0.9", ["must be one of"]),
        ("algorithm.gamma=int(a,b)", ["in numbers"]),
        ("algorithm.gamma", ["must look like"]),
        ("seed=int(0,9)", ["cannot be compared"]),
    ],
)
def test_a_wrong_search_is_one_clear_line(search: str, words: list[str], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t"
    assert main(["tune", "ppo", "CartPole-v1", "--search", search, "--out", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines
    assert not out.exists()


def _never(*_: Any) -> None:
    pytest.fail("Ray was started")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpus", "64"], "a trial asks for 64 CPUs, and this machine has"),
        (["--gpus", "1"], "a trial asks for 1 GPU, and this machine has 0: lower --gpus, or --set learner.device=cpu"),
        (["--set", "learner.device=cuda"], "a trial asks for 1 GPU, and this machine has 0"),
        (["--cpus", "-1"], "--cpus = '-1' must be a number"),
        (["--trials", "0"], "--trials = '0' must be a whole number"),
        (["--scheduler", "ash"], "did you mean 'asha'"),
        (["--objective", "steps"], "add --target R"),
        (["--objective", "retrun", "--target", "1"], "did you mean 'return'"),
        (["--scheduler", "grid"], "a grid needs single values"),
        (["--scheduler", "pbt", "--search", "network.hidden=choice([8],[16])"], "search algorithm.* alone"),
        (["--runtime", "ray"], "inline or process"),
        (["--set", "engine=rllib"], "needs a Ray of its own, and a trial is one process: leave it out"),
        (["--resume", "nowhere"], "is no search of raynforce tune"),
        (["--seeds", "0"], "seeds = "),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    words: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raynforce.ops.tuning.tuner._in_use", lambda: False)  # whatever other tests have started
    monkeypatch.setattr("raynforce.runtimes.ray.connecting.connect", _never)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["tune", *words] if "--resume" in words else ["tune", "ppo", "CartPole-v1", *words]
    assert main([*command, "--out", str(tmp_path / "t")] if "--resume" not in words else command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not (tmp_path / "t").exists()


def test_the_default_spaces_are_of_settings_that_there_are() -> None:
    assert set(BUILT_IN) <= set(SPACES)
    for algo in BUILT_IN:
        found = prepare.__globals__["require_valid"]
        found(resolve({"env": "CartPole-v1", "algo": algo, "preset": "none"})[0], default_space(algo), "asha")
    with pytest.raises(UsageError, match="no default search space for 'my:Own'"):
        default_space("my:Own")


def test_equal_seeds_draw_equal_settings_and_what_is_refused_is_drawn_again() -> None:
    space = plan().search

    def odd(values: Any) -> None:
        if values["algorithm.epochs"] % 2 == 0:
            raise UsageError("even")

    first = drawn(space, 20, 7, odd)
    assert first == drawn(space, 20, 7, odd)
    assert first != drawn(space, 20, 8, odd)
    assert {values["algorithm.epochs"] for values in first} == {1, 3}


def test_a_grid_has_every_combination() -> None:
    space = spaces.read({"algorithm.epochs": "int(1,3)", "algorithm.gamma": "uniform(0.9,1,0.05)"})
    points = gridded(space)
    assert len(points) == 9
    assert {values["algorithm.gamma"] for values in points} == {0.9, 0.95, 1.0}


# -- who is stopped -----------------------------------------------------------------------------------------


def test_halving_stops_the_worst_two_thirds_at_each_rung() -> None:
    rungs = Rungs(2700)  # rungs at 100, 300 and 900
    assert not rungs.report(0, 50, -1.0)  # before the first rung nobody is stopped
    going = [not rungs.report(number, 100, float(number)) for number in reversed(range(9))]
    assert going == [True, True, *[False] * 7]  # the first two have nobody to be held against
    assert [rungs.report(number, 310, float(number)) for number in (8, 7, 6)] == [False, False, True]
    assert not rungs.report(8, 320, -5.0)  # it has passed that rung


def test_a_trial_that_met_its_target_early_counts_at_all_rungs() -> None:
    rungs = Rungs(2700)
    for number in (0, 1):
        rungs.report(number, 60, 900.0, ended=True)
    assert rungs.report(2, 900, 500.0)


def test_rungs_are_where_trials_are_evaluated() -> None:
    rungs = Rungs(200_000, 5_000)  # the thirds of thirds would be 7,407, 22,222 and 66,666
    for number in range(3):
        assert not rungs.report(number, 5_100, 100.0 - number) or number == 2
    assert rungs.report(3, 5_000, 1.0)


def test_one_that_cannot_be_the_best_any_more() -> None:
    made = plan(seeds=(0, 1, 2), target=475.0, objective="steps")
    best = Trial(0, {}, "done", [SeedState(n, "", solved_steps=100, ended=True) for n in range(3)])
    slower = Trial(1, {}, "running", [SeedState(n, "", evaluated=150, last=400.0) for n in range(3)])
    sooner = Trial(2, {}, "running", [SeedState(n, "", evaluated=50, last=400.0) for n in range(3)])
    highest = best.merit(made)
    assert highest is not None
    assert (slower.highest_merit(made) or 0) < highest < (sooner.highest_merit(made) or 0)
    assert best.highest_merit(plan()) is None


# -- the objective ------------------------------------------------------------------------------------------


def test_the_median_of_the_seeds_counts() -> None:
    lucky = Trial(0, {}, "done", [SeedState(n, "", last=value, ended=True) for n, value in enumerate([500.0, 20, 30])])
    steady = Trial(
        1, {}, "done", [SeedState(n, "", last=value, ended=True) for n, value in enumerate([200.0, 210, 190])]
    )
    study = Study(Path("."), plan(seeds=(0, 1, 2)), [lucky, steady])
    assert study.best() is steady
    assert steady.objective(study.plan) == 200
    unfinished = Trial(2, {}, "running", [SeedState(0, "", last=1.0), SeedState(1, "")])
    assert unfinished.merit(study.plan) is None


def test_the_sooner_the_target_is_met_the_better_and_never_is_worse_than_late() -> None:
    to_target = plan(objective="steps", target=-100.0)
    soon = Trial(0, {}, "done", [SeedState(0, "", last=-90, solved_steps=200, ended=True)])
    late = Trial(1, {}, "done", [SeedState(0, "", last=-10, solved_steps=900, ended=True)])
    never = Trial(2, {}, "done", [SeedState(0, "", last=-120, ended=True)])
    merits = [trial.merit(to_target) for trial in (soon, late, never)]
    assert merits == sorted(merits, key=lambda merit: -(merit or 0))
    assert [trial.objective(to_target) for trial in (soon, late, never)] == [200, 900, None]
    assert Study(Path("."), to_target, [never, late, soon]).best() is soon


def test_a_trial_that_came_to_its_end_is_better_than_one_that_was_stopped() -> None:
    stopped = Trial(0, {}, "stopped", [SeedState(0, "", last=500.0)])
    done = Trial(1, {}, "done", [SeedState(0, "", last=480.0, ended=True)])
    failed = Trial(2, {}, "failed", [SeedState(0, "", last=900.0)])
    assert Study(Path("."), plan(), [stopped, failed, done]).best() is done


def _made_up(count: int) -> list[Trial]:
    """Trials whose return depends on the learning rate alone."""
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        values = {key: domain.sample(rng) for key, domain in plan().search.items()}
        value = -abs(np.log10(values["algorithm.learning_rate"]) + 2)
        seed = SeedState(0, f"trial_{number:03d}/seed0", last=float(value), ended=True)
        found.append(Trial(number, values, "done", [seed], curve=[(100, value - 1), (200, value)]))
    return found


def test_what_matters_is_found() -> None:
    trials = _made_up(40)
    shares, method = importance(plan(), trials)
    assert next(iter(shares)) == "algorithm.learning_rate"
    assert shares["algorithm.learning_rate"] > 0.8
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert method == "PED-ANOVA"
    ranks = _correlations(plan(), trials, list(plan().search))
    assert ranks["algorithm.learning_rate"] > 0.9 > 0.2 > ranks["algorithm.epochs"]
    assert importance(plan(), trials[:2]) == ({}, "too few trials to tell")


def test_what_is_left_at_the_end_can_be_trained_and_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base = config()
    study = Study.create(tmp_path, plan(trials=12), base.to_yaml(), _made_up(12))
    tuned = finish(study, base.to_dict(), 0.0)
    best = tuned.best
    assert best is not None
    again = resolve(raynforce.settings.read_yaml(str(tuned.config)))[0]  # type: ignore[attr-defined]
    assert again.algorithm.learning_rate == best.config["algorithm.learning_rate"]
    assert again.eval == base.eval
    assert tuned.picture is not None
    assert tuned.picture.read_bytes()[:4] == b"\x89PNG"
    assert set(json.loads((tmp_path / "importance.json").read_text())) == set(tuned.plan.search)
    json.dumps(tuned.to_json())


# -- files --------------------------------------------------------------------------------------------------


def test_a_search_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    study = prepare(config(), plan().search, tmp_path / "t", trials=3, seeds=2, objective="return")
    facts = json.loads((tmp_path / "t" / "tune.json").read_text())
    names = {"schema", "algorithm", "env", "objective", "mode", "search", "scheduler", "seeds", "trials", "created"}
    assert names <= set(facts)
    assert facts["search"]["algorithm.epochs"] == {"kind": "int", "low": 1, "high": 4}
    trial = json.loads((tmp_path / "t" / "trials.json").read_text())[0]
    assert {"id", "config", "status", "objective", "steps", "seconds", "runs"} <= set(trial)
    again = Study.open(tmp_path / "t")
    assert (again.plan, again.trials) == (study.plan, study.trials)
    with pytest.raises(UsageError, match="is a search already"):
        prepare(config(), plan().search, tmp_path / "t")
    (tmp_path / "t" / "trials.json").write_text("[{")
    with pytest.raises(UsageError, match="damaged"):
        Study.open(tmp_path / "t")


@pytest.mark.parametrize("words", [["--trials", "9"], ["--set", "a=1"], ["--steps", "7"], ["--scheduler", "random"]])
def test_a_resume_with_other_settings_is_refused(words: list[str], tmp_path: Path, capsys: Any) -> None:
    prepare(config(), plan().search, tmp_path / "t", trials=3, objective="return")
    assert main(["tune", "--resume", str(tmp_path / "t"), *words]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "leave" in line


def test_a_search_that_is_there_goes_on_if_it_is_the_same(tmp_path: Path) -> None:
    how: dict[str, Any] = {"trials": 3, "objective": "return", "go_on": True}
    begun = prepare(config(topology="auto"), plan().search, tmp_path / "t", **how)
    begun.trials[1].status = "done"
    begun.save()
    again = prepare(config(topology="auto"), plan().search, tmp_path / "t", **how)
    assert (again.plan, again.trials[1].status) == (begun.plan, "done")
    with pytest.raises(UsageError, match=r"another search \(trials is 3 and not 4\)"):
        prepare(config(topology="auto"), plan().search, tmp_path / "t", **how | {"trials": 4})
    with pytest.raises(UsageError, match=r"another search \(sampling.fragment is 64 and not 32\)"):
        prepare(config(sampling={"fragment": 32, "envs": 2}), plan().search, tmp_path / "t", **how)
    (tmp_path / "t" / "tune.json").unlink()  # a kill came before it was written
    assert prepare(config(), plan().search, tmp_path / "t", **how).trials[1].status == "pending"


def test_a_search_that_goes_on_without_its_gpu_is_refused_before_ray_starts(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raynforce.ops.tuning.tuner._in_use", lambda: False)
    monkeypatch.setattr("raynforce.ops.tuning.tuner.gpus_here", lambda: 1)
    prepare(config(), plan().search, tmp_path / "t", trials=3, objective="return", gpus=1)
    monkeypatch.setattr("raynforce.ops.tuning.tuner.gpus_here", lambda: 0)
    monkeypatch.setattr("raynforce.runtimes.ray.connecting.connect", _never)
    assert main(["tune", "--resume", str(tmp_path / "t")]) == 2
    assert "a trial asks for 1 GPU, and this machine has 0" in capsys.readouterr().err
    assert Study.open(tmp_path / "t").plan.gpus == 1  # a search that had begun stays


def test_trials_that_would_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.ops.tuning.tuner.available_bytes", lambda: 1e9)
    require_room(plan(cpus=1.0), 2, 20)
    with pytest.raises(
        UsageError, match=r"8 trials at once need about 3\.4 GB, 1\.0 GB are free: --cpus 1 runs 2 at once"
    ):
        require_room(plan(cpus=0.25), 2, 20)


def test_the_time_left_is_guessed_by_what_is_done() -> None:
    now = [0.0]
    view = TuneView(clock=lambda: now[0])
    study = Study(Path("."), plan(trials=4), [Trial(number, {}) for number in range(4)])
    assert view.left(study) is None
    now[0] = 10.0
    study.trials[0] = Trial(0, {}, "done", [SeedState(0, "", steps=500, ended=True)])
    assert view.left(study) == pytest.approx(30)
    assert "trials 1/4 (1 done, 0 running)" in view.line(study)


def test_the_table_has_those_that_run_first_and_then_the_best() -> None:
    from io import StringIO

    from rich.console import Console

    from raynforce.ops.tuning.view import LiveTune

    trials = [*_made_up(5), Trial(5, _made_up(1)[0].config, "running", [SeedState(0, "", steps=250)])]
    study = Study(Path("."), plan(trials=8), trials)
    console = Console(file=StringIO(), width=120)
    console.print(LiveTune(StringIO())._view(study, 40, 120))
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    assert lines[0][:3] == ["trial", "steps", "return"]
    assert lines[2][:4] == ["5", "running", "250", "25%"]
    assert [line[0] for line in lines[3:8]] == [str(trial.id) for trial in study.ranked()[:5]]
    assert lines[-1][:2] == ["trials", "5/8"]


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 12), (120, 40)])
def test_the_table_of_many_trials_fits_a_terminal_and_keeps_its_figures(width: int, height: int) -> None:
    from io import StringIO

    from rich.console import Console

    from raynforce.ops.tuning.view import LiveTune

    made = plan(trials=20, search=default_space("ppo"), objective="steps", target=475.0, steps=200_000)
    rng, trials = np.random.default_rng(0), []
    for number in range(20):
        seed = SeedState(
            0, "", steps=150_000 + number, last=123.4, solved_steps=15_000 + number if number < 3 else None
        )
        values = {key: domain.sample(rng) for key, domain in made.search.items()}
        status = "done" if number < 3 else "running" if number < 5 else "stopped"
        trials.append(Trial(number, values, status, [seed], curve=[(150_000, 123.4)]))
    now = iter([0.0, *[60.0] * 9])
    view, console = LiveTune(StringIO(), clock=lambda: next(now)), Console(file=StringIO(), width=width, height=height)
    view._before = 0.0
    console.print(view._view(Study(Path("."), made, trials), height, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    for words in ("3   running   150,003  75%   return 123.4", "0   done      150,000  75%   15,000 steps", "eta  0:"):
        assert words in text
    assert ("learning_rate=" in text) == (width > 60)


# -- runs of one trial --------------------------------------------------------------------------------------


def test_seeds_take_turns_stop_anywhere_and_end_as_if_each_was_alone(tmp_path: Path) -> None:
    configs = {seed: config(seed=seed) for seed in (0, 1)}
    alone = raynforce.api.start(configs[1], {}, tmp_path / "alone", progress="quiet").result  # type: ignore[attr-defined]

    def opened() -> TrialRuns:
        states = [SeedState(seed, f"seed{seed}") for seed in configs]
        return TrialRuns(tmp_path, states, configs)

    runs = opened()
    runs.advance()
    first = [state.evaluated for state in runs.states]
    assert [steps // 256 for steps in first] == [1, 1]
    assert all(state.last is not None for state in runs.states)
    runs.stop("for a test")
    assert not runs.ended
    runs = opened()  # from their checkpoints
    while not runs.ended:
        runs.advance()
    found = json.loads((tmp_path / "seed1" / "result.json").read_text())
    assert found["weights_sha256"] == alone.weights_sha256
    assert found["steps"] == alone.steps
    again = opened()
    assert again.ended  # nothing is trained again
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raynforce-seed")]


def test_what_a_run_waits_for_its_turn_is_not_its_time(tmp_path: Path) -> None:
    import time

    runs = TrialRuns(tmp_path, [SeedState(0, "seed0")], {0: config(target=1.0)})
    slow = TrialRuns(tmp_path, [SeedState(0, "waits")], {0: config(steps=1024)})
    began = time.monotonic()
    slow.advance()
    time.sleep(1.0)
    while not slow.ended:
        slow.advance()
    assert 0 < slow.states[0].seconds <= time.monotonic() - began - 0.9
    runs.advance()
    assert runs.ended
    assert runs.states[0].solved_steps is not None
