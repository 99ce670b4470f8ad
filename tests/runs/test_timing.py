"""Where the time went: shares that add up, and advice that names the right setting, one that exists."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from raynforce import settings
from raynforce.algos import algorithm_class
from raynforce.cli.parser import parse
from raynforce.config import Config
from raynforce.engines.native.timing import Seen, TimeTree, verdict, wall_shares
from raynforce.experiment import resolve

FLAGS = {"--samplers": "sampling.samplers", "--envs": "sampling.envs", "--runtime": "runtime", "--topology": "topology"}


def config(algo: str = "ppo", **dotted: Any) -> Config:
    given = {"runtime": "inline", "topology": "sync"} | {k.replace("__", "."): v for k, v in dotted.items()}
    return resolve({"env": "CartPole-v1", "algo": algo, "preset": "none"}, settings.nested(given))[0]


def tree(sampler: dict[str, float], learner: dict[str, float]) -> TimeTree:
    times = TimeTree()
    times.add("sampler", sampler)
    times.add("learner", learner)
    return times


def test_metrics_are_shares_of_each_role_since_the_last_call() -> None:
    times = TimeTree()
    assert times.metrics() == {}
    times.add("sampler", {"env": 1.0, "policy": 2.0})
    times.add("sampler", {"env": 2.0, "waiting": 3.0})
    assert times.metrics() == pytest.approx(
        {"time/sampler/env": 3 / 8, "time/sampler/policy": 0.25} | {"time/sampler/waiting": 3 / 8}
    )
    assert times.metrics() == {}, "nothing happened since"
    times.add("sampler", {"env": 1.0})
    times.add("learner", {"learn": 0.5, "transport": 1.5})
    assert times.metrics() == {
        "time/sampler/env": 1.0,
        "time/sampler/policy": 0.0,
        "time/sampler/waiting": 0.0,
        "time/learner/learn": 0.25,
        "time/learner/transport": 0.75,
    }


def test_adding_is_cheap() -> None:
    times, seconds = TimeTree(), dict.fromkeys(("env", "policy", "other", "transport", "waiting"), 0.1)
    began = time.process_time()
    for _ in range(10_000):
        times.add("sampler", seconds)
    assert time.process_time() - began < 0.5


# -- what held the run up ---------------------------------------------------------------------------------


def test_inline_nobody_waits() -> None:
    """Two samplers and a learner in turn: what a role waits for is another's work, which is counted there."""
    total = {
        "sampler": {"env": 4.0, "policy": 1.0, "other": 1.0, "waiting": 14.0},
        "learner": {"learn": 4.0, "waiting": 6},
    }
    shares = wall_shares(total, config(sampling__samplers=2))
    assert shares == {"env": 0.4, "policy": 0.2, "learner": 0.4, "transport": 0.0, "waiting": 0.0}


def test_in_turns_over_processes() -> None:
    """Ten seconds: two samplers sample for 5 and 3 s, one waits for the other, then both for the learner."""
    total = {
        "sampler": {"env": 7.0, "policy": 1.0, "transport": 1.0, "waiting": 11.0},
        "learner": {"learn": 3.0, "prepare": 0.5, "transport": 0.5, "waiting": 6.0},
    }
    shares = wall_shares(total, config(runtime="process", sampling__samplers=2))
    expected = {"env": 0.35, "policy": 0.05, "learner": 0.35, "transport": 0.1, "waiting": 0.15}
    assert shares == pytest.approx(expected)


@pytest.mark.parametrize("topology", ["overlap", "async"])
def test_side_by_side_the_busier_role_counts(topology: str) -> None:
    how = config(runtime="process", topology=topology)
    busy, idle = {"env": 8.0, "policy": 1.0, "waiting": 1.0}, {"env": 1.0, "waiting": 9.0}
    learner = {"learn": 4.0, "transport": 1.0, "waiting": 5.0}
    by_sampler = wall_shares({"sampler": busy, "learner": learner}, how)
    assert by_sampler == {"env": 0.8, "policy": 0.1, "learner": 0.0, "transport": 0.0, "waiting": 0.1}
    by_learner = wall_shares({"sampler": idle, "learner": learner}, how)
    assert by_learner == {"env": 0.0, "policy": 0.0, "learner": 0.4, "transport": 0.1, "waiting": 0.5}


