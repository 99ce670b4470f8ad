"""What is submitted: a command of `raynforce`, checked here, with its run's id, its code and where the run is kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raynforce import settings
from raynforce.data.files import absolute
from raynforce.errors import RaynforceError, UsageError
from raynforce.runs.directory import seeds_in
from raynforce.runs.store import Store, is_url

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
PATHS: dict[str, tuple[str, ...]] = {  # commands beside those that train, and which of their arguments are paths
    "eval": ("run", "video"),
    "show": ("run",),
    "runs": ("folder",),
    "doctor": (),
    "plot": ("runs", "out"),
    "report": ("runs", "out"),
    "export-metrics": ("run", "out"),
    "export": ("run", "folder"),
    "promote": ("run", "to"),
}
WORKS = ("train", "resume", "tune", "pipeline", *PATHS)
INSTEAD = {  # what cannot be a job, and what does it
    "record": "episodes are recorded here: raynforce record s3://bucket/runs/mine",
    "serve": "a server on a cluster is: raynforce serve RUN --address HOST:PORT",
    "watch": "runs of a cluster are shown by: raynforce watch URL",
}


@dataclass(frozen=True)
class Command:
    """A command that is ready to be submitted."""

    id: str
    words: Sequence[str]
    names: Sequence[str]  # `module:name`s whose code has to be there
    run: str | None = None  # where the run is kept
    digest: str = ""  # equal for equal commands
    note: str = ""

    @property
    def kind(self) -> str:
        return self.words[0]

    def entrypoint(self, python: str) -> str:
        return f"exec {shlex.quote(python)} -m raynforce {shlex.join(self.words)}"


def command(words: Sequence[str], runs: str | None = None, id: str | None = None) -> Command:
    """Check the words of a command line, and make of them what gives the same run however often it is submitted."""
    from raynforce.cli.parser import parse

    words = [word for word in words if word != "--json"]  # which every job gets
    for word in (runs or "", *words):
        if re.search(r"://[^/@\s]*:[^/@\s]*@", word):
            problem = f"{re.sub(r'://[^/@]*@', '://…@', word)} holds a password, which all who see the job could read"
            raise UsageError(f"{problem}: leave it out and send a variable along with --env NAME")
    arguments = parse(words)
    if id is not None and not ID.fullmatch(id):
        raise UsageError(f"--id {id!r} is no name of a run: use letters, digits, and . _ - between them")
    if arguments.command == "train":
        return _train(words, arguments, runs, id)
    if arguments.command == "pipeline":
        return _pipeline(arguments, runs, id)
    if arguments.command == "tune":
        return _tune(words, arguments, runs, id)
    if arguments.command not in WORKS:
        instead = INSTEAD.get(arguments.command, f"a job is one of {', '.join(WORKS)}")
        raise UsageError(f"{arguments.command or 'nothing'!r} cannot be submitted: {instead}")
    if runs is not None:
        raise UsageError(f"--runs is for train, tune and pipeline: {arguments.command} names its run itself; drop it")
    if arguments.command == "resume":
        return _resume(words, arguments, id)
    where = getattr(arguments, "run", None)
    names, note = _names_of(where) if where else ([], "")
    names = [*names, *(name for name in (getattr(arguments, "env", None),) if name)]
    words = _with_absolute(words, [getattr(arguments, name) for name in PATHS[arguments.command]])
    last = [re.sub(r"[^A-Za-z0-9_.-]", "_", _last_part(where))] if where else []
    made = "-".join([arguments.command, *last, time.strftime("%Y%m%d-%H%M%S")])
    return Command(id or made, [*words, "--json"], names, None, _digest(words), note)


def _train(words: Sequence[str], arguments: Namespace, runs: str | None, id: str | None) -> Command:
    from raynforce.api import fresh_name
    from raynforce.cli.commands import experiment

    if arguments.print_config:
        raise UsageError("--print-config prints and trains nothing: run it here, without submit")
    config, _ = experiment(arguments)
    if arguments.out is not None:
        if runs is not None or id is not None:
            raise UsageError(f"--out {arguments.out} says where the run is kept: drop {'--runs' if runs else '--id'}")
        runs, _, id = _absolute(arguments.out).rstrip("/").rpartition("/")
        if not ID.fullmatch(id):
            raise UsageError(f"--out {arguments.out!r} ends in {id!r}, which is no name of a run")
    if runs is None:
        where = "such as --runs s3://bucket/runs, or a folder that all nodes see"
        raise UsageError(f"a job's run has to outlive its cluster: say where runs are kept, {where}")
    runs = _absolute(runs).rstrip("/")
    words = [word for word in _with_config(words, arguments.config) if word != "--resume"]
    digest = _digest([runs, *words])
    if id is None:  # the same for the same command
        stem = re.sub(r"-\d{8}-\d{6}$", "", fresh_name(config, _span(arguments.seeds, config.seed)).name)
        id = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', stem).strip('._-')[:80]}-{digest[:8]}"
    run = f"{runs}/{id}"
    if config.start_from is not None:
        words = [_absolute(word) if word == arguments.__dict__["from"] else word for word in words]
    if arguments.data is not None:
        words = [absolute(word) if word == arguments.data else word for word in words]
    names = [config.env, config.algo, config.network.factory or ""]
    return Command(id, [*words, "--out", run, "--resume", "--json"], names, run, digest)


def _span(seeds: str | None, first: int) -> str:
    """What the name of a folder with several seeds says of them."""
    from raynforce.seeds import numbers

    found = numbers(seeds, first) if seeds is not None else []
    return f"s{min(found)}-{max(found)}" if found else ""


def _tune(words: Sequence[str], arguments: Namespace, runs: str | None, id: str | None) -> Command:
    """Its directory is one that all nodes see: each trial writes there, wherever it runs."""
    from raynforce.cli.tune import preview

    if arguments.resume is not None:
        if runs is not None:
            raise UsageError(f"--resume {arguments.resume} says where the search is kept: drop --runs")
        where = _absolute(arguments.resume).rstrip("/")
        if id not in (None, _last_part(where)):
            raise UsageError(f"--id {id!r}: the search's own name is its id, {_last_part(where)!r}; drop --id")
        plain = [where if word == arguments.resume else word for word in words]
        file = settings.read_yaml(f"{where}/base.yaml") if Path(where, "base.yaml").is_file() else {}
        names = [str(file[key]) for key in ("env", "algo") if file.get(key)]
        return Command(_last_part(where), [*plain, "--json"], names, where, _digest(plain))
    if arguments.address is not None:
        raise UsageError("--address after tune names a cluster, and a job is on one already: drop it")
    if arguments.out is not None:
        if runs is not None or id is not None:
            raise UsageError(
                f"--out {arguments.out} says where the search is kept: drop {'--runs' if runs else '--id'}"
            )
        runs, _, id = _absolute(arguments.out).rstrip("/").rpartition("/")
    if runs is None:
        raise UsageError(
            "a search has to outlive its cluster: say where it is kept, --runs DIR, a folder all nodes see"
        )
    if is_url(runs):
        raise UsageError(f"--runs {runs}: a search is kept in a folder that all nodes see (NFS, a PVC), not at a URL")
    runs = _absolute(runs).rstrip("/")
    config, searched = preview(arguments)
    words = _with_config(words, arguments.config)
    words = [given for word in words for given in searched.get(word, [word])]  # files of ranges travel in the command
    digest = _digest([runs, *words])
    if id is None:
        algo, env = (re.sub(r"[^A-Za-z0-9_.-]", "_", name).strip("._-")[:40] for name in (config.algo, config.env))
        id = f"{algo}-{env}-tune{config.seed}-{digest[:8]}"
    if not ID.fullmatch(id):
        raise UsageError(f"{id!r} is no name of a search: use letters, digits, and . _ - between them")
    where = f"{runs}/{id}"
    names = [config.env, config.algo, config.network.factory or ""]
    return Command(id, [*words, "--out", where, "--resume", where, "--json"], names, where, digest)


def _with_config(words: Sequence[str], file: str | None) -> list[str]:
    """The words without a place, and with a file's settings: they travel in the command."""
    found = settings.dotted(settings.read_yaml(file)) if file else {}
    left = _without(words, "--out", "--config")
    given = [item for key, value in found.items() for item in ("--set", f"{key}={json.dumps(value)}")]
    return [*left[:1], *given, *left[1:]]


