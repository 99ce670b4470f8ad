"""What can be typed: sub-commands, arguments, and their help. Standard library only, so that `--help` is instant."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from raynforce.errors import UsageError, nearest

TRAIN_EXAMPLES = """\
examples:
  raynforce train ppo CartPole-v1 --target 475
  raynforce train dqn CartPole-v1 --seed 1 --out runs/mine
  raynforce train ppo CartPole-v1 --target 475 --seeds 5
  raynforce train ppo my_sims:make_arm --steps 1e6 --set algorithm.gamma=0.995
  raynforce train ppo my_sims:make_arm --from runs/mine --out runs/finer
  raynforce train my_algorithms:Reinforce CartPole-v1
  raynforce train impala CartPole-v1 --runtime process --topology async
  raynforce train ppo CartPole-v1 --runtime ray --address auto --samplers 16
  raynforce train ppo Pendulum-v1 --print-config > pendulum.yaml
"""

DOCTOR_EXAMPLES = """\
examples:
  raynforce doctor                        this machine
  raynforce doctor my_sims:make_arm       an environment, before training on it
  raynforce doctor my_algos:Mine [ENV]    an algorithm, on a tiny ENV or yours
  raynforce doctor runs/mine              a run: what went wrong, what to do
  raynforce doctor runs/mine --replay 2   see recorded fault 2 again
"""


SIM_EXAMPLES = """\
examples:
  raynforce sim new my_sim                 a small project: it builds, passes the check and trains
  raynforce sim check ./my_sim/my_sim      about 50 cases of the protocol, and its speed
  raynforce sim check "sim:python3 my_sim.py"
  raynforce sim keys keys                  a key for trainers, one for simulators: for ZMQ between machines
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help whose lines end between words: `shared-agent` and `--print-config` stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:  # examples, whose lines are commands
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in self._split_lines(text, width))


class _Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, with the nearest thing that would have been right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")  # -1e3 is a number too

    def error(self, message: str) -> NoReturn:
        head, _, words = message.partition(": ")
        if head == "unrecognized arguments":
            wrong = words.split()[0]
            message = f"unknown option {wrong!r}{nearest(wrong.partition('=')[0], self.options)}"
            if not wrong.startswith("-"):
                message = f"one argument too many: unexpected argument {wrong!r}"
        elif "invalid choice" in message and isinstance(self._subparsers, argparse._ArgumentGroup):
            wrong = words.split("'")[1] if "'" in words else words
            commands = [c for a in self._actions if isinstance(a, argparse._SubParsersAction) for c in a.choices]
            message = f"unknown command {wrong!r}{nearest(wrong, commands)}: known are {', '.join(commands)}"
        raise UsageError(f"{message}; see {self.prog} --help")

    @property
    def options(self) -> list[str]:
        return [o for a in self._actions for o in a.option_strings]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; wrong use raises `UsageError`."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # complain as the sub-command, which knows its own options
        command = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        blamed = command.choices.get(arguments.command, parser)
        if arguments.command in ("train", "resume"):
            _blame_setting(blamed, unknown, argv)
        blamed.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _blame_setting(parser: _Parser, unknown: Sequence[str], argv: Sequence[str]) -> None:
    """An option that is a setting, ours or another library's: say how it is given here."""
    option, equals, value = unknown[0].partition("=")
    if not option.startswith("--"):
        return
    from shlex import quote

    from raynforce.algos import BUILT_IN  # which imports numpy: only once there is a mistake
    from raynforce.hints import called_here

    found = called_here(option, next((word for word in argv if word in BUILT_IN), None))
    if not found:
        return
    if isinstance(found, str):
        raise UsageError(f"unknown option {option!r}: {found}; see {parser.prog} --help")
    if not equals:
        after = list(argv).index(option) + 1
        value = argv[after] if after < len(argv) and not argv[after].startswith("--") else "VALUE"
    if found.path in ("algo", "env"):
        raise UsageError(f"unknown option {option!r}: it needs none here: raynforce train ALGO ENV")
    flag = next((f"--{o.replace('_', '-')}" for o, setting in SETTINGS.items() if setting == found.path), "")
    here = f"{flag} {quote(value)}" if flag in parser.options else f"--set {quote(f'{found.path}={value}')}"
    note = f" ({found.note})" if found.note else ""
    raise UsageError(f"unknown option {option!r}: here it is {here}{note}; see {parser.prog} --help")