def test_gradients_of_workers_count_as_such() -> None:
    how = config(runtime="process", topology="shared-agent")
    worker, agent = {"env": 1.0, "gradients": 8.0, "waiting": 1.0}, {"learn": 1.0, "waiting": 9.0}
    shares = wall_shares({"sampler": worker, "learner": agent}, how)
    expected = {"env": 0.1, "policy": 0.0, "learner": 0.0, "transport": 0.0, "waiting": 0.1, "gradients": 0.8}
    assert shares == pytest.approx(expected)
    said = verdict(Seen(shares, how, 4, tolerates_lag=True))
    assert said.startswith("computing gradients bound this run: it took 80 % of it")
    assert said.endswith("--samplers 4 computes more of them at once")


# -- what to change ---------------------------------------------------------------------------------------

ENV, POLICY, LEARNER, TRANSPORT, WAITING = ("env", "policy", "learner", "transport", "waiting")
STARTUP, EVALUATION, SAVING = ("start-up", "evaluation", "saving")
ELSEWHERE = {"runtime": "process", "topology": "overlap"}
TABLE = {
    "inline, cores to spare": (ENV, {}, 4, "--runtime process --samplers 4 --envs 2 uses all 4 cores"),
    "inline, two cores": (ENV, {}, 2, "--runtime process --samplers 2 --envs 4 uses all 2 cores"),
    "inline, samplers enough": (ENV, {"sampling__samplers": 4}, 4, "--runtime process uses all 4 cores"),
    "inline, one environment": (
        ENV,
        {"sampling__envs": 1},
        4,
        "--runtime process --samplers 4 --set sampling.fragment=64",
    ),
    "one core": (ENV, {}, 1, "one core: --runtime ray uses others, or make the environment faster"),
    "process, cores to spare": (ENV, ELSEWHERE, 8, "it. --samplers 8 --envs 1 uses all 8 cores"),
    "process, no core to spare": (ENV, {**ELSEWHERE, "sampling__samplers": 2}, 2, "--runtime ray uses other machines"),
    "a cluster": (
        ENV,
        {"runtime": "ray", "sampling__samplers": 4},
        2,
        "--samplers 8 --envs 4 uses more of the cluster",
    ),
    "forward passes": (POLICY, {}, 2, "--envs 16 steps more environments with each forward pass"),
    "updates of ppo": (LEARNER, {}, 2, "--set algorithm.epochs=5 or --set algorithm.minibatch_size=128"),
    "one epoch": (LEARNER, {"algorithm__epochs": 1}, 2, "cost less: --set algorithm.minibatch_size=128"),
    "updates of dqn": (
        LEARNER,
        {"algo": "dqn"},
        2,
        "--set algorithm.batch_size=128 or --set algorithm.samples_per_insert=8",
    ),
    "updates of impala": (LEARNER, {"algo": "impala"}, 2, "--set algorithm.minibatch_size=640"),
    "nothing to lower": (
        LEARNER,
        {"algo": "impala", "algorithm__minibatch_size": None},
        2,
        "A smaller network.hidden costs less",
    ),
    "a large network": (LEARNER, {"network__hidden": (512, 512)}, 4, "or --set learner.threads=4"),
    "a large network kept off the GPU": (
        LEARNER,
        {"network__hidden": (512, 512), "learner__device": "cpu"},
        1,
        "or --set learner.device=auto",
    ),
    "messages": (
        TRANSPORT,
        ELSEWHERE,
        2,
        "--set sampling.fragment=512 or --envs 16 moves more at a time, and --runtime",
    ),
    "messages of many": (TRANSPORT, {**ELSEWHERE, "sampling__samplers": 2}, 2, "moves more at a time"),
    "uneven samplers": (WAITING, {**ELSEWHERE, "sampling__samplers": 2}, 2, "--topology async lets nobody wait"),
    "one slow sampler": (WAITING, ELSEWHERE, 2, "--set sampling.fragment=512 lets roles meet less often"),
    "a short run": (STARTUP, {}, 2, "A longer run (--steps) makes up for it"),
    "a short run of a cluster": (STARTUP, {"runtime": "ray"}, 2, "--runtime process starts sooner, and a longer run"),
    "much to evaluate": (
        EVALUATION,
        {"steps": 1000},
        2,
        "--runtime process evaluates beside training; --set eval.every=100 or --set eval.episodes=10 plays less",
    ),
    "much to evaluate, one core": (EVALUATION, {"eval__every": 7}, 1, "it. --set eval.every=14 or"),
    "a slow disk": (SAVING, ELSEWHERE, 2, "--set checkpoint.every=100000 saves less often"),
    "large async batches": (WAITING, {"runtime": "process", "topology": "async"}, 2, "--set stream.batch=1"),
}
NAMES = {
    ENV: "the environment bound",
    POLICY: "the policy bound",
    LEARNER: "the learner bound",
    TRANSPORT: "transport between roles bound",
    WAITING: "waiting for each other bound",
    STARTUP: "start-up bound",
    EVALUATION: "evaluation bound",
    SAVING: "saving bound",
}


