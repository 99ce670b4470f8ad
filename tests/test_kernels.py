"""Kernels are the same on every x86-64 processor with AVX2, wherever roles live; where not, a run says so."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from running import events

import raynforce
from raynforce import kernels
from raynforce.cli.parser import kernels_asked_for, parse
from raynforce.config import Config
from raynforce.driver import machines
from raynforce.kernels import KernelKind
from raynforce.runs import checkpoint
from raynforce.runtimes import open as opening
from raynforce.runtimes.base import Place, Runtime
from raynforce.runtimes.process import ProcessRuntime

ROOT = Path(raynforce.__file__).parents[1]
HELD = "avx2" if kernels.pins() else "native"
here_has_avx2 = pytest.mark.skipif(not kernels.pins(), reason="this processor has no AVX2: nothing is pinned")
EMULATED = ["Haswell", "EPYC-Rome", "max"]  # of Intel, of AMD, and all that the emulator can do


def fresh(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an environment in which nothing is pinned."""
    environ = {name: value for name, value in os.environ.items() if name not in kernels.pins()}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environ, timeout=250)


def trained(out: Path, *more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = ["train", "ppo", "CartPole-v1", "--steps", "256", "--out", str(out), "--set", "eval.final_episodes=0"]
    done = fresh("-m", "raynforce", *words, "--runtime", "inline", "--topology", "sync", *more, **environ)
    assert done.returncode == 0, done.stderr
    return done


def written(run: Path) -> tuple[str, str]:
    """What a run says of its kernels: in the manifest of its checkpoint, and where it began."""
    (started,) = events(run, "started")
    return checkpoint.manifest(run / "last")["kernels"], started["kernels"]


# -- what is pinned -------------------------------------------------------------------------------------------


def test_this_process_was_pinned_before_numpy_was_loaded() -> None:
    """Else runs inline would not equal those of other processes, which many tests compare."""
    assert kernels.kind() == KernelKind(kernels.cpu_model(), HELD)


def test_the_command_line_pins_and_writes_it_down(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", MKL_VERBOSE="1")
    assert written(tmp_path / "run") == (HELD, HELD)
    # MKL takes its kernels by who made the processor, whatever is set: nothing is learned with it.
    assert "MKL_VERBOSE S" not in done.stdout + done.stderr
    again = fresh("-m", "raynforce", "show", str(tmp_path / "run"))
    assert f"with {HELD} kernels" in " ".join(again.stdout.split())


@pytest.mark.slow
def test_native_pins_nothing_and_resume_says_what_changed(tmp_path: Path) -> None:
    trained(tmp_path / "run", "--set", "kernels=native")
    assert written(tmp_path / "run") == ("native", "native")
    done = fresh("-m", "raynforce", "resume", str(tmp_path / "run"), "--steps", "512", "--set", "kernels=portable")
    assert "kernels native → portable; from here on the run differs" in " ".join(done.stdout.split())
    assert ("kernels native → avx2; equal results" in " ".join(done.stdout.split())) == (HELD == "avx2")


def test_train_imported_before_numpy_pins(tmp_path: Path) -> None:
    script = "from raynforce import kernels, train; import numpy; print(kernels.kind().kernels)"
    assert fresh("-c", script).stdout.split() == [HELD]


def test_only_train_and_the_like_touch_the_environment() -> None:
    script = "import os; before = dict(os.environ); import raynforce; raynforce.load; print(before == dict(os.environ))"
    assert fresh("-c", script).stdout.split() == ["True"]


def test_numpy_that_was_loaded_before_is_looked_at(tmp_path: Path) -> None:
    """What it does counts: on a processor whose best is AVX2, it is too late for nothing."""
    script = "import numpy; from raynforce import kernels; kernels.pin(); print(kernels.kind().kernels)"
    wide = "avx512f" in kernels.cpu("flags")
    assert fresh("-c", script).stdout.split() == ["native" if wide else HELD]
    assert fresh("-c", script, **kernels.pins()).stdout.split() == [HELD]


@here_has_avx2
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernels.pins():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    monkeypatch.setattr(kernels, "_set", {})
    kernels.pin()
    assert {name: os.environ[name] for name in kernels.pins()} == {
        **kernels.pins(), "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Zen",
    }  # fmt: skip
    assert kernels.kind().kernels == "native"
    kernels.pin("native")
    assert {name for name in kernels.pins() if name in os.environ} == {"MKL_CBWR", "OPENBLAS_CORETYPE"}


@pytest.mark.parametrize(
    ("machine", "flags"), [("aarch64", "avx2 fma"), ("x86_64", "sse4_2 avx fma"), ("x86_64", "avx2"), ("x86_64", "")]
)
def test_nothing_is_pinned_without_avx2(monkeypatch: pytest.MonkeyPatch, machine: str, flags: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(kernels, "cpu", lambda field: flags)
    assert kernels.pins.__wrapped__() == {}


@pytest.mark.parametrize(
    ("words", "kernels"),
    [
        (["train", "ppo", "CartPole-v1"], "portable"),
        (["train", "ppo", "CartPole-v1", "--set", "kernels=native"], "native"),
        (["train", "ppo", "CartPole-v1", "--set", "kernels=native", "--set", "kernels=portable"], "portable"),
        (["train", "--config", "native/config.yaml"], "native"),
        (["train", "--config", "native/config.yaml", "--set", "kernels=portable"], "portable"),
        (["train", "--config", "missing.yaml"], "portable"),
        (["resume", "native"], "native"),
        (["eval", "native"], "native"),
        (["resume", "portable"], "portable"),
        (["doctor"], "portable"),
        (["runs"], "portable"),
    ],
    ids=" ".join,
)
def test_the_setting_is_known_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], kernels: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for setting in ("native", "portable"):
        (tmp_path / setting).mkdir()
        config = Config(env="CartPole-v1", kernels=setting).to_yaml()  # type: ignore[arg-type]
        (tmp_path / setting / "config.yaml").write_text(config)
    assert kernels_asked_for(parse(words)) == kernels


# -- wherever roles live --------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["portable", "native"])
def test_a_role_in_a_process_of_its_own_is_pinned_though_the_driver_is_not(
    monkeypatch: pytest.MonkeyPatch, setting: kernels.Kernels
) -> None:
    for name in kernels.pins():
        monkeypatch.delenv(name, raising=False)
    with ProcessRuntime({}, print) as runtime:
        role = runtime.spawn("raynforce.kernels:KernelKind", "", "", name="role", place=Place(kernels=setting))
        role.call("index", "").result()  # it is there
        assert runtime.kinds() == {KernelKind(kernels.cpu_model(), HELD if setting == "portable" else "native")}


@pytest.mark.slow
def test_a_role_on_ray_is_pinned(make_ray: Callable[[], Runtime]) -> None:
    with make_ray() as runtime:
        role = runtime.spawn("raynforce.kernels:KernelKind", "", "", name="role")
        role.call("index", "").result()
        assert runtime.kinds() == {KernelKind(kernels.cpu_model(), HELD)}


@here_has_avx2
def test_a_run_that_cannot_be_pinned_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "kind", lambda: KernelKind("Abacus", "native"))
    said: list[str] = []
    for runtime in ("inline", "process"):
        opening.open_runtime(Config(env="CartPole-v1", runtime=runtime), said.append).close()  # type: ignore[arg-type]
    (line,) = said
    assert "loaded before it could be held to AVX2" in line
    assert "`from raynforce import train` first" in line


# -- what is told ---------------------------------------------------------------------------------------------

A, B = "Abacus 3000", "Babbage 1"


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({"cpu": A, "kernels": "avx2"}, {"cpu": A, "kernels": "avx2"}, ""),
        ({"cpu": A, "kernels": "avx2"}, {"cpu": B, "kernels": "avx2"}, ""),
        ({"cpu": A, "kernels": "native"}, {"cpu": B, "kernels": "native"}, f"cpu {A} → {B}"),
        ({"cpu": A, "kernels": "avx2"}, {"cpu": B, "kernels": "native"}, f"kernels avx2 → native, cpu {A} → {B}"),
        ({"cpu": A}, {"cpu": A, "kernels": "avx2"}, "kernels native → avx2"),  # before there was a choice
        ({"cpu": A}, {"cpu": A, "kernels": "native"}, ""),
        ({"numpy": "1", "libc": "glibc 2"}, {"numpy": "2", "libc": "glibc 3"}, "numpy 1 → 2, libc glibc 2 → glibc 3"),
    ],
)
def test_another_machine_is_told_where_it_matters(
    before: Mapping[str, str], now: Mapping[str, str], changed: str
) -> None:
    told = list(machines.machine_note(before, now))
    promise = "equal results are promised on one of each"
    assert told == ([f"another machine or release: {changed}; {promise}"] if changed else [])