def _with_absolute(words: Sequence[str], given: Sequence[Any]) -> list[str]:
    """The words with paths that mean the same on another machine."""
    paths = {path for value in given for path in ([value] if isinstance(value, str) else value or [])}
    found = {path: _absolute(path) for path in paths}
    found |= {
        f"{option}={path}": f"{option}={found[path]}" for path in paths for option in ("--out", "--to", "--video")
    }
    return [found.get(word, word) for word in words]


def _pipeline(arguments: Namespace, runs: str | None, id: str | None) -> Command:
    """The steps travel in the command, and their state is where all nodes see it."""
    from raynforce.ops.pipeline.plan import read

    if arguments.dry_run:
        raise UsageError("--dry-run tells and runs nothing: run it here, without submit")
    if runs is not None and arguments.dir is not None:
        raise UsageError(f"--dir {arguments.dir} says where the pipeline is kept: drop --runs")
    plan = read(arguments.file, arguments.dir)
    if plan.token is not None:
        how = "drop it from the file, and send --env RAYNFORCE_SERVE_TOKEN"
        raise UsageError(f"the serving step's token would be in the command, which all who see the job read: {how}")
    kept = runs is not None or arguments.dir is not None or plan.given
    if not kept:
        where = "such as --runs s3://bucket/runs, or dir: in its file, which all nodes see"
        raise UsageError(f"a job's pipeline has to outlive its cluster: say where it is kept, {where}")
    made = plan.to_json()
    stem = f"pipeline-{re.sub(r'[^A-Za-z0-9_.-]', '_', plan.name)}"[:80]
    if runs is not None:
        made["dir"] = f"{_absolute(runs).rstrip('/')}/{id or stem}"
    again = ["--from", arguments.__dict__["from"]] if arguments.__dict__["from"] is not None else []
    if again:
        plan.step(again[1])
    words = ["pipeline", json.dumps(made), *again]
    digest = _digest(words)
    return Command(id or f"{stem}-{digest[:8]}", [*words, "--json"], plan.names(), made["dir"], digest)