def seen(bound: str, how: dict[str, Any], cores: int, *, share: float = 0.8, tolerates_lag: bool = True) -> Seen:
    rest = (1 - share) / (len(NAMES) - 1)
    return Seen({name: share if name == bound else rest for name in NAMES}, config(**how), cores, tolerates_lag)


@pytest.mark.parametrize("case", TABLE)
def test_what_bound_a_run_and_what_to_change(case: str) -> None:
    bound, how, cores, advice = TABLE[case]
    said = verdict(seen(bound, how, cores))
    assert said.startswith(f"{NAMES[bound]} this run: it took 80 % of it. ")
    assert advice in said


def test_taking_turns() -> None:
    shares = {"env": 0.4, "policy": 0.1, "learner": 0.45, "transport": 0.03, "waiting": 0.02}
    turns = "sampling and learning took turns, 50 % and 45 % of the run: "
    inline, process = config(), config(runtime="process")
    assert verdict(Seen(shares, inline, 2, True)) == f"{turns}--runtime process --topology overlap does both at once"
    assert verdict(Seen(shares, process, 2, True)) == f"{turns}--topology overlap does both at once"
    assert verdict(Seen(shares, inline, 1, True)).startswith("the learner bound"), "one core cannot do both at once"
    assert verdict(Seen(shares, inline, 2, False)).startswith("the learner bound"), "the algorithm cannot wait"
    assert verdict(Seen(shares, config(runtime="process", topology="overlap"), 2, True)).startswith("the learner bound")


def test_nothing_stands_out() -> None:
    shares = {"env": 0.3, "policy": 0.2, "learner": 0.2, "transport": 0.1, "waiting": 0.2}
    assert verdict(Seen(shares, config(), 2, True)) == "nothing stands out: this run was balanced"


@pytest.mark.parametrize("tolerates_lag", [True, False])
@pytest.mark.parametrize("case", TABLE)
def test_all_advice_can_be_followed(case: str, tolerates_lag: bool) -> None:
    """Every setting exists, and what is suggested is a config that can be built."""
    bound, how, cores, _ = TABLE[case]
    for share in (0.5, 0.8):
        run = seen(bound, how, cores, share=share, tolerates_lag=tolerates_lag)
        said = verdict(run)
        known = set(settings.known_keys(Config, {"algorithm": algorithm_class(run.config.algo).Settings}))
        assert set(re.findall(r"\b[a-z]+\.[a-z_]+\b", said)) <= known
        words = [word.rstrip(",;.") for word in said.split()]
        flags = [words[i : i + 2] for i, word in enumerate(words) if word.startswith("--")]
        assert {flag for flag, _ in flags} <= {*FLAGS, "--set"}
        for flag, value in flags:
            parse(["train", "ppo", "CartPole-v1", flag, value])
            change = settings.parse_assignments([value if flag == "--set" else f"{FLAGS[flag]}={value}"])
            built, _ = resolve(run.config.to_dict(), change)
            assert built != run.config, f"{flag} {value} changes nothing"


# -- the block at the end ---------------------------------------------------------------------------------


