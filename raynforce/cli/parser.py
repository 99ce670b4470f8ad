"""What can be typed: sub-commands, arguments, and their help. Standard library only, so that `--help` is instant."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Literal

from raynforce.cli.options import (
    SETTINGS,
    Help,
    Parser,
    add,
    any_setting,
    assignments,
    choose,
    cluster_address,
    flag,
    how_many,
    metrics_port,
    output,
    simulators,
    subcommand,
    where_it_runs,
)
from raynforce.errors import UsageError

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


def _blame_setting(parser: Parser, unknown: Sequence[str], argv: Sequence[str]) -> None:
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


def _parser() -> Parser:
    parser = Parser(
        prog="raynforce",
        description="Train, resume, evaluate and check reinforcement-learning agents.",
        epilog="Start here: raynforce train ppo CartPole-v1 --target 475",
        formatter_class=Help,
        allow_abbrev=False,
    )
    flag(parser, "--version", "print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)

    train = subcommand(commands, "train", "train an agent", epilog=TRAIN_EXAMPLES)
    add(
        train,
        "algo",
        "ALGO",
        "ppo, dqn, sac, td3, impala, a3c, bc, or your own module:Class; see also explain rllib",
        nargs="?",
    )
    add(train, "env", "ENV", "a gymnasium id, module:factory, or a simulator: ./my_sim", nargs="?")
    simulators(train)
    add(train, "--steps", "N", "environment steps to train for: 200000, 200k, 1M, 1e6 (default 200,000)")
    add(train, "--target", "R", "stop once 20 greedy episodes return R on average")
    add(train, "--seed", "S", "random seed (default 0)")
    add(train, "--seeds", "N", "train N seeds side by side, from --seed on, or those named: 11,12,13")
    how_many(train)
    add(train, "--out", "DIR", "a new run directory (default runs/ALGO-ENV-...)")
    flag(train, "--resume", "if there is a run of this config at --out already, go on with it")
    add(train, "--from", "CHECKPOINT", "begin with the weights of a run (its best) or a checkpoint")
    add(
        train, "--data", "PATH", "of bc: recorded episodes, Parquet or a Minari dataset; `raynforce record` writes them"
    )
    any_setting(train)
    metrics_port(train)
    flag(train, "--print-config", "print every setting with what it means (of rllib: a script for it), and exit")
    where_it_runs(train)
    output(train)

    resume = subcommand(commands, "resume", "continue a run from its last checkpoint, as if it had never stopped")
    add(resume, "run", "RUN", "a run directory, or one with the runs of --seeds: all go on")
    add(resume, "--steps", "N", "train until N environment steps in all")
    add(resume, "--target", "R", "stop once an evaluation returns R on average; none removes it")
    how_many(resume)
    metrics_port(resume)
    assignments(resume)
    where_it_runs(resume)
    output(resume)

    evaluate = subcommand(commands, "eval", "play greedy episodes with a trained policy, on fresh seeds")
    add(evaluate, "run", "RUN", "a run directory, or a checkpoint in one")
    add(evaluate, "--env", "ENV", "play another environment with the same spaces")
    simulators(evaluate)
    assignments(evaluate, "env_args.K=V", "keyword arguments for the environment, laid over those of the run")
    add(evaluate, "--episodes", "N", "how many (default 100; 3 with --video or --render)")
    choose(evaluate, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    add(evaluate, "--seed", "S", "play the same episodes each time")
    how = "step slow environments side by side: in threads if they wait, in processes if they compute (default no)"
    choose(evaluate, "--parallel", ("no", "threads", "processes"), how)
    add(evaluate, "--video", "DIR", "write a film (mp4) of each episode into this folder")
    flag(evaluate, "--render", "show the episodes in a window")
    output(evaluate, progress=False)

    what = "write episodes that a policy plays into a file, for `train bc --data`"
    record = subcommand(commands, "record", what, epilog=RECORD_EXAMPLES)
    add(record, "source", "RUN|ENV", "a run directory or a checkpoint in one; with --policy random an environment")
    add(record, "--episodes", "N", "how many (default 100)")
    add(record, "--steps", "N", "so many steps instead; the last episodes are truncated there")
    add(record, "--out", "PATH", "a new file, of Minari a folder such as mine-v0 (default in data/)")
    flag(record, "--sampled", "sample actions as in training, instead of the best ones")
    add(record, "--policy", "random", "act at random instead of by a run's policy")
    choose(record, "--format", ("parquet", "minari"), "one Parquet file, which RLlib reads too (default), or Minari")
    choose(record, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    add(record, "--seed", "S", "play the same episodes each time")
    assignments(record, "env_args.K=V", "keyword arguments for the environment, laid over those of the run")
    choose(record, "--parallel", ("no", "threads", "processes"), how)
    output(record, progress=False)

    runs = subcommand(commands, "runs", "list runs with their status, steps, return and age, the newest first")
    add(runs, "folder", "DIR", "where to look, three folders deep (default runs)", nargs="?")
    output(runs, progress=False)

    show = subcommand(commands, "show", "tell what is in a run or a checkpoint, and where resume would go on")
    add(show, "run", "RUN", "a run directory, or a checkpoint in one")
    flag(show, "--verify", "read every byte of its checkpoints and compare; 1 if torn")
    output(show, progress=False)

    what = "draw learning curves with bands over seeds, scores, and time to target, into a file"
    plot = subcommand(commands, "plot", what, epilog=PLOT_EXAMPLES)
    several = "run directories or URLs, or folders with runs; those that differ in the seed alone are one curve"
    add(plot, "runs", "RUN", several, nargs="+")
    plot.add_argument("-o", "--out", metavar="FILE", required=True, help="FILE.png, .svg, .pdf, or a page: .html")
    add(plot, "--metric", "NAME", "of metrics.jsonl (default charts/episodic_return)")
    choose(plot, "--over", ("steps", "time"), "what it is drawn over (default steps)")
    add(plot, "--target", "R", "draw it, and the time to it (default that of the runs)")
    output(plot, progress=False)

    report = subcommand(commands, "report", "write one page on a run, or several, to send to a colleague")
    add(report, "runs", "RUN", "run directories or URLs, or folders with runs", nargs="+")
    report.add_argument("-o", "--out", metavar="FILE", help="the page (default report.html in the run's directory)")
    output(report, progress=False)

    table = subcommand(commands, "export-metrics", "write all metrics of a run as a table")
    add(table, "run", "RUN", "a run directory or URL, or the folder of several seeds")
    flag(table, "--csv", "as CSV (the default)")
    table.add_argument("-o", "--out", metavar="FILE", help="into this file (default stdout)")
    output(table, progress=False)

    what = "check this machine, an environment, an algorithm or a run, and explain what is wrong"
    doctor = subcommand(commands, "doctor", what, epilog=DOCTOR_EXAMPLES)
    add(doctor, "env", "ENV|ALGO|RUN", "an id or module:factory, an algorithm, or a run directory", nargs="?")
    add(doctor, "on", "ENV", "of ALGO: what to try it on (default a tiny one)", nargs="?")
    assignments(doctor, "env_args.K=V", "keyword arguments for ENV; of ALGO any setting")
    add(doctor, "--steps", "N", "steps to try ENV for (default 10,000, or 4 seconds)")
    again = doctor.add_argument_group("see a fault of RUN again, in this process")
    add(again, "--replay", "N", "recorded fault N of the run (default the last)", nargs="?", const="")
    flag(again, "--debugger", "stop in pdb where it breaks; a terminal does so anyway")
    flag(again, "--before", "stop in pdb right before the step that broke")
    add(again, "--seconds", "S", "show the stack and end if it hangs this long (default 30)")
    output(doctor, progress=False)

    watch = subcommand(commands, "watch", "serve a page that shows runs, live", epilog=WATCH_EXAMPLES)
    add(watch, "sources", "RUN|DIR|URL", "runs, or folders of runs (default runs)", nargs="*")
    add(watch, "--port", "N", "of this machine, for this user alone (default the first that is free from 8420 on)")
    flag(watch, "--no-browser", "print the link and do not open it")
    output(watch, progress=False)

    explain = subcommand(commands, "explain", "tell what a setting or an algorithm is, and what RLlib calls each")
    add(explain, "topic", "ALGO|SETTING|rllib", "ppo, a setting such as sampling.fragment, or rllib for the table")
    output(explain, progress=False)

    sim = subcommand(commands, "sim", "begin a simulator in C++, or hold one against the protocol", epilog=SIM_EXAMPLES)
    add(sim, "action", "new|check|keys", "what to do")
    add(sim, "target", "DIR|COMMAND", "the folder to write, or the command that starts the simulator")
    output(sim, progress=False)

    take = subcommand(commands, "import", "take over a checkpoint that RLlib made without us", epilog=IMPORT_EXAMPLES)
    add(take, "what", "rllib", "what made it")
    add(take, "folder", "DIR", "the directory that Algorithm.save_to_path wrote")
    add(take, "--env", "ENV", "the environment, where the checkpoint names one that only its script knows")
    add(take, "--out", "DIR", "a new run directory (default runs/ALGO-ENV-...)")
    flag(take, "--trust", "load it: it holds pickles, which can run any code, so do this for your own alone")
    output(take, progress=False)

    _deployment(commands)
    tune = subcommand(commands, "tune", "search for settings, on Ray Tune", epilog=TUNE_EXAMPLES)
    add(tune, "algo", "ALGO", "ppo, dqn, impala, a3c, or your own module:Class", nargs="?")
    add(tune, "env", "ENV", "a gymnasium id, module:factory, or a simulator: ./my_sim", nargs="?")
    search = "what is searched: uniform(LOW,HIGH), log, int, logint or choice(A,B,...), or a YAML file of these"
    add(tune, "--search", "a.b=log(x,y)", search, nargs="+", action="extend", default=[])
    add(tune, "--trials", "N", "settings to try (default 20; with pbt the population, 8)")
    schedulers = "asha (the default), optuna, pbt, random or grid: who chooses settings, and stops bad ones"
    add(tune, "--scheduler", "NAME", schedulers)
    objective = "return, or steps or seconds to the target (default steps if there is a target)"
    add(tune, "--objective", "NAME", objective)
    add(tune, "--seeds", "N", "seeds of each trial, whose median counts (default 3), or those named: 11,12,13")
    add(tune, "--steps", "N", "environment steps of each run at most (default 200,000)")
    add(tune, "--target", "R", "a run ends once 20 greedy episodes return R on average")
    add(tune, "--seed", "S", "of the drawing of settings, and the first seed of each trial (default 0)")
    how_many(tune)
    add(tune, "--out", "DIR", "a new directory for the search (default runs/ALGO-ENV-tune...)")
    add(tune, "--resume", "DIR", "go on with the search in DIR, after whatever ended it")
    any_setting(tune)
    where = tune.add_argument_group("where it runs")
    add(where, "--cpus", "C", "CPUs that a trial asks for, may be a fraction (default 1): cores / C run at a time")
    add(where, "--gpus", "G", "GPUs that a trial asks for (default 0, or 1 with learner.device=cuda)")
    add(where, "--address", "HOST:PORT", "a running Ray cluster, or auto (default: one is started for the search)")
    add(where, "--runtime", "NAME", "of each run: inline (the default) or process")
    add(where, "--topology", "NAME", "of each run, as in train")
    output(tune, progress=False)
    flag(tune, "--quiet", "print the directory, and no progress")

    what = "run a command as a job of a Ray cluster, and follow it; Ctrl-C detaches"
    submit = subcommand(commands, "submit", what, epilog=SUBMIT_EXAMPLES)
    command = "train, resume, eval, ... and its arguments, as here"
    add(submit, "words", "COMMAND ...", command, nargs=argparse.REMAINDER)
    cluster_address(submit)
    add(submit, "--runs", "URL|DIR", "where runs are kept: a URL such as s3://bucket/runs, or a folder all nodes see")
    add(submit, "--id", "NAME", "the run's id, and so the job's (default: follows from the command)")
    add(submit, "--env", "NAME", "send this variable along, as often as you like", action="append", default=[])
    add(submit, "--working-dir", "DIR", "send this folder (default: those that your modules are in)")
    add(submit, "--python", "PROGRAM", "the Python of the cluster's nodes (default python)", default="python")
    add(submit, "--cpus", "C", "CPUs that the driver asks for, on any node (default none, on the head)")
    add(submit, "--gpus", "G", "GPUs that the driver asks for, on any node")
    add(submit, "--grace", "S", "seconds for the last checkpoint after a stop (default 300)")
    flag(submit, "--detach", "do not follow it")
    output(submit, progress=False)

    jobs = subcommand(commands, "jobs", "list, follow, stop and await the jobs of a Ray cluster", epilog=JOBS_EXAMPLES)
    add(jobs, "action", "list|logs|stop|status|wait", "what to do (default list)", nargs="?", default="list")
    add(jobs, "id", "ID", "the id of a run", nargs="?")
    cluster_address(jobs)
    flag(jobs, "--follow", "of logs: go on until the job has ended; Ctrl-C detaches")
    add(jobs, "--timeout", "S", "of wait: fail after so many seconds")
    output(jobs, progress=False)

    serve = subcommand(commands, "serve", "answer requests with a trained policy, over HTTP", epilog=SERVE_EXAMPLES)
    add(serve, "run", "RUN", "a run directory, a URL, or a checkpoint")
    flag(serve, "--local", "from this process, without Ray")
    add(serve, "--host", "ADDRESS", "where to listen (default 127.0.0.1); beyond this machine only with your own token")
    add(serve, "--port", "N", "where to listen (default 8000), 0 for any that is free")
    add(serve, "--token", "T", "what clients have to send (default $RAYNFORCE_SERVE_TOKEN, or a new one)")
    choose(serve, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    flag(serve, "--sample", "sample actions as in training, instead of the best ones")
    add(serve, "--seed", "S", "of what is sampled, and of the canary's share")
    flag(serve, "--follow", "take each new checkpoint of the run; SIGHUP and POST /reload do so once")
    canary = "let the policy of another run answer this share of the requests"
    serve.add_argument("--canary", metavar=("SHARE", "RUN"), nargs=2, help=canary)
    add(serve, "--replicas", "N", "processes that answer, on Ray (default 1)")
    add(serve, "--rate", "R", "requests each second, at most; more get 429 (default no limit)")
    names = "a name that clients know this server by, as often as you like"
    add(serve, "--allow-host", "NAME", names, action="append", default=[])
    add(serve, "--address", "HOST:PORT", "a running Ray cluster, or auto (default a Ray of its own)")
    output(serve, progress=False)

    what = "write the files of a cluster, check such a file, or ask a cluster how it is"
    cluster = subcommand(commands, "cluster", what, epilog=CLUSTER_EXAMPLES)
    add(cluster, "action", "init|check|status", "what to do")
    target = "of init: aws, gcp, azure, aliyun, kubernetes, slurm or ssh; of check: the file"
    add(cluster, "target", "TARGET|FILE", target, nargs="?")
    add(cluster, "folder", "DIR", "of init: a new folder for the files (default cluster-TARGET)", nargs="?")
    _cluster_options(cluster.add_argument_group("what init writes"))
    add(cluster, "--crds", "DIR", "of check: KubeRay's CRDs to hold its files against (or RAYNFORCE_KUBERAY)")
    add(cluster, "--address", "HOST:PORT", "of status: the cluster's head (default the one of this machine)")
    output(cluster, progress=False)
    return parser


def _deployment(commands: argparse._SubParsersAction[Parser]) -> None:
    what = "write a policy as a folder that acts without Raynforce, and verify it"
    export = subcommand(commands, "export", what, epilog=EXPORT_EXAMPLES)
    add(export, "run", "RUN", "a run directory, a checkpoint in one, or a registry")
    add(export, "folder", "DIR", "a new folder")
    add(export, "--to", "FORMAT", "onnx, numpy, torchscript or cpp", required=True)
    choose(export, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    output(export, progress=False)

    what = "train, evaluate, promote if better, export: each step once, whatever ends it"
    pipeline = subcommand(commands, "pipeline", what, epilog=PIPELINE_EXAMPLES)
    add(pipeline, "file", "FILE", "steps and what they need, as YAML; or the same as JSON text")
    add(pipeline, "--from", "STEP", "run this step again, and all that depend on it")
    flag(pipeline, "--dry-run", "tell what is done and what would run, and change nothing")
    add(pipeline, "--dir", "DIR|URL", "where its state and runs are kept (default pipelines/NAME)")
    flag(pipeline, "--json", "print one JSON object as the last line of stdout")
    flag(pipeline, "--quiet", "print no progress")
    flag(pipeline, "--debug", "show tracebacks")

    what = "make a policy the one that is served, if it is better than that one; 1 if not"
    promote = subcommand(commands, "promote", what, epilog=PROMOTE_EXAMPLES)
    add(promote, "run", "RUN", "a run directory, or a checkpoint in one")
    add(promote, "--to", "REGISTRY", "a directory or URL with the promoted policies", required=True)
    add(promote, "--name", "NAME", "of the entry (default the run's)")
    add(promote, "--episodes", "N", "that each of both plays (default 100)")
    add(promote, "--level", "P", "chance of promoting one that is not better (default 0.05)")
    add(promote, "--seed", "S", "play the same episodes each time")
    choose(promote, "--checkpoint", ("best", "last"), "which checkpoint (default best)")
    flag(promote, "--force", "promote it without playing")
    output(promote, progress=False)

    rollback = subcommand(commands, "rollback", "serve the policy again that was served before")
    add(rollback, "registry", "REGISTRY", "a directory or URL with the promoted policies")
    add(rollback, "--to", "ENTRY", "which one, by name or number (default the one before)")
    output(rollback, progress=False)

    registry = subcommand(commands, "registry", "list the policies that were promoted: who beat whom, by how much")
    add(registry, "registry", "REGISTRY", "a directory or URL with the promoted policies")
    output(registry, progress=False)


def _cluster_options(group: argparse._ActionsContainer) -> None:
    add(group, "--name", "NAME", "of the cluster (default raynforce)")
    add(group, "--storage", "WHERE", "of runs: s3://bucket/runs, gs://, az://, oss://, a shared folder, or pvc:CLAIM")
    add(group, "--min-workers", "N", "workers that are always there (default 0)")
    add(group, "--max-workers", "N", "workers that may be there at once (default 4)")
    add(group, "--instance", "TYPE", "of workers, and of the head unless it is given")
    add(group, "--head-instance", "TYPE", "of the head, with the driver and the learner")
    add(group, "--cpus", "N", "CPUs of each node; clouds know it by the instance")
    add(group, "--gpus", "N", "GPUs of the head, for the learner (default 0)")
    add(group, "--image", "NAME", "container image (default Ray's own, of this version)")
    add(group, "--machine-image", "ID", "image of the machines below")
    add(group, "--region", "NAME", "of the cloud")
    add(group, "--project", "ID", "of gcp")
    flag(group, "--on-demand", "workers that are not taken away, instead of spot")
    add(group, "--hosts", "A,B,C", "of ssh: addresses, the head first")
    add(group, "--user", "NAME", "of ssh (default ubuntu)")
    add(group, "--ssh-key", "FILE", "of ssh (default ~/.ssh/id_ed25519)")
    add(group, "--python", "PATH", "of ssh and slurm: a Python with Raynforce's dependencies on the nodes")
