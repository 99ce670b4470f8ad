"""Words of other libraries are answered with ours, and what there is none of is said."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from typing import Any

import pytest

import raynforce.topologies
from raynforce import settings
from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.config import Config
from raynforce.errors import UsageError, nearest
from raynforce.experiment import resolve
from raynforce.synonyms import ALGORITHMS, NONE, SETTINGS, VALUES

TABLES: dict[str, Any] = {"settings": {**SETTINGS, **NONE}, "algorithms": ALGORITHMS, "values": VALUES}


def keys(algo: str) -> set[str]:
    return set(settings.known_keys(Config, {"algorithm": algorithm_class(algo).Settings}))


KEYS = {algo: keys(algo) for algo in BUILT_IN}


def complaint(algo: str, **given: Any) -> str:
    with pytest.raises(UsageError) as error:
        resolve({"env": "CartPole-v1", "algo": algo}, settings.nested(given))
    return str(error.value)


# -- the table --------------------------------------------------------------------------------------------


def test_every_setting_of_the_table_exists_and_is_found_for_some_algorithm() -> None:
    for word, rows in SETTINGS.items():
        here = [found.path for found in rows]
        first = [next((path for path in here if path in KEYS[algo]), None) for algo in BUILT_IN]
        assert sorted(here) == sorted({*first} - {None}), word  # none is wrong, double, or hidden behind another


@pytest.mark.parametrize("table", TABLES)
def test_every_word_is_in_one_row(table: str) -> None:
    words = [word.lower().replace("_", "") for word in " ".join(TABLES[table]).split()]
    assert sorted(words) == sorted(set(words))


def test_no_word_of_the_table_is_one_of_ours_for_every_algorithm() -> None:
    """Else nobody would ever be told of it."""
    ours = set.intersection(*KEYS.values())
    assert {path.rpartition(".")[2] for path in ours}.isdisjoint(" ".join([*SETTINGS, *NONE]).split())


def test_no_algorithm_of_the_table_is_one_of_ours() -> None:
    assert set(BUILT_IN).isdisjoint(" ".join(ALGORITHMS).split())


def test_what_the_table_says_of_algorithms_names_settings_and_topologies_that_exist() -> None:
    topologies = raynforce.topologies.BUILT_IN
    for sentence in ALGORITHMS.values():
        words = sentence.replace(",", " ").replace(";", " ").split()
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("algorithm."):
                assert word.partition("=")[0] in set.union(*KEYS.values()), sentence
            if word == "--topology":
                assert after in topologies, sentence


# -- settings ---------------------------------------------------------------------------------------------

PEERS = """
    lr n_steps n_envs ent_coef vf_coef batch_size minibatch_size n_epochs num_epochs num_sgd_iter clip_range gae_lambda
    lambda buffer_size learning_starts tau target_update_interval exploration_fraction exploration_final_eps train_freq
    gradient_steps num_env_runners num_envs_per_env_runner rollout_fragment_length train_batch_size net_arch
    policy_kwargs total_timesteps max_grad_norm normalize_advantage use_sde clip_coef update_epochs num_minibatches
    anneal_lr step_per_collect repeat_per_collect hidden_sizes eps_clip ppo_clip_ratio num_envs_per_worker unroll_length
    samples_per_insert num_actors target_update_period env_config max_episode_steps