def kernels_asked_for(arguments: argparse.Namespace) -> Literal["portable", "native"]:
    """What `--set`, the config or the run say of `kernels`, before anything is imported to read them properly."""
    said = [text.partition("=")[2] for text in getattr(arguments, "set", ()) if text.partition("=")[0] == "kernels"]
    file = getattr(arguments, "config", None) or os.path.join(getattr(arguments, "run", None) or "", "config.yaml")
    if not said and os.path.isfile(file):
        with open(file, errors="replace") as lines:
            said = [line.partition(":")[2] for line in lines if line.startswith("kernels:")]
    return "native" if said and said[-1].strip().strip("'\"") == "native" else "portable"


def _parser() -> _Parser:
    parser = _Parser(
        prog="raynforce",
        description="Train, resume, evaluate and check reinforcement-learning agents.",
        epilog="Start here: raynforce train ppo CartPole-v1 --target 475",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    _flag(parser, "--version", "print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)

    train = _command(commands, "train", "train an agent", epilog=TRAIN_EXAMPLES)
    _add(train, "algo", "ALGO", "ppo, dqn, impala, a3c, or your own module:Class", nargs="?")
    _add(train, "env", "ENV", "a gymnasium id, module:factory, or a simulator: ./my_sim", nargs="?")
    _sims(train)
    _add(train, "--steps", "N", "environment steps to train for: 200000, 200k, 1M, 1e6 (default 200,000)")
    _add(train, "--target", "R", "stop once 20 greedy episodes return R on average")
    _add(train, "--seed", "S", "random seed (default 0)")
    _add(train, "--seeds", "N", "train N seeds side by side, from --seed on, or those named: 11,12,13")
    _how_many(train)
    _add(train, "--out", "DIR", "a new run directory (default runs/ALGO-ENV-...)")
    _add(train, "--from", "CHECKPOINT", "begin with the weights of a run (its best) or a checkpoint")
    _add(train, "--config", "FILE", "settings from a YAML file; those given here win over it")
    _set(train)
    _flag(train, "--no-preset", "do not start from tuned settings for this ENV")
    _flag(train, "--print-config", "print every setting with what it means, and exit")
    _where(train)
    _output(train)

    resume = _command(commands, "resume", "continue a run from its last checkpoint, as if it had never stopped")
    _add(resume, "run", "RUN", "a run directory, or one with the runs of --seeds: all go on")
    _add(resume, "--steps", "N", "train until N environment steps in all")
    _add(resume, "--target", "R", "stop once an evaluation returns R on average; none removes it")
    _how_many(resume)
    _set(resume)
    _where(resume)
    _output(resume)

    evaluate = _command(commands, "eval", "play greedy episodes with a trained policy, on fresh seeds")
    _add(evaluate, "run", "RUN", "a run directory, or a checkpoint in one")
    _add(evaluate, "--env", "ENV", "play another environment with the same spaces")
    _sims(evaluate)
    _set(evaluate, "env_args.K=V", "keyword arguments for the environment, laid over those of the run")
    _add(evaluate, "--episodes", "N", "how many (default 100; 3 with --video or --render)")
    _choose(evaluate, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    _add(evaluate, "--seed", "S", "play the same episodes each time")
    how = "step slow environments side by side: in threads if they wait, in processes if they compute (default no)"
    _choose(evaluate, "--parallel", ("no", "threads", "processes"), how)
    _add(evaluate, "--video", "DIR", "write a film (mp4) of each episode into this folder")
    _flag(evaluate, "--render", "show the episodes in a window")
    _output(evaluate, progress=False)

    runs = _command(commands, "runs", "list runs with their status, steps, return and age, the newest first")
    _add(runs, "folder", "DIR", "where to look, three folders deep (default runs)", nargs="?")
    _output(runs, progress=False)

    show = _command(commands, "show", "tell what is in a run or a checkpoint, and where resume would go on")
    _add(show, "run", "RUN", "a run directory, or a checkpoint in one")
    _flag(show, "--verify", "read every byte of its checkpoints and compare; 1 if torn")
    _output(show, progress=False)

    what = "check this machine, an environment, an algorithm or a run, and explain what is wrong"
    doctor = _command(commands, "doctor", what, epilog=DOCTOR_EXAMPLES)
    _add(doctor, "env", "ENV|ALGO|RUN", "an id or module:factory, an algorithm, or a run directory", nargs="?")
    _add(doctor, "on", "ENV", "of ALGO: what to try it on (default a tiny one)", nargs="?")
    _set(doctor, "env_args.K=V", "keyword arguments for ENV; of ALGO any setting")
    _add(doctor, "--steps", "N", "steps to try ENV for (default 10,000, or 4 seconds)")
    again = doctor.add_argument_group("see a fault of RUN again, in this process")
    _add(again, "--replay", "N", "recorded fault N of the run (default the last)", nargs="?", const="")
    _flag(again, "--debugger", "stop in pdb where it breaks; a terminal does so anyway")
    _flag(again, "--before", "stop in pdb right before the step that broke")
    _add(again, "--seconds", "S", "show the stack and end if it hangs this long (default 30)")
    _output(doctor, progress=False)

    sim = _command(commands, "sim", "begin a simulator in C++, or hold one against the protocol", epilog=SIM_EXAMPLES)
    _add(sim, "action", "new|check|keys", "what to do")
    _add(sim, "target", "DIR|COMMAND", "the folder to write, or the command that starts the simulator")
    _output(sim, progress=False)
    return parser


def _command(commands: argparse._SubParsersAction[_Parser], name: str, what: str, epilog: str = "") -> _Parser:
    how: dict[str, Any] = {"epilog": epilog, "formatter_class": _Help, "allow_abbrev": False}
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", **how)


def _add(group: argparse._ActionsContainer, name: str, metavar: str, what: str, **how: Any) -> None:
    group.add_argument(name, metavar=metavar, help=what, **how)


def _flag(group: argparse._ActionsContainer, name: str, what: str) -> None:
    group.add_argument(name, action="store_true", help=what)


def _choose(group: argparse._ActionsContainer, name: str, choices: Sequence[str], what: str) -> None:
    group.add_argument(name, choices=choices, default=choices[0], help=what)


def _sims(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--sims", "WHERE", "simulators that others start: listen:ADDRESS, or connect:ADDRESS,ADDRESS")
    _add(parser, "--sims-key", "FILE", "trainer.key of `raynforce sim keys`, for simulators on other machines")


def _how_many(parser: _Parser) -> None:
    _add(parser, "--samplers", "N", "number of samplers")
    _add(parser, "--envs", "M", "environments in each sampler")
    _add(parser, "--inference", "WHERE", "who acts in a simulator: server (the default) or client, itself")


ANY_SETTING = "change any setting, as often as you like; `raynforce train ... --print-config` lists them"


def _set(parser: _Parser, metavar: str = "a.b=c", what: str = ANY_SETTING) -> None:
    _add(parser, "--set", metavar, what, action="append", default=[])


def _where(parser: _Parser) -> None:
    """Where roles live, which changes nothing of what is learned; `WHERE` names the settings."""
    group = parser.add_argument_group("where it runs")
    runtimes = "inline (this process), process (processes of this machine), ray (Ray actors) or auto (the default)"
    _add(group, "--runtime", "NAME", runtimes)
    topologies = (
        "sync (sample, then learn), overlap (both at once, one version behind), async (learn from samplers as they are "
        "ready), central (one policy for all environments, for slow ones), replay (samplers and learner at their "
        "own pace, for dqn), shared-agent (samplers compute gradients, for a3c and dqn) or auto (the default)"
    )
    _add(group, "--topology", "NAME", topologies)
    _add(group, "--engine", "NAME", "what trains: native (the default), or your own module:Class")
    _add(group, "--address", "HOST:PORT", "with ray: a running cluster, or auto, or local")
    _add(group, "--sampler-cpus", "C", "with ray: CPUs that each sampler asks for (default 1)")
    _add(group, "--learner-cpus", "C", "with ray: CPUs that the learner asks for (default 1)")
    _add(group, "--learner-gpus", "G", "with ray: GPUs that the learner asks for (default 0)")


def _output(parser: _Parser, progress: bool = True) -> None:
    _flag(parser, "--json", "print one JSON object as the last line of stdout")
    if progress:
        log = "send metrics to wandb or mlflow too, as often as you like; resume goes on with those, none with none"
        _add(parser, "--log", "SERVICE", log, action="append", default=[], choices=("wandb", "mlflow", "none"))
        _flag(parser, "--quiet", "print the run's path and faults, and no progress")
    _flag(parser, "--debug", "show tracebacks")


WHERE = {name: name for name in ("engine", "runtime", "topology")}
"""The settings that options on where it runs stand for."""
WHERE |= {name: f"ray.{name}" for name in ("address", "sampler_cpus", "learner_cpus", "learner_gpus")}
SETTINGS = {name: name for name in ("steps", "target", "seed")} | WHERE  # the settings that any options stand for
SETTINGS |= {"from": "start_from"} | {name: f"sampling.{name}" for name in ("samplers", "envs", "inference")}
