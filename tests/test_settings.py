"""Settings: values from YAML and the command line become typed fields, and every mistake is one line with its fix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from raynforce import settings
from raynforce.algos import algorithm_class, presets
from raynforce.algos.dqn import DQNConfig
from raynforce.algos.ppo import PPOConfig
from raynforce.config import Config
from raynforce.errors import UsageError, nearest
from raynforce.experiment import resolve
from raynforce.settings import Range, coerce

Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1, 100)]


def resolved(*layers: dict[str, Any], env: str = "CartPole-v1") -> Config:
    """A config without presets."""
    return resolve({"env": env, "preset": "none"}, *layers)[0]


def complaint(*layers: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        resolved(*layers)
    text = str(error.value)
    assert "\n" not in text
    return text


# -- coercion -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (5, int, 5),
        (1e5, int, 100_000),
        ("1e5", int, 100_000),
        ("1_000", int, 1000),
        ("-7", int, -7),
        ("3.0", int, 3),
        (3, float, 3.0),
        ("3e-4", float, 3e-4),
        ("-.5", float, -0.5),
        (True, bool, True),
        ("false", bool, False),
        ("10k", int, 10_000),
        ("10K", Annotated[int, Range(1, 1e12)], 10_000),
        ("1M", int, 1_000_000),
        ("2.3M", int, 2_300_000),
        ("1_000k", int | None, 1_000_000),
        ("1e6", int, 1_000_000),
        ("2.5e5", int, 250_000),
        ("Yes", bool, True),
        ("off", bool, False),
        ("some text", str, "some text"),
        (7, str, "7"),
        ("64,64", tuple[int, ...], (64, 64)),
        ("64, 32", tuple[int, ...], (64, 32)),
        ("[64, 32]", tuple[int, ...], (64, 32)),
        ("(64,)", tuple[int, ...], (64,)),
        ([64, "32"], tuple[int, ...], (64, 32)),
        (64, tuple[int, ...], (64,)),
        ("64", tuple[int, ...], (64,)),
        ("", tuple[int, ...], ()),
        ([], tuple[int, ...], ()),
        (("a", "b"), tuple[str, ...], ("a", "b")),
        (None, float | None, None),
        ("none", float | None, None),
        ("NULL", str | None, None),
        ("", float | None, None),
        ("2", float | None, 2.0),
        ("0.5", Share | None, 0.5),
        (None, Share | None, None),
        ("relu", Literal["tanh", "relu"], "relu"),
        (1, Literal[1], 1),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("0", Share, 0.0),
        (1, Share, 1.0),
        (100, Count, 100),
        ("1,100", tuple[Count, ...], (1, 100)),
    ],
)
def test_coercion(value: Any, hint: Any, expected: Any) -> None:
    found = coerce(value, hint, "a.b")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "says"),
    [
        (1.5, int, "a whole number"),
        ("1.5", int, "a whole number"),
        ("ten", int, "a whole number"),
        ("", int, "a whole number"),
        (None, int, "a whole number"),
        (True, int, "a whole number"),
        ([1], int, "a whole number"),
        *(
            (text, int, "a whole number")
            for text in ("k", "1kk", "10kM", "10m", "10 thousand", "1.0005k", "nank", "infM")
        ),
        ("1e999999999k", int, "a whole number"),
        ("1k", Count, "from 1 to 100"),
        ("10k", float, "a number"),
        ("ten", float, "a number"),
        (False, float, "a number"),
        (1, bool, "true or false"),
        ("1", bool, "true or false"),
        ("maybe", bool, "true or false"),
        (None, bool, "true or false"),
        (None, str, "text"),
        (["a"], str, "text"),
        (-0.1, Share, "from 0 to 1"),
        ("1.001", Share, "from 0 to 1"),
        (2, Share | None, "from 0 to 1"),
        (0, Count, "a whole number from 1 to 100"),
        (101, Count, "a whole number from 1 to 100"),
        ("5,0", tuple[Count, ...], "from 1 to 100"),
        ("5,x", tuple[Count, ...], "from 1 to 100"),
        (-1, Annotated[float, Range(0)], "at least 0"),
        (5, dict[str, Any], "not a mapping"),
        (math.nan, float, "a number"),
        ("nan", Share, "a number"),
        (math.inf, float, "a number"),
        ("-inf", float, "a number"),
        (math.inf, int, "a whole number"),
        ("1e400", int, "a whole number"),
        ("1e400", Annotated[float, Range(0)], "at least 0"),
        (1e30, Count, "from 1 to 100"),
        pytest.param(
            10**400,
            int,
            "a whole number",
            id="huge whole",
        ),
        pytest.param(
            10**400,
            Share,
            "from 0 to 1",
            id="huge share",
        ),
        (True, str, "text"),
    ],
)
def test_refused_values(value: Any, hint: Any, says: str) -> None:
    with pytest.raises(UsageError) as error:
        coerce(value, hint, "a.b")
    text = str(error.value)
    assert text.startswith("a.b = ")
    assert says in text
    assert "\n" not in text


def test_literals_suggest_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        coerce("rleu", Literal["tanh", "relu", "elu"], "network.activation")
    assert str(error.value) == ("network.activation = 'rleu' is not one of: tanh, relu, elu (did you mean 'relu'?)")


@pytest.mark.parametrize("seed", ["9007199254740993", 2**63 - 1, str(2**63 - 1)])
def test_large_seeds_are_exact(seed: Any) -> None:
    assert resolved({"seed": seed}).seed == int(seed)


def test_ranges_of_a_config() -> None:
    assert "sampling.envs = 0 must be a whole number from 1 to 100000" in complaint({"sampling": {"envs": 0}})
    assert "algorithm.gamma = 1.1 must be a number from 0 to 1" in complaint({"algorithm": {"gamma": 1.1}})
    assert "network.hidden = 0 must be" in complaint({"network": {"hidden": [64, 0]}})
    assert "seed = -1 must be" in complaint({"seed": -1})
    assert "seed" in complaint({"seed": 2**63})
    assert "target" in complaint({"target": "nan"})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3"])
def test_devices(device: str) -> None:
    assert resolved({"learner": {"device": device}}).learner.device == device


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:x", "cuda:-1", ""])
def test_wrong_devices(device: str) -> None:
    assert f"learner.device = {device!r} is not one of: auto, cpu, cuda, cuda:N" in complaint(
        {"learner": {"device": device}}
    )


# -- keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wrong", "meant"),
    [
        ({"algorithm": {"learning_rat": 1}}, "algorithm.learning_rat", "algorithm.learning_rate"),
        ({"learning_rate": 1}, "learning_rate", "algorithm.learning_rate"),
        ({"fragment": 1}, "fragment", "sampling.fragment"),
        ({"clip": 1}, "clip", "algorithm.clip"),
        ({"sampling": {"env_s": 1}}, "sampling.env_s", "sampling.envs"),
        pytest.param(
            {"sampling": {"gamma": 1}},
            "sampling.gamma",
            "algorithm.gamma",
        ),
        ({"Seed": 1}, "Seed", "seed"),
        ({"stpes": 1}, "stpes", "steps"),
    ],
)
def test_unknown_keys_suggest_the_nearest(given: dict[str, Any], wrong: str, meant: str) -> None:
    assert complaint(given) == f"unknown setting {wrong!r} (did you mean {meant!r}?)"


def test_unknown_keys_like_nothing_else() -> None:
    assert complaint({"zzzzzz": 1}) == "unknown setting 'zzzzzz'"


def forgotten_sections() -> Iterator[tuple[str, str]]:
    for algo, kind in (("ppo", PPOConfig), ("dqn", DQNConfig)):
        keys = list(settings.known_keys(Config, {"algorithm": kind}))
        yield from ((algo, key) for key in keys if "." in key and key.rpartition(".")[2] not in keys)


def test_a_forgotten_section_is_found_for_every_setting() -> None:
    wrong = {}
    for algo, key in forgotten_sections():
        name = key.rpartition(".")[2]
        text = complaint({"algo": algo, name: 1})
        if f".{name}'" not in text:
            wrong[key] = text
    assert wrong == {}


def test_a_dotted_key_is_not_told_to_be_itself() -> None:
    try:
        config = resolved({"algorithm.gamma": 0.9})
    except UsageError as error:
        assert "did you mean 'algorithm.gamma'" not in str(error)  # noqa: PT017
    else:
        assert config.algorithm.gamma == 0.9


def test_a_misspelled_section_is_found() -> None:
    assert "did you mean 'algorithm'" in complaint({"algoritm": {"gamma": 0.9}})


@pytest.mark.parametrize("value", [3, None, "auto", [1]])
def test_a_section_needs_keys(value: Any) -> None:
    assert "sampling = " in complaint({"sampling": value})


def test_nearest() -> None:
    assert nearest("inlne", ["inline", "ray"]) == " (did you mean 'inline'?)"
    assert nearest("xyz", ["inline", "ray"]) == ""
    assert nearest("gamma", ["algorithm.gamma", "gammas"]).endswith("?)")


# -- resolving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"env": ""}, {"env": None}])
def test_env_is_required(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"no environment given.*CartPole-v1"):
        resolve(given)


def test_a_required_setting_without_a_default() -> None:
    @dataclass(frozen=True)
    class Needs:
        name: str

    with pytest.raises(UsageError, match="setting name is required"):
        settings.build(Needs, {}, {})


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults, the algorithm's, the preset's, a file's, the user's: each layer takes one step further."""
    tuned = {"network.activation": "elu", "sampling.fragment": 3, "algorithm.gamma": 0.5, "algorithm.n_step": 5}
    monkeypatch.setattr(presets, "PRESETS", {("dqn", "Tuned-v0"): tuned})
    names = ("envs", "fragment")

    def values(*layers: dict[str, Any]) -> tuple[Any, ...]:
        config = resolve({"env": "Tuned-v0", "algo": "dqn"}, *layers)[0]
        return (*(getattr(config.sampling, n) for n in names), config.network.activation, config.algorithm.gamma)

    file = {"network": {"activation": "silu"}, "algorithm": {"gamma": 0.6}}
    given = {"algorithm": {"gamma": 0.7}}
    assert Config(env="Other-v0").sampling.fragment == 128  # the default of all
    assert values({"preset": "none"}) == (8, 16, "relu", 0.99)  # the algorithm's
    assert values() == (8, 3, "elu", 0.5)
    assert values(file) == (8, 3, "silu", 0.6)
    assert values(file, given) == (8, 3, "silu", 0.7)
    left = {"sampling.fragment": 3, "algorithm.n_step": 5}
    assert resolve({"env": "Tuned-v0", "algo": "dqn"}, file)[1] == left  # what of the preset was applied
    assert resolve({"env": "Tuned-v0", "algo": "dqn", "preset": "none"})[1] == {}
    assert resolve({"env": "Tuned-v0", "algo": "ppo"})[1] == {}


