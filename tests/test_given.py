"""Things that are given themselves, not by `module:name`: what they are called, what that stands for, where it goes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raynforce
from raynforce import auto, given
from raynforce.config import Config
from raynforce.envs.make import make
from raynforce.envs.tiny import Identity
from raynforce.errors import UsageError
from raynforce.given import lending
from raynforce.imports import bare, load_object
from raynforce.runtimes.ray.shipping import code_roots
from raynforce.spaces import EnvSpec

HERE = str(Path(__file__).resolve())
SETTINGS = {"sampling.envs": 2, "sampling.fragment": 16, "eval.episodes": 2, "eval.final_episodes": 2}
SMALL: dict[str, Any] = {"runtime": "inline", "steps": 64, "settings": SETTINGS, "progress": "quiet"}


def longer(length: int) -> type[Identity]:
    class Local(Identity):
        def __init__(self) -> None:
            super().__init__(length=length)

    return Local


def locked() -> Callable[[], Identity]:
    """A factory that cannot leave this process."""
    lock = threading.Lock()

    def make() -> Identity:
        with lock:
            return Identity()

    return make


class Maker:
    def __call__(self) -> Identity:
        return Identity()


# -- names ------------------------------------------------------------------------------------------------


def test_a_name_says_what_it_was_and_where() -> None:
    module = __name__
    line = (unnamed := lambda: Identity()).__code__.co_firstlineno
    with lending() as lender:
        name_of = lender.name_of
        assert name_of(longer(3)) == f"{module}:longer.<locals>.Local@{HERE}"
        assert name_of(functools.partial(longer(3))) == f"{module}:partial(longer.<locals>.Local)@{HERE}"
        assert name_of(unnamed).endswith(f"<lambda>@{HERE}:{line}")
        assert name_of(Maker()) == f"{module}:Maker()@{HERE}"
        assert name_of(Identity) == "raynforce.envs.tiny:Identity", "what others can import keeps its name"
        assert name_of("CartPole-v1") == "CartPole-v1"
        assert bare(name_of(longer(4))) == f"{module}:longer.<locals>.Local"


def test_a_name_stands_for_one_thing_while_a_run_lasts() -> None:
    three, four, five = longer(3), longer(4), longer(5)
    with lending() as first, lending() as second:
        names = first.name_of(three), second.name_of(four), second.name_of(three)
        assert names == (names[0], f"{names[0]}#2", names[0])
        assert (load_object(names[0]), load_object(names[1])) == (three, four)
        with pytest.raises(UsageError, match="stands for another object in a run that goes on"):
            second.know(names[0], five)
    assert load_object(names[0]) is three, "known after the run too"
    with lending() as third:
        assert third.name_of(five) == names[0]
        assert load_object(names[0]) is five
    with lending() as fourth:
        fourth.know(names[0], four)
        assert load_object(names[0]) is four


def test_a_name_that_nobody_knows_is_one_line_with_the_fix() -> None:
    with pytest.raises(UsageError) as caught:
        make("__main__:Maze@/home/me/train.py")
    assert str(caught.value) == (
        "'__main__:Maze' was defined in /home/me/train.py, not in a module: in Python, raynforce.resume(run, env=Maze) "
        "or raynforce.evaluate(run, env=Maze) goes on with it; once it is in a module, so does raynforce resume RUN "
        "--set env=MODULE:NAME"
    )
    with pytest.raises(UsageError, match=r"raynforce.resume\(run, algo=\.\.\.\) goes on with it"):
        load_object("__main__:<lambda>@/home/me/train.py:3", "algo")
    with pytest.raises(UsageError, match=r"settings=\{'network.factory': build\}\) goes on with it"):
        load_object("__main__:build@/home/me/train.py", "network.factory")


# -- other processes --------------------------------------------------------------------------------------


def test_each_run_sends_a_thing_as_it_is_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook changes a variable that its environment uses, and trains again."""
    lengths = [3]

    def make_env() -> Identity:
        return Identity(length=lengths[0])

    found = []
    for length in (3, 4):
        lengths[0] = length
        with lending() as lender:
            name = lender.name_of(make_env)
            packed = given.pack([name, None, "CartPole-v1"])
            monkeypatch.setattr(given, "_entries", {})
            given.unpack(packed)
            lengths[0] = 0  # what happens here later is not seen there
            found.append(make(name).unwrapped.length)  # type: ignore[attr-defined]
    assert found == [3, 4]
    assert given.pack(["CartPole-v1", "raynforce.envs.tiny:Identity"]) == b""


def test_what_cannot_be_sent_trains_inline_and_is_refused_elsewhere(tmp_path: Path) -> None:
    env = locked()
    run = raynforce.train(env, out=tmp_path / "run", **SMALL)
    assert run.result.stopped == "steps done"
    for how in ({"runtime": "process"}, {"settings": SETTINGS | {"sampling.parallel": "processes"}}):
        with pytest.raises(UsageError, match=r"make' cannot be sent to another process \(TypeError: .*lock.*\): move"):
            raynforce.train(env, out=tmp_path / "other", **SMALL | how)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("what", ["env", "algo"])
