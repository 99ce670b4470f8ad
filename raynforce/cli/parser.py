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
  raynforce train sac Pendulum-v1 --engine rllib
  raynforce train bc CartPole-v1 --data mine.parquet
"""

RECORD_EXAMPLES = """\
examples:
  raynforce record runs/mine --episodes 50 --out mine.parquet
  raynforce record runs/mine --steps 100k --sampled --out mine.parquet
  raynforce record CartPole-v1 --policy random --out random.parquet
  raynforce record runs/mine --format minari --out data/mine-v0
  raynforce train bc CartPole-v1 --data mine.parquet --target 475
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


IMPORT_EXAMPLES = """\
examples:
  raynforce import rllib ~/ray_results/my_ppo/checkpoint_000010 --trust
  raynforce eval runs/ppo-CartPole-v1-...
  raynforce train ppo CartPole-v1 --from runs/ppo-CartPole-v1-...
"""

TUNE_EXAMPLES = """\
examples:
  raynforce tune ppo CartPole-v1 --target 475 --trials 20
  raynforce tune ppo Pendulum-v1 --steps 100k --scheduler pbt --trials 8
  raynforce tune dqn CartPole-v1 --scheduler optuna --seeds 1 --cpus 0.5
  raynforce tune ppo Acrobot-v1 --search 'algorithm.epochs=int(2,20)'
  raynforce tune ppo my_sims:make_arm --search space.yaml --steps 1M
  raynforce tune --resume runs/ppo-CartPole-v1-tune0-...
  raynforce train --config runs/ppo-CartPole-v1-tune0-.../best.yaml
"""

SUBMIT_EXAMPLES = """\
examples:
  raynforce submit --runs s3://bucket/runs train ppo CartPole-v1 --target 475
  raynforce submit --runs /shared train ppo my_sims:make_arm --runtime ray
  raynforce submit --address http://head:8265 resume s3://bucket/runs/mine
  raynforce submit --detach eval s3://bucket/runs/mine
"""

EXPORT_EXAMPLES = """\
examples:
  raynforce export runs/mine --to onnx exported
  raynforce export runs/mine --to numpy exported
  python exported/predict.py '[0.1, 0, 0, 0]'
  raynforce export runs/mine --to cpp exported --json
"""

PIPELINE_EXAMPLES = """\
examples:
  raynforce pipeline cartpole.yaml --dry-run      what is done, what would run
  raynforce pipeline cartpole.yaml                run what is not done yet
  raynforce pipeline cartpole.yaml --from export  run that step again
  raynforce submit --runs s3://bucket/runs pipeline cartpole.yaml
"""

PROMOTE_EXAMPLES = """\
examples:
  raynforce promote runs/mine --to registry
  raynforce promote runs/mine --to s3://bucket/registry --episodes 300
  raynforce registry registry
  raynforce rollback registry
"""

JOBS_EXAMPLES = """\
examples:
  raynforce jobs                    all jobs of the cluster, the newest first
  raynforce jobs logs ID --follow   its log so far, and what is to come
  raynforce jobs stop ID            after a last checkpoint
  raynforce jobs wait ID            until it has ended; exits as the run does
"""

PLOT_EXAMPLES = """\
examples:
  raynforce plot runs/mine -o curve.png
  raynforce plot runs/ppo-seeds runs/dqn-seeds -o compared.html --target 475
  raynforce plot runs --metric losses/value_loss --over time -o losses.svg
"""

SERVE_EXAMPLES = """\
examples:
  raynforce serve runs/mine --local               from this process, up in a second
  raynforce serve runs/mine --replicas 4          on Ray Serve
  raynforce serve runs/mine --follow              takes each new best checkpoint
  raynforce serve runs/mine --canary 0.1 runs/new a tenth of the requests for another run
  curl -H "Authorization: Bearer TOKEN" -H "Content-Type: application/json" \\
       -d '{"obs": [0, 0.1, 0, -0.1]}' http://127.0.0.1:8000/act
"""

CLUSTER_EXAMPLES = """\
examples:
  raynforce cluster init aws --storage s3://my-bucket/runs --max-workers 8
  raynforce cluster init kubernetes my-files --image example.com/raynforce:1
  raynforce cluster init ssh --hosts 10.0.0.1,10.0.0.2,10.0.0.3 --user me
  raynforce cluster init slurm --max-workers 3 --cpus 16
  raynforce cluster check cluster-aws/cluster.yaml
  raynforce cluster status --address 10.0.0.1:6379
"""