def test_a_preset_is_found_by_the_id_that_a_module_registers() -> None:
    found = presets.preset_for("ppo", "minigrid:MiniGrid-Empty-5x5-v0", "sync")
    assert found == presets.preset_for("ppo", "MiniGrid-Empty-5x5-v0", "sync") != {}
    assert presets.preset_for("ppo", "my_envs:make", "sync") == {}


def test_every_preset_resolves() -> None:
    for algo, env, *_ in presets.PRESETS:
        config, applied = resolve({"env": env, "algo": algo})
        assert applied
        for path, value in applied.items():
            found: Any = config
            for name in path.split("."):
                found = found[name] if isinstance(found, dict) else getattr(found, name)
            assert found in (value, tuple(value) if isinstance(value, list) else value), path


def test_the_algorithm_s_section_has_the_algorithm_s_type() -> None:
    assert type(resolved().algorithm) is PPOConfig
    assert type(resolved({"algo": "dqn"}).algorithm) is DQNConfig
    assert "unknown setting 'algorithm.clip'" in complaint({"algo": "dqn", "algorithm": {"clip": 0.1}})


def test_unknown_algorithm() -> None:
    assert complaint({"algo": "dqm"}).startswith(
        "no algorithm 'dqm' (did you mean 'dqn'?); raynforce has ppo, dqn, sac, td3, impala, a3c"
    )
    assert "not a subclass" in complaint({"algo": "raynforce.config:Config"})


