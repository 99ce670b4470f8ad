"""What a submitted command becomes, without a cluster: its id, its words, where its run is, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import raynforce
from raynforce.cli.parser import parse
from raynforce.errors import UsageError
from raynforce.ops import jobs
from raynforce.ops.command import command
from raynforce.runs.directory import RunDirectory
from raynforce.runs.lock import locked

RUNS = "s3://bucket/runs"
PAGE = (Path(__file__).parents[2] / "docs/jobs.md").read_text()
TUNE = ["tune", "ppo", "CartPole-v1", "--trials", "3"]
TRAIN = ["train", "ppo", "CartPole-v1", "--steps", "1k"]


def test_equal_commands_are_one_run_and_others_are_not() -> None:
    first = command([*TRAIN, "--json"], RUNS)
    assert first == command(TRAIN, f"{RUNS}/")
    assert first.id.startswith("ppo-CartPole-v1-seed0-")
    assert first.run == f"{RUNS}/{first.id}"
    others = [command([*TRAIN, "--seed", "1"], RUNS), command(TRAIN, "s3://bucket/others")]
    assert len({first.id, *(other.id for other in others)}) == 3


def test_the_entrypoint_goes_on_with_its_run_and_is_a_command_that_can_be_parsed() -> None:
    made = command([*TRAIN, "--set", "env_args.x=a b"], RUNS, "mine")
    python, module, name, *words = shlex.split(made.entrypoint("python"))[1:]
    assert (python, module, name) == ("python", "-m", "raynforce")
    arguments = parse(words)
    assert (arguments.out, arguments.resume, arguments.json) == (f"{RUNS}/mine", True, True)
    assert arguments.set == ["env_args.x=a b"]


def test_a_config_file_travels_in_the_command_and_options_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("env: CartPole-v1\nseed: 3\nalgorithm: {gamma: 0.9}\nnetwork: {hidden: [8, 8]}\n")
    made = command(["train", f"--config={file}", "--seed", "4"], RUNS)
    arguments = parse(made.words)
    assert arguments.config is None
    assert arguments.set == ['env="CartPole-v1"', "seed=3", "algorithm.gamma=0.9", "network.hidden=[8, 8]"]
    assert arguments.seed == "4"
    assert made.names[:2] == ["CartPole-v1", "ppo"]
    assert "seed4" in made.id


def test_out_names_the_run_and_a_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = command([*TRAIN, "--out", "all/mine"])
    assert (made.id, made.run) == ("mine", f"{tmp_path}/all/mine")


def test_resume_is_of_a_run_whose_config_says_which_code_it_needs(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.yaml").write_text("env: my_sims:make\nalgo: ppo\nnetwork: {factory: null}\n")
    made = command(["resume", str(run), "--steps", "2k"])
    assert (made.id, made.run, made.names) == ("mine", str(run), ["my_sims:make", "ppo"])
    evaluated = command(["eval", str(run), "--episodes", "3"])
    assert evaluated.id.startswith("eval-mine-")
    assert evaluated.names == made.names
    assert "cannot be read from here" in command(["resume", str(tmp_path / "none")]).note


def test_several_seeds_are_one_job_whose_runs_are_side_by_side() -> None:
    made = command([*TRAIN, "--seeds", "3", "--seed", "4"], RUNS)
    assert made.id.startswith("ppo-CartPole-v1-seeds4-6-")
    arguments = parse(made.words)
    assert (arguments.seeds, arguments.out, arguments.resume) == ("3", made.run, True)
    assert command([*TRAIN, "--seeds", "3", "--seed", "4"], RUNS) == made


def test_a_search_is_a_job_that_begins_or_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text("algorithm.learning_rate: log(1e-5,1e-2)\n")
    Path("base.yaml").write_text("algorithm: {gamma: 0.9}\n")
    made = command([*TUNE, "--search", "space.yaml", "algorithm.epochs=int(1,4)", "--config", "base.yaml"], "runs")
    assert made.run == f"{tmp_path}/runs/{made.id}"
    arguments = parse(made.words)
    assert arguments.out == arguments.resume == made.run
    assert arguments.search == ["algorithm.learning_rate=log(1e-05,0.01)", "algorithm.epochs=int(1,4)"]
    assert (arguments.config, arguments.set) == (None, ["algorithm.gamma=0.9"])
    Path("space.yaml").write_text("algorithm.learning_rate: log(1e-4,1e-2)\n")
    assert command([*TUNE, "--search", "space.yaml"], "runs").id != command([*TUNE], "runs").id
    again = command(["tune", "--resume", "runs/mine"])
    assert (again.id, again.run) == ("mine", f"{tmp_path}/runs/mine")


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ("plot runs/a runs/b -o all.png", "plot HERE/runs/a HERE/runs/b -o HERE/all.png"),
        ("report runs/a --out=all.html", "report HERE/runs/a --out=HERE/all.html"),
        ("export runs/a folder --to onnx", "export HERE/runs/a HERE/folder --to onnx"),
        ("promote s3://b/a --to registry", "promote s3://b/a --to HERE/registry"),
        ("eval runs/a --env my:make --video films", "eval HERE/runs/a --env my:make --video HERE/films"),
    ],
)
def test_paths_mean_the_same_there(words: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = command(words.split())
    assert list(made.words) == [*there.replace("HERE", str(tmp_path)).split(), "--json"]
    parse(made.words)


@pytest.mark.parametrize(
    ("words", "runs", "id", "says"),
    [
        (TRAIN, None, None, "say where runs are kept"),
        (["train", "ppo"], RUNS, None, "train needs ALGO and ENV"),
        ([*TRAIN, "--stepz", "3"], RUNS, None, "unknown option"),
        ([*TRAIN, "--set", "algorithm.gama=1"], RUNS, None, "did you mean"),
        ([*TRAIN, "--out", "x/y"], RUNS, None, "drop --runs"),
        ([*TRAIN, "--seeds", "0"], RUNS, None, "seeds"),
        ([*TRAIN, "--print-config"], RUNS, None, "prints and trains nothing"),
        (TRAIN, RUNS, "a b", "no name of a run"),
        (TRAIN, RUNS, "a~2", "no name of a run"),
        (TRAIN, "s3://me:secret@bucket/runs", None, "holds a password"),
        (["sim", "new", "x"], None, None, "cannot be submitted"),
        (["submit", "train"], None, None, "cannot be submitted"),
        (["serve", "runs/x"], None, None, "raynforce serve RUN --address"),
        (TUNE, None, None, "say where it is kept"),
        (TUNE, RUNS, None, "not at a URL"),
        ([*TUNE, "--search", "algorithm.gama=log(1,2)"], "/runs", None, "did you mean"),
        ([*TUNE, "--address", "auto"], "/runs", None, "drop it"),
        ([*TUNE, "--out", "/runs/x"], "/runs", None, "drop --runs"),
        (["tune", "--resume", "/runs/x"], "/runs", None, "drop --runs"),
        (["jobs"], None, None, "cannot be submitted"),
        (["resume", "s3://b/mine"], None, "other", "the run's own name is its id"),
        (["eval", "s3://b/mine"], RUNS, None, "--runs is for train"),
    ],
)
def test_what_cannot_be_submitted_is_said_here(words: list[str], runs: str | None, id: str | None, says: str) -> None:
    with pytest.raises(UsageError) as error:
        command(words, runs, id)
    assert says in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"env": ["NOT_SET_ANYWHERE"]}, "no such variable"),
        ({"env": ["RAY_AUTH_TOKEN"]}, "Ray sets its own"),
        ({"grace": 0}, "1 or more"),
    ],
)
def test_wrong_options_reach_no_cluster(how: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    with pytest.raises(UsageError, match=says):
        jobs.submit(TRAIN, runs=RUNS, address="http://127.0.0.1:1", **how)  # type: ignore[arg-type]


def test_a_command_is_a_list_of_words() -> None:
    with pytest.raises(UsageError, match="list of words"):
        jobs.submit("train ppo CartPole-v1", runs=RUNS)


def test_results_are_found_below_what_else_is_printed() -> None:
    lines = ["{not json", '{"run": "a"}', '{"run": "b"}', "Exception ignored in: …"]
    assert jobs.result_in(lines) == {"run": "b"}
    assert jobs.result_in(["[1]", "{broken"]) is None


def test_train_resume_keeps_two_apart_and_refuses_another_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raynforce.runs import mirrored

    small = {"eval.final_episodes": 1, "eval.episodes": 1, "runtime": "inline", "topology": "sync"}
    how = {"out": tmp_path / "run", "settings": small, "resume": True}
    first = raynforce.train("CartPole-v1", steps=256, **how)  # type: ignore[arg-type]
    again = raynforce.train("CartPole-v1", steps=256, **how)  # type: ignore[arg-type]
    assert again.result.weights_sha256 == first.result.weights_sha256
    with pytest.raises(UsageError, match="steps is 256 and not 512"):
        raynforce.train("CartPole-v1", steps=512, **how)  # type: ignore[arg-type]
    monkeypatch.setattr(mirrored, "TAKEOVER_SECONDS", 0.1)
    with locked(RunDirectory(tmp_path / "run").path), pytest.raises(UsageError, match="in use by"):
        raynforce.train("CartPole-v1", steps=256, **how)  # type: ignore[arg-type]


def test_every_command_of_the_page_can_be_typed() -> None:
    lines = [line.split("#")[0] for line in PAGE.splitlines() if line.startswith("raynforce ")]
    for line in lines:
        arguments = parse(shlex.split(line)[1:])
        assert command(arguments.words, arguments.runs, arguments.id).words[-1] == "--json"
    assert len(lines) == 6
    options = parse(["submit", "train"])
    listed = re.findall(r"--([a-z][a-z-]+)", PAGE.partition("## Options")[2].partition("**Code.**")[0])
    assert [name for name in listed if not hasattr(options, name.replace("-", "_"))] == []
    named = re.findall(r"`job\.(\w+)|raynforce\.(\w+)\(", PAGE)
    assert [a for a, _ in named if a and not hasattr(jobs.Job, a)] == []
    assert [b for _, b in named if b and not hasattr(raynforce, b)] == []


def test_what_the_page_gives_curl_is_a_job_that_goes_on_with_its_run() -> None:
    body = json.loads(PAGE.partition("-d '")[2].partition("'\n")[0])
    first, python, module, name, *words = shlex.split(body["entrypoint"])
    assert (first, python, module, name) == ("exec", "python", "-m", "raynforce")
    arguments = parse(words)
    assert (arguments.resume, arguments.json) == (True, True)
    assert arguments.out.endswith(f"/{body['submission_id']}")
    assert int(body["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) == jobs.GRACE