WATCH_EXAMPLES = """\
examples:
  raynforce watch                       all runs in ./runs
  raynforce watch runs/mine runs/other  these two
  raynforce watch s3://bucket/runs      runs at a URL
  raynforce train ppo CartPole-v1 --watch
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
    if arguments.command == "cluster":  # argparse takes no word that may be left out once options have come
        for place in ("target", "folder"):
            if getattr(arguments, place) is None and unknown and not unknown[0].startswith("-"):
                setattr(arguments, place, unknown.pop(0))
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
    _add(
        train,
        "algo",
        "ALGO",
        "ppo, dqn, sac, td3, impala, a3c, bc, or your own module:Class; see also explain rllib",
        nargs="?",
    )
    _add(train, "env", "ENV", "a gymnasium id, module:factory, or a simulator: ./my_sim", nargs="?")
    _sims(train)
    _add(train, "--steps", "N", "environment steps to train for: 200000, 200k, 1M, 1e6 (default 200,000)")
    _add(train, "--target", "R", "stop once 20 greedy episodes return R on average")
    _add(train, "--seed", "S", "random seed (default 0)")
    _add(train, "--seeds", "N", "train N seeds side by side, from --seed on, or those named: 11,12,13")
    _how_many(train)
    _add(train, "--out", "DIR", "a new run directory (default runs/ALGO-ENV-...)")
    _flag(train, "--resume", "if there is a run of this config at --out already, go on with it")
    _add(train, "--from", "CHECKPOINT", "begin with the weights of a run (its best) or a checkpoint")
    _add(
        train, "--data", "PATH", "of bc: recorded episodes, Parquet or a Minari dataset; `raynforce record` writes them"
    )
    _settings(train)
    _metrics_port(train)
    _flag(train, "--print-config", "print every setting with what it means (of rllib: a script for it), and exit")
    _where(train)
    _output(train)

    resume = _command(commands, "resume", "continue a run from its last checkpoint, as if it had never stopped")
    _add(resume, "run", "RUN", "a run directory, or one with the runs of --seeds: all go on")
    _add(resume, "--steps", "N", "train until N environment steps in all")
    _add(resume, "--target", "R", "stop once an evaluation returns R on average; none removes it")
    _how_many(resume)
    _metrics_port(resume)
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

    what = "write episodes that a policy plays into a file, for `train bc --data`"
    record = _command(commands, "record", what, epilog=RECORD_EXAMPLES)
    _add(record, "source", "RUN|ENV", "a run directory or a checkpoint in one; with --policy random an environment")
    _add(record, "--episodes", "N", "how many (default 100)")
    _add(record, "--steps", "N", "so many steps instead; the last episodes are truncated there")
    _add(record, "--out", "PATH", "a new file, of Minari a folder such as mine-v0 (default in data/)")
    _flag(record, "--sampled", "sample actions as in training, instead of the best ones")
    _add(record, "--policy", "random", "act at random instead of by a run's policy")
    _choose(record, "--format", ("parquet", "minari"), "one Parquet file, which RLlib reads too (default), or Minari")
    _choose(record, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    _add(record, "--seed", "S", "play the same episodes each time")
    _set(record, "env_args.K=V", "keyword arguments for the environment, laid over those of the run")
    _choose(record, "--parallel", ("no", "threads", "processes"), how)
    _output(record, progress=False)

    runs = _command(commands, "runs", "list runs with their status, steps, return and age, the newest first")
    _add(runs, "folder", "DIR", "where to look, three folders deep (default runs)", nargs="?")
    _output(runs, progress=False)

    show = _command(commands, "show", "tell what is in a run or a checkpoint, and where resume would go on")
    _add(show, "run", "RUN", "a run directory, or a checkpoint in one")
    _flag(show, "--verify", "read every byte of its checkpoints and compare; 1 if torn")
    _output(show, progress=False)

    what = "draw learning curves with bands over seeds, scores, and time to target, into a file"
    plot = _command(commands, "plot", what, epilog=PLOT_EXAMPLES)
    several = "run directories or URLs, or folders with runs; those that differ in the seed alone are one curve"
    _add(plot, "runs", "RUN", several, nargs="+")
    plot.add_argument("-o", "--out", metavar="FILE", required=True, help="FILE.png, .svg, .pdf, or a page: .html")
    _add(plot, "--metric", "NAME", "of metrics.jsonl (default charts/episodic_return)")
    _choose(plot, "--over", ("steps", "time"), "what it is drawn over (default steps)")
    _add(plot, "--target", "R", "draw it, and the time to it (default that of the runs)")
    _output(plot, progress=False)

    report = _command(commands, "report", "write one page on a run, or several, to send to a colleague")
    _add(report, "runs", "RUN", "run directories or URLs, or folders with runs", nargs="+")
    report.add_argument("-o", "--out", metavar="FILE", help="the page (default report.html in the run's directory)")
    _output(report, progress=False)

    table = _command(commands, "export-metrics", "write all metrics of a run as a table")
    _add(table, "run", "RUN", "a run directory or URL, or the folder of several seeds")
    _flag(table, "--csv", "as CSV (the default)")
    table.add_argument("-o", "--out", metavar="FILE", help="into this file (default stdout)")
    _output(table, progress=False)

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

    watch = _command(commands, "watch", "serve a page that shows runs, live", epilog=WATCH_EXAMPLES)
    _add(watch, "sources", "RUN|DIR|URL", "runs, or folders of runs (default runs)", nargs="*")
    _add(watch, "--port", "N", "of this machine, for this user alone (default the first that is free from 8420 on)")
    _flag(watch, "--no-browser", "print the link and do not open it")
    _output(watch, progress=False)

    explain = _command(commands, "explain", "tell what a setting or an algorithm is, and what RLlib calls each")
    _add(explain, "topic", "ALGO|SETTING|rllib", "ppo, a setting such as sampling.fragment, or rllib for the table")
    _output(explain, progress=False)

    sim = _command(commands, "sim", "begin a simulator in C++, or hold one against the protocol", epilog=SIM_EXAMPLES)
    _add(sim, "action", "new|check|keys", "what to do")
    _add(sim, "target", "DIR|COMMAND", "the folder to write, or the command that starts the simulator")
    _output(sim, progress=False)

    take = _command(commands, "import", "take over a checkpoint that RLlib made without us", epilog=IMPORT_EXAMPLES)
    _add(take, "what", "rllib", "what made it")
    _add(take, "folder", "DIR", "the directory that Algorithm.save_to_path wrote")
    _add(take, "--env", "ENV", "the environment, where the checkpoint names one that only its script knows")
    _add(take, "--out", "DIR", "a new run directory (default runs/ALGO-ENV-...)")
    _flag(take, "--trust", "load it: it holds pickles, which can run any code, so do this for your own alone")
    _output(take, progress=False)

    _deployment(commands)
    tune = _command(commands, "tune", "search for settings, on Ray Tune", epilog=TUNE_EXAMPLES)
    _add(tune, "algo", "ALGO", "ppo, dqn, impala, a3c, or your own module:Class", nargs="?")
    _add(tune, "env", "ENV", "a gymnasium id, module:factory, or a simulator: ./my_sim", nargs="?")
    search = "what is searched: uniform(LOW,HIGH), log, int, logint or choice(A,B,...), or a YAML file of these"
    _add(tune, "--search", "a.b=log(x,y)", search, nargs="+", action="extend", default=[])
    _add(tune, "--trials", "N", "settings to try (default 20; with pbt the population, 8)")
    schedulers = "asha (the default), optuna, pbt, random or grid: who chooses settings, and stops bad ones"
    _add(tune, "--scheduler", "NAME", schedulers)
    objective = "return, or steps or seconds to the target (default steps if there is a target)"
    _add(tune, "--objective", "NAME", objective)
    _add(tune, "--seeds", "N", "seeds of each trial, whose median counts (default 3), or those named: 11,12,13")
    _add(tune, "--steps", "N", "environment steps of each run at most (default 200,000)")
    _add(tune, "--target", "R", "a run ends once 20 greedy episodes return R on average")
    _add(tune, "--seed", "S", "of the drawing of settings, and the first seed of each trial (default 0)")
    _how_many(tune)
    _add(tune, "--out", "DIR", "a new directory for the search (default runs/ALGO-ENV-tune...)")
    _add(tune, "--resume", "DIR", "go on with the search in DIR, after whatever ended it")
    _settings(tune)
    where = tune.add_argument_group("where it runs")
    _add(where, "--cpus", "C", "CPUs that a trial asks for, may be a fraction (default 1): cores / C run at a time")
    _add(where, "--gpus", "G", "GPUs that a trial asks for (default 0, or 1 with learner.device=cuda)")
    _add(where, "--address", "HOST:PORT", "a running Ray cluster, or auto (default: one is started for the search)")
    _add(where, "--runtime", "NAME", "of each run: inline (the default) or process")
    _add(where, "--topology", "NAME", "of each run, as in train")
    _output(tune, progress=False)
    _flag(tune, "--quiet", "print the directory, and no progress")

    what = "run a command as a job of a Ray cluster, and follow it; Ctrl-C detaches"
    submit = _command(commands, "submit", what, epilog=SUBMIT_EXAMPLES)
    command = "train, resume, eval, ... and its arguments, as here"
    _add(submit, "words", "COMMAND ...", command, nargs=argparse.REMAINDER)
    _cluster(submit)
    _add(submit, "--runs", "URL|DIR", "where runs are kept: a URL such as s3://bucket/runs, or a folder all nodes see")
    _add(submit, "--id", "NAME", "the run's id, and so the job's (default: follows from the command)")
    _add(submit, "--env", "NAME", "send this variable along, as often as you like", action="append", default=[])
    _add(submit, "--working-dir", "DIR", "send this folder (default: those that your modules are in)")
    _add(submit, "--python", "PROGRAM", "the Python of the cluster's nodes (default python)", default="python")
    _add(submit, "--cpus", "C", "CPUs that the driver asks for, on any node (default none, on the head)")
    _add(submit, "--gpus", "G", "GPUs that the driver asks for, on any node")
    _add(submit, "--grace", "S", "seconds for the last checkpoint after a stop (default 300)")
    _flag(submit, "--detach", "do not follow it")
    _output(submit, progress=False)

    jobs = _command(commands, "jobs", "list, follow, stop and await the jobs of a Ray cluster", epilog=JOBS_EXAMPLES)
    _add(jobs, "action", "list|logs|stop|status|wait", "what to do (default list)", nargs="?", default="list")
    _add(jobs, "id", "ID", "the id of a run", nargs="?")
    _cluster(jobs)
    _flag(jobs, "--follow", "of logs: go on until the job has ended; Ctrl-C detaches")
    _add(jobs, "--timeout", "S", "of wait: fail after so many seconds")
    _output(jobs, progress=False)

    serve = _command(commands, "serve", "answer requests with a trained policy, over HTTP", epilog=SERVE_EXAMPLES)
    _add(serve, "run", "RUN", "a run directory, a URL, or a checkpoint")
    _flag(serve, "--local", "from this process, without Ray")
    _add(
        serve, "--host", "ADDRESS", "where to listen (default 127.0.0.1); beyond this machine only with your own token"
    )
    _add(serve, "--port", "N", "where to listen (default 8000), 0 for any that is free")
    _add(serve, "--token", "T", "what clients have to send (default $RAYNFORCE_SERVE_TOKEN, or a new one)")
    _choose(serve, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    _flag(serve, "--sample", "sample actions as in training, instead of the best ones")
    _add(serve, "--seed", "S", "of what is sampled, and of the canary's share")
    _flag(serve, "--follow", "take each new checkpoint of the run; SIGHUP and POST /reload do so once")
    canary = "let the policy of another run answer this share of the requests"
    serve.add_argument("--canary", metavar=("SHARE", "RUN"), nargs=2, help=canary)
    _add(serve, "--replicas", "N", "processes that answer, on Ray (default 1)")
    _add(serve, "--rate", "R", "requests each second, at most; more get 429 (default no limit)")
    names = "a name that clients know this server by, as often as you like"
    _add(serve, "--allow-host", "NAME", names, action="append", default=[])
    _add(serve, "--address", "HOST:PORT", "a running Ray cluster, or auto (default a Ray of its own)")
    _output(serve, progress=False)

    what = "write the files of a cluster, check such a file, or ask a cluster how it is"
    cluster = _command(commands, "cluster", what, epilog=CLUSTER_EXAMPLES)
    _add(cluster, "action", "init|check|status", "what to do")
    target = "of init: aws, gcp, azure, aliyun, kubernetes, slurm or ssh; of check: the file"
    _add(cluster, "target", "TARGET|FILE", target, nargs="?")
    _add(cluster, "folder", "DIR", "of init: a new folder for the files (default cluster-TARGET)", nargs="?")
    _cluster_options(cluster.add_argument_group("what init writes"))
    _add(cluster, "--crds", "DIR", "of check: KubeRay's CRDs to hold its files against (or RAYNFORCE_KUBERAY)")
    _add(cluster, "--address", "HOST:PORT", "of status: the cluster's head (default the one of this machine)")
    _output(cluster, progress=False)
    return parser


def _deployment(commands: argparse._SubParsersAction[_Parser]) -> None:
    what = "write a policy as a folder that acts without Raynforce, and verify it"
    export = _command(commands, "export", what, epilog=EXPORT_EXAMPLES)
    _add(export, "run", "RUN", "a run directory, a checkpoint in one, or a registry")
    _add(export, "folder", "DIR", "a new folder")
    _add(export, "--to", "FORMAT", "onnx, numpy, torchscript or cpp", required=True)
    _choose(export, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    _output(export, progress=False)

    what = "train, evaluate, promote if better, export: each step once, whatever ends it"
    pipeline = _command(commands, "pipeline", what, epilog=PIPELINE_EXAMPLES)
    _add(pipeline, "file", "FILE", "steps and what they need, as YAML; or the same as JSON text")
    _add(pipeline, "--from", "STEP", "run this step again, and all that depend on it")
    _flag(pipeline, "--dry-run", "tell what is done and what would run, and change nothing")
    _add(pipeline, "--dir", "DIR|URL", "where its state and runs are kept (default pipelines/NAME)")
    _flag(pipeline, "--json", "print one JSON object as the last line of stdout")
    _flag(pipeline, "--quiet", "print no progress")
    _flag(pipeline, "--debug", "show tracebacks")

    what = "make a policy the one that is served, if it is better than that one; 1 if not"
    promote = _command(commands, "promote", what, epilog=PROMOTE_EXAMPLES)
    _add(promote, "run", "RUN", "a run directory, or a checkpoint in one")
    _add(promote, "--to", "REGISTRY", "a directory or URL with the promoted policies", required=True)
    _add(promote, "--name", "NAME", "of the entry (default the run's)")
    _add(promote, "--episodes", "N", "that each of both plays (default 100)")
    _add(promote, "--level", "P", "chance of promoting one that is not better (default 0.05)")
    _add(promote, "--seed", "S", "play the same episodes each time")
    _choose(promote, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    _flag(promote, "--force", "promote it without playing")
    _output(promote, progress=False)

    rollback = _command(commands, "rollback", "serve the policy again that was served before")
    _add(rollback, "registry", "REGISTRY", "a directory or URL with the promoted policies")
    _add(rollback, "--to", "ENTRY", "which one, by name or number (default the one before)")
    _output(rollback, progress=False)

    registry = _command(commands, "registry", "list the policies that were promoted: who beat whom, by how much")
    _add(registry, "registry", "REGISTRY", "a directory or URL with the promoted policies")
    _output(registry, progress=False)


def _cluster_options(group: argparse._ActionsContainer) -> None:
    _add(group, "--name", "NAME", "of the cluster (default raynforce)")
    _add(group, "--storage", "WHERE", "of runs: s3://bucket/runs, gs://, az://, oss://, a shared folder, or pvc:CLAIM")
    _add(group, "--min-workers", "N", "workers that are always there (default 0)")
    _add(group, "--max-workers", "N", "workers that may be there at once (default 4)")
    _add(group, "--instance", "TYPE", "of workers, and of the head unless it is given")
    _add(group, "--head-instance", "TYPE", "of the head, with the driver and the learner")
    _add(group, "--cpus", "N", "CPUs of each node; clouds know it by the instance")
    _add(group, "--gpus", "N", "GPUs of the head, for the learner (default 0)")
    _add(group, "--image", "NAME", "container image (default Ray's own, of this version)")
    _add(group, "--machine-image", "ID", "image of the machines below")
    _add(group, "--region", "NAME", "of the cloud")
    _add(group, "--project", "ID", "of gcp")
    _flag(group, "--on-demand", "workers that are not taken away, instead of spot")
    _add(group, "--hosts", "A,B,C", "of ssh: addresses, the head first")
    _add(group, "--user", "NAME", "of ssh (default ubuntu)")
    _add(group, "--ssh-key", "FILE", "of ssh (default ~/.ssh/id_ed25519)")
    _add(group, "--python", "PATH", "of ssh and slurm: a Python with Raynforce's dependencies on the nodes")


def _command(commands: argparse._SubParsersAction[_Parser], name: str, what: str, epilog: str = "") -> _Parser:
    how: dict[str, Any] = {"epilog": epilog, "formatter_class": _Help, "allow_abbrev": False}
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", **how)


def _add(group: argparse._ActionsContainer, name: str, metavar: str, what: str, **how: Any) -> None:
    group.add_argument(name, metavar=metavar, help=what, **how)


def _flag(group: argparse._ActionsContainer, name: str, what: str) -> None:
    group.add_argument(name, action="store_true", help=what)


def _choose(group: argparse._ActionsContainer, name: str, choices: Sequence[str], what: str) -> None:
    group.add_argument(name, choices=choices, default=choices[0], help=what)


def _cluster(parser: _Parser) -> None:
    _add(parser, "--address", "URL", "the cluster's dashboard (default $RAY_API_SERVER_ADDRESS, or this machine's)")


def _sims(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--sims", "WHERE", "simulators that others start: listen:ADDRESS, or connect:ADDRESS,ADDRESS")
    _add(parser, "--sims-key", "FILE", "trainer.key of `raynforce sim keys`, for simulators on other machines")


def _how_many(parser: _Parser) -> None:
    _add(parser, "--samplers", "N", "number of samplers")
    _add(parser, "--envs", "M", "environments in each sampler")
    _add(parser, "--inference", "WHERE", "who acts in a simulator: server (the default) or client, itself")


def _metrics_port(parser: _Parser) -> None:
    _add(parser, "--metrics-port", "N", "let Prometheus scrape the run at http://127.0.0.1:N/metrics")


ANY_SETTING = "change any setting, as often as you like; `raynforce train ... --print-config` lists them"


def _settings(command: Any) -> None:
    _add(command, "--config", "FILE", "settings from a YAML file; those given here win over it")
    _set(command)
    _flag(command, "--no-preset", "do not start from tuned settings for this ENV")


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
        "own pace, for dqn, sac and td3), shared-agent (samplers compute gradients, for a3c and dqn), dataset "
        "(recorded episodes, for bc) or auto (the default)"
    )
    _add(group, "--topology", "NAME", topologies)
    _add(
        group,
        "--engine",
        "NAME",
        "what trains: native (the default), rllib, or your own module:Class",
    )
    _add(group, "--address", "HOST:PORT", "with ray: a running cluster, or auto, or local")
    _add(group, "--sampler-cpus", "C", "with ray: CPUs that each sampler asks for (default 1)")
    _add(group, "--learner-cpus", "C", "with ray: CPUs that the learner asks for (default 1)")
    _add(group, "--learner-gpus", "G", "with ray: GPUs that the learner asks for (default 0)")


def _output(parser: _Parser, progress: bool = True) -> None:
    _flag(parser, "--json", "print one JSON object as the last line of stdout")
    if progress:
        log = "send metrics to wandb or mlflow too, as often as you like; resume goes on with those, none with none"
        _add(parser, "--log", "SERVICE", log, action="append", default=[], choices=("wandb", "mlflow", "none"))
        views = (
            "full (the whole screen, once a run lasts), live (a few lines), plain, quiet; auto is full on a terminal"
        )
        modes = ("auto", "full", "live", "plain", "quiet")
        parser.add_argument("--progress", choices=modes, help=f"{views} (default $RAYNFORCE_PROGRESS, or auto)")
        _flag(parser, "--quiet", "print the run's path and faults, and no progress")
        _add(parser, "--record", "N", "film N episodes of each policy that evaluates best, beside training")
        _flag(parser, "--watch", "serve a page that shows the run while it lasts, and print its link")
    _flag(parser, "--debug", "show tracebacks")


WHERE = {name: name for name in ("engine", "runtime", "topology")}
"""The settings that options on where it runs stand for."""
WHERE |= {name: f"ray.{name}" for name in ("address", "sampler_cpus", "learner_cpus", "learner_gpus")}
SETTINGS = {
    name: name for name in ("steps", "target", "seed", "metrics_port", "data")
} | WHERE  # the settings that any options stand for
SETTINGS |= {"from": "start_from"} | {name: f"sampling.{name}" for name in ("samplers", "envs", "inference")}