def test_auto_never_chooses_a_runtime_that_cannot_have_it(what: str) -> None:
    cost = auto.Cost(10 * auto.COSTLY)
    with lending() as lender:
        name = lender.name_of(locked())
        config = Config(env=name if what == "env" else "CartPole-v1")
        config = config if what == "env" else Config(env="CartPole-v1", network=network(name))
        facts = auto.facts_of(config, cost)
        assert "cannot be sent to another process" in facts.obstacle
        settled, line = auto.decide(config, facts)
        assert settled.runtime == "inline"
        assert facts.obstacle in line or auto.cores() == 1


def network(factory: str) -> Any:
    from raynforce.config import NetworkConfig

    return NetworkConfig(factory=factory)


def test_threads_and_processes_for_environments(tmp_path: Path) -> None:
    """In processes of environments below the driver's own, in training and evaluation."""
    settings = SETTINGS | {"sampling.parallel": "processes"}
    local = longer(3)
    run = raynforce.train(local, out=tmp_path / "run", **SMALL | {"settings": settings})
    plain = raynforce.train(local, out=tmp_path / "plain", **SMALL)
    assert run.result.weights_sha256 == plain.result.weights_sha256
    for parallel in ("threads", "processes"):
        returns, _ = raynforce.evaluate(run.path, episodes=3, parallel=parallel, seed=1)  # type: ignore[arg-type]
        assert returns.tolist() == raynforce.evaluate(run.path, episodes=3, seed=1)[0].tolist()


def test_resume_takes_it_again_and_evaluate_another_with_equal_spaces(tmp_path: Path) -> None:
    run = raynforce.train(longer(3), out=tmp_path / "run", **SMALL)
    given._entries.clear()  # another process
    with pytest.raises(UsageError, match="was defined in"):
        raynforce.resume(run.path, steps=128, progress="quiet")
    assert raynforce.resume(run.path, steps=128, env=longer(3), progress="quiet").config.env == run.config.env
    returns, _ = raynforce.evaluate(run.path, env=lambda: Identity(length=7), episodes=2)
    assert returns.max() > 3
    with pytest.raises(UsageError, match="has other spaces than"):
        raynforce.evaluate(run.path, env=lambda: Identity(n=5))
    moved = raynforce.resume(run.path, steps=192, settings={"env": "raynforce.envs.tiny:Identity"}, progress="quiet")
    assert moved.result.steps == 192
    plain = raynforce.train(Identity, out=tmp_path / "plain", **SMALL)
    assert raynforce.resume(plain.path, steps=128, env=Identity, progress="quiet").result.steps == 128
    with pytest.raises(UsageError, match=r"env of .* is 'raynforce\.envs\.tiny:Identity' and cannot become"):
        raynforce.resume(plain.path, steps=192, env=longer(3), progress="quiet")


def test_two_runs_at_once_in_one_process_have_their_own(tmp_path: Path) -> None:
    """They wait for each other in the middle: both are at work when either ends."""
    both = threading.Barrier(2, timeout=60)
    found: dict[int, float | None] = {}

    def train(length: int) -> None:
        first = [True]

        def meet(status: raynforce.Status) -> None:
            if first:
                first.clear()
                both.wait()

        run = raynforce.train(
            lambda: Counting(length), out=tmp_path / str(length), callbacks=[meet], **SMALL | {"steps": 200}
        )
        found[length] = run.result.eval_return

    threads = [threading.Thread(target=train, args=(length,)) for length in (3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {3: 3.0, 6: 6.0}


class Counting(Identity):
    """A point for each step, whatever is done."""

    def __init__(self, length: int) -> None:
        super().__init__(length=length)

    def score(self, action: Any) -> float:
        return 1.0


def test_a_run_directory_is_called_after_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert raynforce.train(longer(3), **SMALL).path.name.startswith("ppo-Local-seed0-")
    assert raynforce.train(lambda: Identity(), **SMALL).path.name.startswith("ppo-lambda-seed0-")


def test_on_ray(tmp_path: Path, shared_ray: None) -> None:
    local = longer(3)
    run = raynforce.train(local, out=tmp_path / "ray", **SMALL | {"runtime": "ray"})
    plain = raynforce.train(local, out=tmp_path / "inline", **SMALL)
    assert run.result.weights_sha256 == plain.result.weights_sha256


def test_the_neighbours_of_a_script_go_to_the_cluster_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only if it has imported any: a home directory is not sent for nothing."""
    import sys
    import types

    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    config = Config(env=f"__main__:Maze@{tmp_path}/train.py")
    assert code_roots(config) == []
    neighbour = types.ModuleType("my_neighbour")
    neighbour.__file__ = str(tmp_path / "my_neighbour.py")
    monkeypatch.setitem(sys.modules, "my_neighbour", neighbour)
    assert code_roots(config) == [tmp_path]


def test_a_spec_of_a_given_environment_is_plain_data(tmp_path: Path) -> None:
    run = raynforce.train(longer(3), out=tmp_path / "run", **SMALL)
    spec: EnvSpec = run.policy().spec.env
    assert spec.env == run.config.env == f"{__name__}:longer.<locals>.Local@{HERE}"