def _resume(words: Sequence[str], arguments: Namespace, id: str | None) -> Command:
    run = _absolute(arguments.run).rstrip("/")
    named = _last_part(run)
    if id not in (None, named):
        raise UsageError(f"--id {id!r}: the run's own name is its id, and that is {named!r}; drop --id")
    if not ID.fullmatch(named):
        raise UsageError(f"{arguments.run!r} ends in {named!r}, which is no name of a run")
    names, note = _names_of(run)
    words = [run if word == arguments.run else word for word in words]
    return Command(named, [*words, "--json"], names, run, _digest(words), note)


def _names_of(run: str) -> tuple[list[str], str]:
    """What a run's config says of the user's code, and what to tell if that cannot be read from here."""
    try:
        if is_url(run):
            import yaml

            found: Any = yaml.safe_load(Store.open(run).read("config.yaml"))
        else:
            places = [Path(run), *seeds_in(run)]
            at = next((place for place in places if (place / "config.yaml").is_file()), places[0])
            found = settings.read_yaml(str(at / "config.yaml"))
        factory = (found.get("network") or {}).get("factory")
        return [str(name) for name in (found.get("env"), found.get("algo"), factory) if name], ""
    except (RaynforceError, ValueError, AttributeError) as error:
        return [], f"the run's config cannot be read from here, so no code is sent along ({error})"


def _without(words: Sequence[str], *options: str) -> list[str]:
    """The words but for these options and their values."""
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            left.append(word)
    return left


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def _last_part(run: str) -> str:
    return run.rstrip("/").rpartition("/")[2]


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(words)).encode()).hexdigest()
