"""What options are made of, and those that several commands have. Standard library only: `--help` is instant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from raynforce.errors import UsageError, nearest


class Help(argparse.RawDescriptionHelpFormatter):
    """Help whose lines end between words: `shared-agent` and `--print-config` stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:  # examples, whose lines are commands
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in self._split_lines(text, width))


class Parser(argparse.ArgumentParser):
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


def subcommand(commands: argparse._SubParsersAction[Parser], name: str, what: str, epilog: str = "") -> Parser:
    how: dict[str, Any] = {"epilog": epilog, "formatter_class": Help, "allow_abbrev": False}
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", **how)


def add(group: argparse._ActionsContainer, name: str, metavar: str, what: str, **how: Any) -> None:
    group.add_argument(name, metavar=metavar, help=what, **how)


def flag(group: argparse._ActionsContainer, name: str, what: str) -> None:
    group.add_argument(name, action="store_true", help=what)


def choose(group: argparse._ActionsContainer, name: str, choices: Sequence[str], what: str) -> None:
    group.add_argument(name, choices=choices, default=choices[0], help=what)


def cluster_address(parser: Parser) -> None:
    add(parser, "--address", "URL", "the cluster's dashboard (default $RAY_API_SERVER_ADDRESS, or this machine's)")


def simulators(parser: argparse.ArgumentParser) -> None:
    add(parser, "--sims", "WHERE", "simulators that others start: listen:ADDRESS, or connect:ADDRESS,ADDRESS")
    add(parser, "--sims-key", "FILE", "trainer.key of `raynforce sim keys`, for simulators on other machines")


def how_many(parser: Parser) -> None:
    add(parser, "--samplers", "N", "number of samplers")
    add(parser, "--envs", "M", "environments in each sampler")
    add(parser, "--inference", "WHERE", "who acts in a simulator: server (the default) or client, itself")


def metrics_port(parser: Parser) -> None:
    add(parser, "--metrics-port", "N", "let Prometheus scrape the run at http://127.0.0.1:N/metrics")


ANY_SETTING = "change any setting, as often as you like; `raynforce train ... --print-config` lists them"


def any_setting(command: Any) -> None:
    add(command, "--config", "FILE", "settings from a YAML file; those given here win over it")
    assignments(command)
    flag(command, "--no-preset", "do not start from tuned settings for this ENV")


def assignments(parser: Parser, metavar: str = "a.b=c", what: str = ANY_SETTING) -> None:
    add(parser, "--set", metavar, what, action="append", default=[])


def where_it_runs(parser: Parser) -> None:
    """Where roles live, which changes nothing of what is learned; `WHERE` names the settings."""
    group = parser.add_argument_group("where it runs")
    runtimes = "inline (this process), process (processes of this machine), ray (Ray actors) or auto (the default)"
    add(group, "--runtime", "NAME", runtimes)
    topologies = (
        "sync (sample, then learn), overlap (both at once, one version behind), async (learn from samplers as they are "
        "ready), central (one policy for all environments, for slow ones), replay (samplers and learner at their "
        "own pace, for dqn, sac and td3), shared-agent (samplers compute gradients, for a3c and dqn), dataset "
        "(recorded episodes, for bc) or auto (the default)"
    )
    add(group, "--topology", "NAME", topologies)
    add(
        group,
        "--engine",
        "NAME",
        "what trains: native (the default), rllib, or your own module:Class",
    )
    add(group, "--address", "HOST:PORT", "with ray: a running cluster, or auto, or local")
    add(group, "--sampler-cpus", "C", "with ray: CPUs that each sampler asks for (default 1)")
    add(group, "--learner-cpus", "C", "with ray: CPUs that the learner asks for (default 1)")
    add(group, "--learner-gpus", "G", "with ray: GPUs that the learner asks for (default 0)")


def output(parser: Parser, progress: bool = True) -> None:
    flag(parser, "--json", "print one JSON object as the last line of stdout")
    if progress:
        log = "send metrics to wandb or mlflow too, as often as you like; resume goes on with those, none with none"
        add(parser, "--log", "SERVICE", log, action="append", default=[], choices=("wandb", "mlflow", "none"))
        views = (
            "full (the whole screen, once a run lasts), live (a few lines), plain, quiet; auto is full on a terminal"
        )
        modes = ("auto", "full", "live", "plain", "quiet")
        parser.add_argument("--progress", choices=modes, help=f"{views} (default $RAYNFORCE_PROGRESS, or auto)")
        flag(parser, "--quiet", "print the run's path and faults, and no progress")
        add(parser, "--record", "N", "film N episodes of each policy that evaluates best, beside training")
        flag(parser, "--watch", "serve a page that shows the run while it lasts, and print its link")
    flag(parser, "--debug", "show tracebacks")


WHERE = {name: name for name in ("engine", "runtime", "topology")}
"""The settings that options on where it runs stand for."""
WHERE |= {name: f"ray.{name}" for name in ("address", "sampler_cpus", "learner_cpus", "learner_gpus")}
SETTINGS = {
    name: name for name in ("steps", "target", "seed", "metrics_port", "data")
} | WHERE  # the settings that any options stand for
SETTINGS |= {"from": "start_from"} | {name: f"sampling.{name}" for name in ("samplers", "envs", "inference")}