"""


@pytest.mark.parametrize("algo", BUILT_IN)
def test_what_peers_call_it_is_answered_for_every_algorithm(algo: str) -> None:
    silent = {}
    for word in PEERS.split():
        text = complaint(algo, **{word: 1})
        if text == f"unknown setting {word!r}" or "\n" in text:
            silent[word] = text
    assert silent == {}


ANSWERS: list[tuple[str, str, str]] = [
    ("ppo", "algorithm.lr", ": here it is algorithm.learning_rate"),
    ("ppo", "lr", ": here it is algorithm.learning_rate"),
    ("ppo", "n_steps", ": here it is sampling.fragment (steps of each environment)"),
    ("dqn", "n_steps", ": here it is algorithm.n_step (of n-step returns)"),
    ("ppo", "sampling.n_envs", ": here it is sampling.envs (of each sampler)"),
    ("ppo", "batch_size", ": here it is algorithm.minibatch_size (of one optimiser step)"),
    ("dqn", "batch_size", " (did you mean 'algorithm.batch_size'?)"),
    ("ppo", "num-env-runners", ": here it is sampling.samplers (at least 1, which --runtime inline keeps in this "
     "process)"),
    ("impala", "lambda_", ": here it is algorithm.vtrace_lambda"),
    ("ppo", "algorithm.buffer_size", ": dqn, sac and td3 have it, ppo does not"),
    ("dqn", "clip_range", ": ppo has it (algorithm.clip), dqn does not"),
    ("a3c", "minibatch_size", ": here it is sampling.fragment (each gradient is of one fragment: sampling.envs x "
     "sampling.fragment steps)"),
    ("ppo", "use_sde", ": here it is algorithm.gsde"),
    ("ppo", "sampling.env", " (did you mean 'sampling.envs'?)"),
    ("ppo", "algorithm.clp", " (did you mean 'algorithm.clip'?)"),
    ("ppo", "algorithm.nothing_like_it", ""),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "word", "answer"), ANSWERS, ids=lambda value: str(value)[:30])
def test_answers(algo: str, word: str, answer: str) -> None:
    assert complaint(algo, **{word: 1}) == f"unknown setting {word!r}{answer}"


def test_a_section_of_theirs() -> None:
    assert ": here it is env_args" in complaint("ppo", **{"env_config.size": 3})
    assert "network.hidden (with network.activation" in complaint("ppo", **{"policy_kwargs.net_arch": [3]})


def test_in_python() -> None:
    import raynforce

    with pytest.raises(UsageError, match=r"unknown setting 'ent_coef': here it is algorithm\.entropy_coef"):
        raynforce.train("CartPole-v1", settings={"ent_coef": 0.1})


def test_an_algorithm_of_ones_own_is_asked_what_it_has() -> None:
    own = "examples.own_algorithm:Reinforce"
    assert complaint(own, lr=1) == "unknown setting 'lr': here it is algorithm.learning_rate"
    assert complaint(own, clip_range=1) == f"unknown setting 'clip_range': ppo has it (algorithm.clip), {own} does not"


@pytest.mark.parametrize(
    ("value", "hint"),
    [("swish", " (here it is 'silu')"), ("gelu", ""), ("tahn", " (did you mean 'tanh'?)"), ("asynchronous", "")],
)
def test_values(value: str, hint: str) -> None:
    text = complaint("ppo", **{"network.activation": value})
    assert text == f"network.activation = {value!r} is not one of: tanh, relu, elu, silu{hint}"


# -- options ----------------------------------------------------------------------------------------------

OPTIONS: list[tuple[list[str], str]] = [
    (["train", "ppo", "X", "--lr", "1e-3"], "'--lr': here it is --set algorithm.learning_rate=1e-3"),
    (["train", "--lr=1e-3", "ppo", "X"], "'--lr': here it is --set algorithm.learning_rate=1e-3"),
    (["train", "ppo", "X", "--n-envs", "4"], "'--n-envs': here it is --envs 4 (of each sampler)"),
    (["train", "ppo", "X", "--num-envs", "4"], "'--num-envs': here it is --envs 4 (of each sampler)"),
    (["train", "ppo", "X", "--timesteps", "9"], "'--timesteps': here it is --steps 9 (of all environments together)"),
    (["train", "ppo", "X", "--total-timesteps"], "here it is --steps VALUE (of all environments together)"),
    (["train", "ppo", "X", "--num_workers", "2"], "'--num_workers': here it is --samplers 2"),
    (["train", "ppo", "X", "--num-env-runners", "2"], "here it is --samplers 2"),
    (["train", "ppo", "X", "--net-arch", "[64, 64]"], "here it is --set 'network.hidden=[64, 64]'"),
    (["train", "ppo", "X", "--gamma", "0.9"], "'--gamma': here it is --set algorithm.gamma=0.9"),
    (["train", "ppo", "X", "--buffer-size", "9"], "dqn, sac and td3 have it (algorithm.buffer_size), ppo does not"),
    (["train", "dqn", "X", "--buffer-size", "9"], "here it is --set algorithm.buffer_size=9"),
    (["train", "mine:Own", "X", "--buffer-size", "9"], "here it is --set algorithm.buffer_size=9"),
    (["train", "ppo", "--env", "X"], "'--env': it needs none here: raynforce train ALGO ENV"),
    (["train", "ppo", "X", "--num-gpus", "1"], "here it is --learner-gpus 1"),
    (["train", "ppo", "X", "--n-eval-envs", "5"], "here it is --set eval.envs=5"),
    (["resume", "X", "--lr", "1e-3"], "'--lr': here it is --set algorithm.learning_rate=1e-3"),
    (["train", "ppo", "X", "--sed", "1"], "did you mean '--seed'?"),
    (["eval", "X", "--lr", "1"], "unknown option '--lr';"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "answer"), OPTIONS, ids=lambda value: str(value)[-30:])
def test_options(words: list[str], answer: str) -> None:
    from raynforce.cli.parser import parse

    with pytest.raises(UsageError) as error:
        parse(words)
    assert answer in str(error.value)


# -- algorithms -------------------------------------------------------------------------------------------

HAS = "raynforce has ppo, dqn, sac, td3, impala, a3c, bc, or your own module:Class"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ddpg", " (for continuous actions there are sac, td3 and ppo)"),
        ("discrete-sac", " (sac, with algorithm.discrete=true)"),
        ("a2c", " (a3c on --topology sync is A2C)"),
        ("APPO", " (ppo or impala on --topology async come nearest)"),
        ("apex", " (dqn on --topology replay, with algorithm.prioritized=true, comes nearest)"),
        ("Dreamer-v3", " (nothing here learns a model of the environment)"),
        ("mpo", " (for continuous actions there are sac, td3 and ppo)"),
        ("PPO", " (did you mean 'ppo'?)"),
        ("impla", " (did you mean 'impala'?)"),
        ("xyz", ""),
    ],
)
def test_algorithms(name: str, hint: str) -> None:
    assert complaint(name) == f"no algorithm {name!r}{hint}; {HAS}"


def test_no_algorithm_of_others_is_taken_for_a_slip_of_the_pen() -> None:
    for name in chain.from_iterable(words.split() for words in ALGORITHMS):
        assert "did you mean" not in complaint(name)


def test_all_that_there_are_are_named() -> None:
    assert all(name in HAS for name in BUILT_IN)


# -- spelling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("tarin", ["train", "resume"], "train"),  # two letters swapped
        ("rum", ["run"], "run"),  # one wrong
        ("sed", ["set", "seed"], "seed"),  # one missing is likelier than one wrong
        ("sac", ["a3c", "dqn"], None),  # two of three
        ("lr", ["lt"], None),
        ("algorithm.lr", ["algorithm.clip", "algorithm.gamma"], None),  # the section proves nothing
        ("algorithm.learnign_rat", ["algorithm.learning_rate"], "algorithm.learning_rate"),
        ("Cartpole", ["CartPole-v0", "CartPole-v1", "Acrobot-v1"], "CartPole-v1"),  # the beginning, of the newest
        ("shared_agent", ["sync", "shared-agent"], "shared-agent"),
        ("gamma", ["algorithm.gamma", "gammas"], "algorithm.gamma"),  # a section was forgotten
        ("sampling.env", ["env", "sampling.envs"], "sampling.envs"),
        ("", ["a", "b"], None),
    ],
)
def test_only_what_is_spelled_almost_alike_is_guessed(word: str, known: list[str], found: str | None) -> None:
    assert nearest(word, known) == (f" (did you mean {found!r}?)" if found else "")


def test_the_table_is_read_only_once_there_is_a_mistake() -> None:
    code = (
        "import sys, raynforce.cli; code = raynforce.cli.main(['train', 'ppo', 'CartPole-v1', '--print-config']); "
        "assert code == 0; print({'raynforce.synonyms', 'raynforce.hints'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
