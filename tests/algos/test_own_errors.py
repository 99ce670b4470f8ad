"""A mistake in an algorithm is one line that says who, where, what was given and what is wanted, wherever it runs."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import own_algos
import pytest
from marks import slowly

import raynforce
from raynforce.errors import AlgorithmError, UsageError

SETTINGS = {"sampling.envs": 4, "sampling.fragment": 16, "eval.every": 0, "eval.final_episodes": 0}


def fails(algo: str, out: Path, runtime: str = "inline", topology: str = "sync") -> raynforce.RaynforceError:
    with pytest.raises(raynforce.RaynforceError) as caught:
        raynforce.train(
            "raynforce.envs.tiny:Identity",
            f"own_algos:{algo}",
            steps=256,
            runtime=runtime,
            topology=topology,
            out=out / "run",
            settings=SETTINGS,
            progress="quiet",
        )
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return caught.value


def line_of(kind: type, text: str) -> int:
    lines, first = inspect.getsourcelines(kind)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("runtime", "topology"),
    [("inline", "sync"), ("inline", "shared-agent"), ("process", "sync"), *slowly(("ray", "sync"))],
)
def test_what_it_raises_has_file_and_line(runtime: str, topology: str, tmp_path: Path) -> None:
    error = fails("Raises", tmp_path, runtime, topology)
    assert isinstance(error, AlgorithmError)
    line = line_of(own_algos.Raises, "the line that is named")
    assert "algorithm own_algos:Raises raised KeyError: 'advantages' in helper (" in str(error)
    assert f"own_algos.py:{line})" in str(error)
    assert ("learner: " in str(error)) == (runtime != "inline")
    whole = "".join(traceback.format_exception(error))  # what --debug shows
    assert 'return minibatch["advantages"]' in whole


def test_the_line_is_the_user_s_though_torch_raised(tmp_path: Path) -> None:
    line = line_of(own_algos.RaisesInTorch, "torch.cat")
    assert f"in loss ({Path(own_algos.__file__)}:{line})" in str(fails("RaisesInTorch", tmp_path)).replace(
        "(tests", f"({Path.cwd()}/tests"
    )


def test_what_the_framework_refuses_has_the_user_s_line_too(tmp_path: Path) -> None:
    error = fails("ShortTarget", tmp_path)
    assert "params has the shape [3]; wanted is a vector like net.flat" in str(error)
    assert f"own_algos.py:{line_of(own_algos.ShortTarget, 'params=')}" in str(error)


def test_errors_before_training_have_a_line_too(tmp_path: Path) -> None:
    error = fails("RaisesAtFirst", tmp_path)
    assert "raised IndexError: tuple index out of range in __init__ (" in str(error)


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ("NoLoss", ["does not define loss: loss(net, minibatch) returns a raynforce.Loss"]),
        ("NoPrepare", ["does not define prepare: prepare(net, fragments)"]),
        ("KeepsText", ["keeps of KeepsText is 'model'", "mind the comma"]),
        ("KeepsNothing", ["KeepsNothing keeps 'critic', and neither __init__ nor begin has made self.critic"]),
        ("KeepsObject", ["KeepsObject.thing has a object, which cannot be saved: give it state() and load(tree)"]),
    ],
)
def test_what_is_missing_is_refused_before_training(algo: str, words: list[str], tmp_path: Path) -> None:
    error = fails(algo, tmp_path)
    assert isinstance(error, UsageError)
    assert all(word in str(error) for word in words), error


@pytest.mark.parametrize(
    ("algo", "text"),
    [
        ("TensorAsLoss", "TensorAsLoss.loss returned a Tensor of shape (); wanted is raynforce.Loss(total, metrics)"),
        ("VectorAsLoss", "VectorAsLoss.loss returned a Tensor of shape (32, 1); wanted is a scalar as Loss.total"),
        ("ConstantAsLoss", "wanted is a Loss.total that depends on the network"),
        ("Detached", "the loss does not depend on the network's parameters: make Loss.total of what net("),
        ("UnknownInput", "'action' is no input of this network: beside the observation it takes none (loss ("),
        ("WrongGroups", "WrongGroups.groups returned {'critic': ('value',)} (dict); wanted is a dict of Group by name"),
        ("UnknownGroup", "group 'critic' has 'q', which is no parameter: the network has policy, value"),
        ("DoubleGroup", "parameter 'value.0.weight' is in two groups, 'critic' and 'outputs': leave it to one"),
        ("FloatAsMetric", "FloatAsMetric.loss returned 3.0; wanted is a tensor as the metric 'speed'"),
        ("NaNAsLoss", "NaNAsLoss.loss returned a total of nan within 2 updates"),
        ("NothingPrepared", "NothingPrepared.prepare returned nothing (None); wanted is arrays by name"),
        ("EmptyPrepared", "EmptyPrepared.prepare returned no arrays"),
        ("ListAsMinibatch", "ListAsMinibatch.minibatches yielded a list; wanted is a dict of tensors or arrays"),
        ("NumberInMinibatch", "minibatches yielded 3; wanted is an array or a tensor as 'epoch'"),
        ("ListAsHeads", "ListAsHeads.heads returned ['policy', 'value'] (list); wanted is a dict"),
        ("NoRate", "NoRate.schedules returned {'temperature': 1.0} (dict); wanted is numbers by name, 'learning_rate'"),
        ("TensorAsState", "TensorAsState.state returned a Tensor of shape (3,); wanted is tensor.cpu().numpy()"),
    ],
)
def test_what_is_wrong_is_told_by_class_and_method(algo: str, text: str, tmp_path: Path) -> None:
    assert text in str(fails(algo, tmp_path))


@pytest.mark.parametrize("algo", ["TensorAsLoss", "NothingPrepared", "ListAsMinibatch"])
def test_a_worker_of_a_shared_agent_says_the_same(algo: str, tmp_path: Path) -> None:
    assert f"{algo}." in str(fails(algo, tmp_path, topology="shared-agent"))


def test_it_is_not_tried_again(tmp_path: Path) -> None:
    """A mistake in code is no accident: no role is restarted for it."""
    fails("Raises", tmp_path, topology="shared-agent")
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "restarted" not in events
