"""A topology is one file: nothing else in the package has to know it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from marks import slowly

import raynforce
from raynforce.errors import UsageError
from raynforce.topologies import BUILT_IN, topology

SETTINGS = {"sampling.samplers": 2, "sampling.envs": 2, "sampling.fragment": 32, "preset": "none"}
SETTINGS |= {"topology": "toy_topology:ROUND_ROBIN", "eval.every": 0, "eval.final_episodes": 0, "checkpoint.every": 128}


@pytest.mark.parametrize("runtime", ["inline", *slowly("process")])
def test_a_topology_of_ones_own_trains_and_resumes_to_the_same_weights(tmp_path: Path, runtime: str) -> None:
    def train(out: str, steps: int) -> raynforce.Run:
        return raynforce.train(
            "CartPole-v1", steps=steps, runtime=runtime, settings=SETTINGS, out=tmp_path / out, progress="quiet"
        )

    whole = train("whole", 512)
    train("parts", 256)
    parts = raynforce.resume(tmp_path / "parts", steps=512, progress="quiet")
    assert whole.result.topology == "toy_topology:ROUND_ROBIN"
    assert parts.result.weights_sha256 == whole.result.weights_sha256


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"sampling.samplers": 1}, "topology 'round robin' needs --samplers 2 or more"),
        ({"topology": "asink"}, "topology = 'asink' is not one of: auto, sync, overlap"),
        ({"topology": "toy_topology:NOT_ONE"}, "not a raynforce.topologies.declaration.Topology"),
        ({"replay.shards": 2}, "replay.shards = 2 divides the buffer of topology replay"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_no_run(tmp_path: Path, settings: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as error:
        raynforce.train(
            "CartPole-v1", runtime="inline", settings=SETTINGS | settings, out=tmp_path / "run", progress="quiet"
        )
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_every_built_in_topology_is_declared_under_its_name() -> None:
    assert [topology(name).name for name in BUILT_IN] == list(BUILT_IN)


def test_no_other_file_asks_for_the_name_of_a_topology() -> None:
    package = Path(raynforce.__file__).parent
    names = "|".join(BUILT_IN)
    asks = re.compile(rf"""topology.*(==|!=|\bin\b).*["']({names})["']""")
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asks.search(line)
    ]
    assert found == []
