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
            commands = self._commands()
            message = f"unknown command {wrong!r}{nearest(wrong, commands)}: known are {', '.join(commands)}"
        raise UsageError(f"{message}; see {self.prog} --help")

    @property
    def options(self) -> list[str]:
        return [o for a in self._actions for o in a.option_strings]

    def _commands(self) -> list[str]:
        return [c for a in self._actions if isinstance(a, argparse._SubParsersAction) for c in a.choices]


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
    flag = next(
        (f"--{o.replace('_', '-')}" for o, setting in {**SETTINGS, **WHERE}.items() if setting == found.path), ""
    )
    here = f"{flag} {quote(value)}" if flag in parser.options else f"--set {quote(f'{found.path}={value}')}"
    note = f" ({found.note})" if found.note else ""
    raise UsageError(f"unknown option {option!r}: here it is {here}{note}; see {parser.prog} --help")


def kernels_asked_for(arguments: argparse.Namespace) -> Literal["portable", "native"]:
    """What `--set`, the config or the run that is named say of `kernels`, known before anything is imported to read it.

    Whatever is wrong with them is told when they are read.
    """
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
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)

    train = _command(commands, "train", "train an agent", epilog=TRAIN_EXAMPLES)
    train.add_argument("algo", nargs="?", metavar="ALGO", help="ppo, dqn, impala, a3c, or your own module:Class")
    train.add_argument("env", nargs="?", metavar="ENV", help="a gymnasium id, or module:factory")
    train.add_argument(
        "--steps", metavar="N", help="environment steps to train for: 200000, 200k, 1M, 1e6 (default 200,000)"
    )
    train.add_argument("--target", metavar="R", help="stop once 20 greedy episodes return R on average")
    train.add_argument("--seed", metavar="S", help="random seed (default 0)")
    train.add_argument(
        "--seeds", metavar="N", help="train N seeds side by side, from --seed on, or those named: 11,12,13"
    )
    _how_many(train)
    train.add_argument("--out", metavar="DIR", help="a new run directory (default runs/ALGO-ENV-...)")
    train.add_argument(
        "--from", metavar="CHECKPOINT", help="begin with the weights of a run (its best) or a checkpoint"
    )
    train.add_argument("--config", metavar="FILE", help="settings from a YAML file; those given here win over it")
    _set(train)
    train.add_argument("--no-preset", action="store_true", help="do not start from tuned settings for this ENV")
    train.add_argument("--print-config", action="store_true", help="print every setting with what it means, and exit")
    _where(train)
    _output(train)

    resume = _command(commands, "resume", "continue a run from its last checkpoint, as if it had never stopped")
    resume.add_argument("run", metavar="RUN", help="a run directory, or one with the runs of --seeds: all go on")
    resume.add_argument("--steps", metavar="N", help="train until N environment steps in all")
    resume.add_argument("--target", metavar="R", help="stop once an evaluation returns R on average; none removes it")
    _how_many(resume)
    _set(resume)
    _where(resume)
    _output(resume)

    evaluate = _command(commands, "eval", "play greedy episodes with a trained policy, on fresh seeds")
    evaluate.add_argument("run", metavar="RUN", help="a run directory, or a checkpoint in one")
    evaluate.add_argument("--env", metavar="ENV", help="play another environment with the same spaces")
    evaluate.add_argument(
        "--set",
        metavar="env_args.K=V",
        dest="set",
        action="append",
        default=[],
        help="keyword arguments for the environment, laid over those of the run",
    )
    evaluate.add_argument("--episodes", metavar="N", help="how many (default 100; 3 with --video or --render)")
    evaluate.add_argument(
        "--checkpoint", choices=("best", "last"), default="best", help="which checkpoint (default best)"
    )
    evaluate.add_argument("--seed", metavar="S", help="play the same episodes each time")
    evaluate.add_argument(
        "--parallel",
        choices=("no", "threads", "processes"),
        default="no",
        help="step slow environments side by side: in threads if they wait, in processes if they compute (default no)",
    )
    evaluate.add_argument("--video", metavar="DIR", help="write a film (mp4) of each episode into this folder")
    evaluate.add_argument("--render", action="store_true", help="show the episodes in a window")
    _output(evaluate, progress=False)

    runs = _command(commands, "runs", "list runs with their status, steps, return and age, the newest first")
    runs.add_argument("folder", nargs="?", metavar="DIR", help="where to look, three folders deep (default runs)")
    _output(runs, progress=False)

    show = _command(commands, "show", "tell what is in a run or a checkpoint, and where resume would go on")
    show.add_argument("run", metavar="RUN", help="a run directory, or a checkpoint in one")
    show.add_argument("--verify", action="store_true", help="read every byte of its checkpoints and compare; 1 if torn")
    _output(show, progress=False)

    what = "check this machine, an environment, an algorithm or a run, and explain what is wrong"
    doctor = _command(commands, "doctor", what, epilog=DOCTOR_EXAMPLES)
    doctor.add_argument(
        "env", nargs="?", metavar="ENV|ALGO|RUN", help="an id or module:factory, an algorithm, or a run directory"
    )
    doctor.add_argument("on", nargs="?", metavar="ENV", help="of ALGO: what to try it on (default a tiny one)")
    doctor.add_argument(
        "--set",
        metavar="env_args.K=V",
        dest="set",
        action="append",
        default=[],
        help="keyword arguments for ENV; of ALGO any setting",
    )
    doctor.add_argument("--steps", metavar="N", help="steps to try ENV for (default 10,000, or 4 seconds)")
    again = doctor.add_argument_group("see a fault of RUN again, in this process")
    again.add_argument(
        "--replay", nargs="?", const="", metavar="N", help="recorded fault N of the run (default the last)"
    )
    again.add_argument("--debugger", action="store_true", help="stop in pdb where it breaks; a terminal does so anyway")
    again.add_argument("--before", action="store_true", help="stop in pdb right before the step that broke")
    again.add_argument("--seconds", metavar="S", help="show the stack and end if it hangs this long (default 30)")
    _output(doctor, progress=False)
    return parser


