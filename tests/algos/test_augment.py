"""Random shifts of images: what moves, what stays, and that runs with them repeat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import raynforce
from raynforce.algos.augment import images_of, shifted
from raynforce.errors import UsageError
from raynforce.spaces import ObsLeaf


@pytest.mark.parametrize(
    ("shape", "stack"), [((12, 10), 1), ((12, 10, 3), 1), ((3, 12, 10), 1), ((4, 12, 10), 4), ((2, 12, 10, 3), 2)]
)
def test_each_image_is_moved_as_a_whole_and_edges_repeat(shape: tuple[int, ...], stack: int) -> None:
    torch.manual_seed(0)
    leaf = ObsLeaf("obs/image", "box", shape, "uint8", stack=stack)
    image = images_of([leaf])["obs/image"]
    x = torch.randint(0, 256, (40, *shape), dtype=torch.uint8)
    vector = torch.ones(40, 2)
    found = shifted({"obs/image": x, "obs/vector": vector}, {"obs/image": image})
    assert found["obs/vector"] is vector
    assert found["obs/image"].shape == x.shape
    before, after = (image.channels_first(each).numpy() for each in (x, found["obs/image"]))
    seen = set()
    for n in range(40):
        fits = []
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                rows, columns = np.clip(np.arange(12) + down, 0, 11), np.clip(np.arange(10) + right, 0, 9)
                if (before[n][:, rows][:, :, columns] == after[n]).all():
                    fits.append((down, right))
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) > 5  # of nine


def test_an_observation_without_images_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"algorithm.augment = 'shift' needs an image .* obs is float32 .4.: leave it out"
    ):
        raynforce.train("CartPole-v1", settings={"algorithm.augment": "shift"}, out=tmp_path / "run")


@pytest.mark.parametrize(("algo", "memory"), [("dqn", "none"), ("ppo", "none"), ("dqn", "lstm")])
def test_runs_repeat_and_resume_exactly(tmp_path: Path, algo: str, memory: str) -> None:
    settings = {
        "network.memory": memory,
        "algorithm.augment": "shift",
        "eval.every": 0,
        "eval.final_episodes": 0,
        "eval.episodes": 1,
    }
    settings |= {"sampling.envs": 2, "sampling.fragment": 16, "env_args.wrappers": [{"FrameStack": {"frames": 2}}]}
    settings |= (
        {"algorithm.learning_starts": 32, "algorithm.batch_size": 16} if algo == "dqn" else {"algorithm.epochs": 2}
    )

    def weights(name: str, steps: int = 128) -> np.ndarray:
        how = {"out": tmp_path / name, "settings": settings, "runtime": "inline", "progress": "quiet"}
        run = raynforce.train("raynforce.envs.tiny:Catch", algo, steps=steps, **how)
        return raynforce.load(run.path, "last").version.params

    whole = weights("whole")
    weights("part", 64)
    run = raynforce.resume(tmp_path / "part", steps=128, progress="quiet")
    assert (raynforce.load(run.path, "last").version.params == whole).all()
    settings["algorithm.augment"] = "no"
    assert (weights("plain") != whole).any()