@pytest.mark.parametrize("version", [0, 2, "1.0", "one", None])
def test_other_config_versions_are_refused(version: Any) -> None:
    text = complaint({"config_version": version})
    assert f"config_version = {version!r}" in text
    assert "it reads 1" in text


def test_layers_merge_by_key() -> None:
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert settings.merge(base, {"a": {"c": {"f": 4}}, "e": {"g": 5}}) == {
        "a": {"b": 1, "c": {"d": 2, "f": 4}},
        "e": {"g": 5},
    }
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


# -- YAML -----------------------------------------------------------------------------------------------------


def read_back(config: Config, path: Path, explain: bool) -> Config:
    path.write_text(config.to_yaml(explain=explain), encoding="utf-8")
    return resolve(settings.read_yaml(str(path)))[0]


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"algo": "dqn"},
        {
            "env": "my_envs:make",
            "seed": 12345,
            "target": -0.001,
            "network": {"hidden": [], "factory": "my_networks:make"},
            "learner": {"device": "cuda:1"},
            "algorithm": {"learning_rate": 1e-5, "max_grad_norm": None, "target_kl": 3e-12},
        },
        {"network": {"hidden": list(range(1, 60))}},
        {"env": "yes", "env_args": {"gravity": 9.8, "map": ["S.", "#G"], "wind": {"speed": "1e5", "note": "a: b # c"}}},
    ],
)
def test_yaml_round_trip(given: dict[str, Any], explain: bool, tmp_path: Path) -> None:
    config = resolved(given)
    assert read_back(config, tmp_path / "config.yaml", explain) == config
    assert resolve(config.to_dict())[0] == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3),
    max_leaves=6,
)