def _command(commands: argparse._SubParsersAction[_Parser], name: str, what: str, epilog: str = "") -> _Parser:
    return commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=epilog,
        formatter_class=_Help,
        allow_abbrev=False,
    )


def _how_many(parser: _Parser) -> None:
    parser.add_argument("--samplers", metavar="N", help="number of samplers")
    parser.add_argument("--envs", metavar="M", help="environments in each sampler")


def _set(parser: _Parser) -> None:
    parser.add_argument(
        "--set",
        metavar="a.b=c",
        dest="set",
        action="append",
        default=[],
        help="change any setting, as often as you like; `raynforce train ... --print-config` lists them",
    )


def _where(parser: _Parser) -> None:
    """Where roles live, which changes nothing of what is learned; `WHERE` names the settings."""
    group = parser.add_argument_group("where it runs")
    group.add_argument(
        "--runtime",
        metavar="NAME",
        help="inline (this process), process (processes of this machine), ray (Ray actors) or auto (the default)",
    )
    group.add_argument(
        "--topology",
        metavar="NAME",
        help="sync (sample, then learn), overlap (both at once, one version behind), async (learn from whoever is "
        "ready), central (one policy for all environments, for slow ones), replay (samplers and learner at their "
        "own pace, for dqn), shared-agent (samplers compute gradients, for a3c and dqn) or auto (the default)",
    )
    group.add_argument("--engine", metavar="NAME", help="what trains: native (the default), or your own module:Class")
    group.add_argument("--address", metavar="HOST:PORT", help="with ray: a running cluster, or auto, or local")
    group.add_argument("--sampler-cpus", metavar="C", help="with ray: CPUs that each sampler asks for (default 1)")
    group.add_argument("--learner-cpus", metavar="C", help="with ray: CPUs that the learner asks for (default 1)")
    group.add_argument("--learner-gpus", metavar="G", help="with ray: GPUs that the learner asks for (default 0)")


SETTINGS = {
    "steps": "steps",
    "target": "target",
    "seed": "seed",
    "from": "start_from",
    "samplers": "sampling.samplers",
    "envs": "sampling.envs",
}
"""The settings that options stand for, and those of where it runs:"""
WHERE = {
    "engine": "engine",
    "runtime": "runtime",
    "topology": "topology",
    "address": "ray.address",
    "sampler_cpus": "ray.sampler_cpus",
    "learner_cpus": "ray.learner_cpus",
    "learner_gpus": "ray.learner_gpus",
}


def _output(parser: _Parser, progress: bool = True) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")
    if progress:
        parser.add_argument(
            "--log",
            metavar="SERVICE",
            action="append",
            default=[],
            choices=("wandb", "mlflow", "none"),
            help="send metrics to wandb or mlflow too, as often as you like; resume goes on with those, none with none",
        )
        parser.add_argument("--quiet", action="store_true", help="print the run's path and faults, and no progress")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
