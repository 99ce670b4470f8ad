"""`raynforce sim`: begin a simulator in C++, and hold one against the protocol."""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from shlex import quote

from raynforce.errors import UsageError

MAIN = """\
// A cart on a rail that has to be brought to its middle: replace it by your simulator.
#include <cmath>
#include <random>

#include "raynforce.hpp"

struct Cart {
  // What the policy sees, two floats; and what it does, one of three choices.
  static raynforce::Spaces spaces() { return {{raynforce::box({2})}, raynforce::discrete(3)}; }

  // Settings come from `--set env_args.push=0.2`.
  explicit Cart(const raynforce::Json& config) : push(config["push"].number(0.1)) {}

  void reset(std::uint64_t seed, raynforce::Obs obs) {
    std::mt19937_64 random(seed);
    place = std::uniform_real_distribution<double>(-1, 1)(random), speed = 0, steps = 0;
    write(obs);
  }

  raynforce::Step step(raynforce::Action action, raynforce::Obs obs) {
    speed = 0.9 * speed + push * static_cast<double>(action.choice() - 1);
    place += 0.2 * speed;
    write(obs);
    const bool lost = std::abs(place) > 2;
    return {1 - std::abs(place), lost, ++steps >= 100};  // reward, terminated, truncated
  }

  // With these two, episodes come back exactly when a run is resumed.
  std::string save() const { return raynforce::pack(place, speed, steps); }
  void load(const std::string& state, raynforce::Obs obs) {
    raynforce::unpack(state, place, speed, steps);
    write(obs);
  }

  void write(raynforce::Obs obs) const { obs[0] = static_cast<float>(place), obs[1] = static_cast<float>(speed); }

  double push, place = 0, speed = 0;
  int steps = 0;
};

int main(int argc, char** argv) { return raynforce::serve<Cart>(argc, argv); }
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.16)
project({name} CXX)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
find_package(Threads REQUIRED)
add_executable({name} main.cpp)
target_compile_features({name} PRIVATE cxx_std_17)
target_link_libraries({name} Threads::Threads)
"""


def new(folder: str, *, me: str) -> int:
    """Write a small project that builds, passes the check and trains."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{folder} is there already: give a new folder")
    name = "".join(c if c.isalnum() else "_" for c in path.resolve().name) or "simulator"
    path.mkdir(parents=True, exist_ok=True)
    (path / "main.cpp").write_text(MAIN)
    (path / "CMakeLists.txt").write_text(CMAKE.format(name=name))
    (path / "raynforce.hpp").write_text((files("raynforce") / "sdk" / "cpp" / "raynforce.hpp").read_text())
    program = os.path.join(folder, name)
    program = program if program.startswith(("/", "./", "../")) else f"./{program}"
    print(f"{folder} has main.cpp, raynforce.hpp and CMakeLists.txt. Next:")
    program = quote(program)
    print(f"  g++ -std=c++17 -O2 -pthread {quote(str(path / 'main.cpp'))} -o {program}")
    print(f"  {me} sim check {quote(program) if ' ' in program else program}")
    print(f"  {me} train ppo {quote(program) if ' ' in program else program} --envs 64 --steps 100k")
    return 0


def keys(folder: str, *, me: str) -> int:
    """Write a key for trainers and one for simulators: for ZMQ between machines."""
    from raynforce.envs.addresses import make_keys

    trainer, simulator = make_keys(Path(folder))
    print(f"{trainer} is for trainers, {simulator} for simulators on other machines; both are secret. Next:")
    print(f"  {me} train ppo --sims listen:zmq:tcp://0.0.0.0:5555 --sims-key {quote(str(trainer))}")
    print(f"  ./my_sim --connect zmq:tcp://TRAINER:5555 --key {quote(str(simulator))} --envs 64")
    return 0


def check(env: str, *, as_json: bool) -> int:
    """Try every case of the protocol, and measure; 1 if one does not hold."""
    from raynforce.envs.addresses import CONNECT, is_remote
    from raynforce.envs.conformance import CASES, check, speed

    env = f"{CONNECT}{env}" if env.startswith(("unix:", "tcp:", "zmq:")) else env
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for number, (name, title, why) in enumerate(check(env), 1):
        reason = why.removeprefix("skipped: ")
        if why:
            (failed if reason == why else skipped)[name] = reason
        if not as_json:
            mark = "ok" if not why else "failed" if reason == why else "skipped"
            print(f"{mark:<8} {name}: {title}" + (f"\n         {reason}" if why else ""), flush=True)
        elif sys.stderr.isatty():
            print(f"\r{number} of {len(CASES)} cases", end="", file=sys.stderr)
    speeds = [] if failed else [speed(env, envs) for envs in ((1,) if is_remote(env) else (1, 64))]
    if as_json:
        facts = {"ok": not failed, "cases": len(CASES), "failed": failed, "skipped": skipped}
        print(json.dumps({**facts, "speed": [found._asdict() for found in speeds]}))
        return 1 if failed else 0
    for found in speeds:
        median, worst = found.median_seconds * 1e6, found.worst_seconds * 1e6
        trip = f"a round trip takes {median:,.0f} µs, one in a hundred {worst:,.0f}"
        print(f"speed    {found.envs} env{'s' * (found.envs > 1)}: {found.steps_per_second:,.0f} steps/s; {trip}")
    if "hello" in failed:
        print("\nit is no simulator, or does not start: docs/simulators.md shows how to write one")
        return 1
    held = len(CASES) - len(failed) - len(skipped)
    print(f"\n{held} of {len(CASES)} cases hold, {len(skipped)} skipped, {len(failed)} failed")
    return 1 if failed else 0