def test_several_kinds_of_processor_are_told_once_unless_they_round_alike(tmp_path: Path) -> None:
    found: set[KernelKind] = set()

    class Cluster:
        def kinds(self) -> set[KernelKind]:
            return set(found)

    run, said = raynforce.runs.directory.RunDirectory(tmp_path), list[str]()
    looking = machines.Machines(run, Cluster(), said.append, portable=True)  # type: ignore[arg-type]
    looking.look()
    assert run.made_on == {}
    found |= {KernelKind(A, "avx2"), KernelKind(B, "avx2")}
    looking.look()
    assert (said, run.made_on) == ([], {"cpu": f"{A}, {B}", "kernels": "avx2"})
    found.add(KernelKind("Colossus", "native"))
    looking.look()
    looking.look()
    (line,) = said
    assert f"3 kinds of CPU ({A}, {B}, Colossus), and not all are held to AVX2" in line
    assert run.made_on["kernels"] == "native"


# -- other processors -----------------------------------------------------------------------------------------


@here_has_avx2
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 (Debian: qemu-user) for other CPUs")
@pytest.mark.timeout(3600)
def test_every_processor_with_avx2_ends_in_the_same_weights(tmp_path: Path) -> None:
    """As libraries see it: they ask the emulated processor who made it and what it can do."""
    program = [sys.executable, str(ROOT / "tests" / "emulated_runs.py")]
    ways = {"this": [], **{name: ["qemu-x86_64", "-cpu", name] for name in EMULATED}}
    found = {}
    for name, way in ways.items():
        done = subprocess.run([*way, *program, str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(ways, found["this"])
    assert found["this"]["kernels"] == "avx2"