def test_the_report() -> None:
    """Each line's shares are of one thing, which it names, and add up; what to change follows those of the run."""
    times = tree({"env": 7.0, "policy": 1.2, "other": 0.3, "waiting": 1.5}, {"learn": 1.0, "prepare": 0.5})
    run = {"start-up": 4.0, "training": 10.0, "evaluation": 4.0, "saving": 2.0}
    assert times.report(config(), cores=2, tolerates_lag=True, run=run).splitlines() == [
        "where the time went, in percent (it took 20.0 s):",
        "  of the run       ▒▒█████▓▓▓▓░  start-up 20, env 35, policy 8, learner 8,",
        "                                 evaluation 20, saving 10",
        "  of the samplers  ████████▓▓··  env 70, policy 12, other 3, waiting 15",
        "  of the learner   ████████▓▓▓▓  learn 67, prepare 33",
        "the environment bound this run: it took 35 % of it. --runtime process",
        "--samplers 2 --envs 4 uses all 2 cores",
    ]


def told(times: TimeTree, how: Config, run: dict[str, float], asked: list[float], options: str = "") -> str:
    """What a report says to change, in one line; `asked` gets what was asked of environments."""

    def side_by_side(seconds: float) -> str:
        asked.append(seconds)
        return options

    report = times.report(how, cores=2, tolerates_lag=True, run=run, side_by_side=side_by_side)
    return " ".join(report.partition("saving")[2].splitlines()[1:]).partition("of the learner")[2]


def test_advice_follows_the_largest_share_of_the_run() -> None:
    """A learner that took most of the training is not what bound a run that was mostly start-up."""
    times, asked = tree({"env": 1.0}, {"learn": 9.0}), list[float]()
    long = {"start-up": 2.0, "training": 10.0, "evaluation": 1.0, "saving": 1.0}
    assert "the learner bound this run: it took 64 % of it" in told(times, config(), long, asked)
    short = {**long, "training": 1.5}
    assert "start-up bound this run: it took 36 % of it. A longer run" in told(times, config(), short, asked)
    assert not asked, "environments were not what bound it"


def test_environments_that_wait_are_stepped_side_by_side() -> None:
    times, asked = tree({"env": 9.0}, {"learn": 1.0}), list[float]()
    run = {"start-up": 1.0, "training": 10.0, "evaluation": 0.0, "saving": 1.0}
    options = "--runtime process --topology central"
    assert f"waiting. {options} steps" in told(times, config(), run, asked, options)
    assert asked == [9.0]
    assert "--runtime process --samplers 2" in told(times, config(), run, asked)


def test_environments_that_go_their_own_pace_have_a_line_of_their_own() -> None:
    times, how = tree({"policy": 1.0}, {"learn": 1.0}), config(runtime="process", topology="central")
    times.add("env", {"busy": 8.0, "learner": 2.0})
    run = {"start-up": 1.0, "training": 10.0, "evaluation": 0.0, "saving": 1.0}
    lines = times.report(how, cores=2, tolerates_lag=True, run=run).splitlines()
    assert lines[1] == "  of the run           ▒██████████░  start-up 8, training 83, saving 8"
    assert lines[4] == "  of the environments  ██████████▒▒  busy 80, learner 20"
    assert lines[5].startswith("environments were busy 80 % of their time;")
    short = times.report(how, cores=2, tolerates_lag=True, run={**run, "start-up": 20.0}).splitlines()
    assert short[5].startswith("start-up bound this run: it took 65 % of it.")


@pytest.mark.parametrize("case", TABLE)
def test_a_report_fits_a_terminal(case: str) -> None:
    bound, how, cores, _ = TABLE[case]
    sampler = dict.fromkeys(("env", "policy", "other", "transport", "waiting"), 10.0)
    learner = dict.fromkeys(("learn", "prepare", "transport", "waiting"), 10.0)
    for parts in (sampler, learner):
        parts |= {name: 1e3 for name in parts if name == {"learner": "learn"}.get(bound, bound)}
    run = {"start-up": 1.0, "training": 1e3, "evaluation": 1.0, "saving": 1.0}
    run |= {name: 1e4 for name in run if name == bound}
    lines = tree(sampler, learner).report(config(**how), cores=cores, tolerates_lag=True, run=run).splitlines()
    assert 5 <= len(lines) <= 9
    assert max(map(len, lines)) <= 80


def test_a_run_that_did_nothing_has_no_report() -> None:
    assert TimeTree().report(config(), cores=2, tolerates_lag=True) == ""
    times = TimeTree()
    times.add("sampler", {"env": 1.0})
    (_, line) = times.report(config(), cores=2, tolerates_lag=True).splitlines()
    assert line == "  of the samplers  ████████████  env 100"