@examples(deadline=None, max_examples=60, derandomize=True)
@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_any_env_args_survive_yaml(tmp_path_factory: pytest.TempPathFactory, args: dict[str, Any]) -> None:
    config = resolved({"env_args": args})
    path = tmp_path_factory.getbasetemp() / "any_args.yaml"
    assert read_back(config, path, explain=True) == config


def test_explained_yaml_has_every_sentence() -> None:
    text = resolved({"algo": "dqn"}).to_yaml(explain=True)
    comments = " ".join(line.partition("# ")[2] for line in text.splitlines() if line.lstrip().startswith("#"))
    for kind in (Config, DQNConfig):
        for sentence in settings.docs(kind).values():
            assert " ".join(sentence.split()) in comments
    assert max(len(line) for line in text.splitlines() if "#" in line) <= 80
    assert "#" not in resolved().to_yaml()


@pytest.mark.parametrize("kind", [Config, PPOConfig, DQNConfig], ids=lambda k: k.__name__)
def test_every_setting_has_a_sentence(kind: type) -> None:
    def silent(cls: type, prefix: str) -> Iterator[str]:
        sentences = settings.docs(cls)
        for field in dataclasses.fields(cls):
            hint = settings._hints(cls)[field.name]
            if dataclasses.is_dataclass(hint):
                yield from silent(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            elif not sentences.get(field.name, "").endswith("."):
                yield prefix + field.name

    assert list(silent(kind, "")) == []
    assert len(list(settings.known_keys(kind, {}))) >= len(dataclasses.fields(kind))


def test_a_subclass_inherits_sentences() -> None:
    assert settings.docs(PPOConfig)["gamma"] == "Discount of future rewards."
    assert settings.docs(PPOConfig)["epochs"] == "Passes over each batch."


def test_defaults_are_what_their_types_allow() -> None:
    for algo in ("ppo", "dqn"):
        config = resolved({"algo": algo})
        assert settings.build(Config, config.to_dict(), {"algorithm": algorithm_class(algo).Settings}) == config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [1\n", "is not valid YAML, line"),
        (b"a: 1\nb: c: d\n", "is not valid YAML, line 2"),
        (b"\tkey: 1", "is not valid YAML, line 1"),
        (b"\xff\xfe\xfa", "is not valid YAML"),
        (b"a: \x00", "is not valid YAML"),
        (b"- 1\n- 2\n", "must hold settings"),
        (b"just text", "must hold settings"),
        pytest.param(
            b"a: 2001-99-99\n",
            "is not valid YAML",
        ),
    ],
)
def test_bad_files(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        settings.read_yaml(str(path))
    assert f"config {str(path)!r} {says}" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read config '.*none.yaml': No such file or directory$"):
        settings.read_yaml(str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match=r"cannot read config .*: Is a directory$"):
        settings.read_yaml(str(tmp_path))


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert settings.read_yaml(str(tmp_path / "empty.yaml")) == {}


# -- the command line's --set ---------------------------------------------------------------------------------


def test_assignments() -> None:
    items = ["algorithm.gamma=0.9", "algorithm.learning_rate=3e-4", "network.hidden=64,64", "target=", "seed=1_000"]
    items += ["sampling.exact_resume=off", "env_args.size=[1, 2]", "env_args.text=a=b", "learner.device=cuda:0"]
    parsed = settings.parse_assignments(items)
    assert parsed["env_args"] == {"size": [1, 2], "text": "a=b"}
    config = resolved(parsed)
    assert (config.algorithm.gamma, config.algorithm.learning_rate) == (0.9, 3e-4)
    assert (config.network.hidden, config.target, config.seed) == ((64, 64), None, 1000)
    assert config.sampling.exact_resume is False
    assert config.learner.device == "cuda:0"


def test_the_last_assignment_wins() -> None:
    assert settings.parse_assignments(["seed=1", "seed=2"]) == {"seed": 2}


def test_what_is_not_yaml_is_text() -> None:
    assert settings.parse_assignments(["env_args.a=[1", "env_args.b=x: y: z"]) == {
        "env_args": {"a": "[1", "b": "x: y: z"}
    }


@pytest.mark.parametrize("item", ["seed", "=1", "", "algorithm.gamma"])
def test_wrong_assignments(item: str) -> None:
    with pytest.raises(UsageError) as error:
        settings.parse_assignments([item])
    assert str(error.value) == f"--set {item!r} must look like section.setting=value"


def test_settings_are_values_by_name() -> None:
    with pytest.raises(UsageError, match=r"settings = 5 is no mapping: give values by name"):
        settings.nested(5)  # type: ignore[arg-type]


def test_a_value_and_a_section_of_one_name() -> None:
    with pytest.raises(UsageError, match=r"'seed\.a' and 'seed' cannot both be set"):
        settings.parse_assignments(["seed=1", "seed.a=2"])


def test_dates_that_are_none_are_text() -> None:
    assert settings.parse_assignments(["env_args.day=2001-99-99"]) == {"env_args": {"day": "2001-99-99"}}


def test_a_topology_has_defaults_of_its_own_below_the_preset() -> None:
    plain = resolved({"algo": "dqn", "preset": "none"})
    shared = resolved({"algo": "dqn", "preset": "none", "topology": "shared-agent"})
    assert (plain.sampling.fragment, shared.sampling.fragment) == (16, 1)
    assert shared.algorithm.learning_rate < plain.algorithm.learning_rate
    assert resolved({"algo": "dqn", "topology": "shared-agent", "sampling": {"fragment": 3}}).sampling.fragment == 3
    tuned = [resolved({"algo": "dqn", "preset": "auto", "topology": t}) for t in ("sync", "shared-agent")]
    assert [config.to_dict()["algorithm"]["epsilon_fraction"] for config in tuned] == [0.1, 0.04]


def test_central_batches() -> None:
    assert resolved({"central": {"batch_min": 8, "batch_max": 8}}).central.batch_wait == 0.002
    wrong = complaint({"central": {"batch_min": 9, "batch_max": 8}})
    assert "central.batch_min = 9 is more than central.batch_max = 8" in wrong
    for wait in (0, -1):
        assert "central.batch_wait" in complaint({"central": {"batch_wait": wait}})


def test_no_is_a_choice_where_it_is_one(tmp_path: Path) -> None:
    assert resolved(settings.parse_assignments(["sampling.parallel=no"])).sampling.parallel == "no"
    assert resolved({"sampling": {"parallel": "no"}}).sampling.parallel == "no"
    saved = resolved({"sampling": {"parallel": "no"}})
    (tmp_path / "config.yaml").write_text(saved.to_yaml())
    assert resolved(settings.read_yaml(str(tmp_path / "config.yaml"))) == saved
    assert "sampling.parallel = True is not one of" in complaint({"sampling": {"parallel": True}})
    assert "runtime = False is not one of" in complaint({"runtime": False})


@pytest.mark.parametrize(
    ("algo", "env", "topology", "scaled"),
    [
        ("ppo", "CartPole-v1", "auto", True),  # its preset has it off
        ("impala", "CartPole-v1", "async", True),
        ("a3c", "CartPole-v1", "sync", True),
        ("a3c", "CartPole-v1", "shared-agent", False),  # whose workers cannot
        ("dqn", "CartPole-v1", "auto", False),
    ],
)
def test_with_memory_rewards_are_scaled_by_default(algo: str, env: str, topology: str, scaled: bool) -> None:
    plain: dict[str, Any] = {"algo": algo, "env": env, "topology": topology}
    memory = {"network": {"memory": "lstm"}}
    config, applied = resolve(plain, memory)
    assert config.learner.scale_rewards is scaled
    assert "learner.scale_rewards" not in applied or not scaled
    assert resolve(plain, memory, {"learner": {"scale_rewards": not scaled}})[0].learner.scale_rewards is not scaled
    if algo == "ppo":
        assert not resolve(plain)[0].learner.scale_rewards
