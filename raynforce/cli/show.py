"""`raynforce show RUN`: what is in a run, or in one checkpoint, and where resume would go on."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raynforce import settings
from raynforce.cli.text import DIM, GREEN, RED, STATES, Page, age, count, paint, plain, size, times
from raynforce.errors import RaynforceError, UsageError
from raynforce.imports import is_given
from raynforce.runs import catalog
from raynforce.runs.catalog import KeptCheckpoint, bytes_in, checkpoints_of, glance, look_at
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import each_event, summarise
from raynforce.runs.mirrored import open_run
from raynforce.runs.progress import clock_time, number
from raynforce.runs.store import is_url
from raynforce.runs.terminal import TIED

LABEL = 12  # columns
FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "tensorboard", "faults", "checkpoints")
VERSIONS = {"raynforce": "raynforce", "torch": "torch", "numpy": "numpy", "python": "Python"}


def tell(text: str, *, me: str = "raynforce", verify: bool = False, as_json: bool = False) -> int:
    """Print it; `me` is how this command was called. With `verify`, 1 if a checkpoint is not what was written."""
    path = Path(text)
    if (path / "manifest.json").exists() and not (path / "config.yaml").exists():
        found: KeptCheckpoint | _Run = look_at(path, verify=verify)
    elif not is_url(text) and not path.exists() and (Path("runs") / path).is_dir():
        raise UsageError(f"there is no run at {path} (did you mean {Path('runs') / path}?)")
    else:
        found = _Run(open_run(text), me, verify)
    if as_json:
        print(json.dumps(found.to_json()))
    elif isinstance(found, KeptCheckpoint):
        _checkpoint(found, me, verify, Page(LABEL))
    else:
        found.show(Page(LABEL))
    kept = [found] if isinstance(found, KeptCheckpoint) else found.kept
    return 1 if verify and any(one.wrong for one in kept) else 0


def _policy(name: str, settings: Any) -> str:
    """`prey of prey_*, frozen`"""
    told = settings if isinstance(settings, Mapping) else {}
    agents = told.get("agents") or []
    frozen = ", frozen" * bool(told.get("frozen"))
    return f"{name} of {', '.join(map(str, agents))}{frozen}" if agents else f"{name}{frozen}"


@dataclass(frozen=True)
class Next:
    step: int | None  # where it goes on; None if it would be refused
    sentence: str
    command: str = ""


class _Run:
    """All that is told of a run."""

    def __init__(self, run: RunDirectory, me: str, verify: bool) -> None:
        self.run, self.me, self.verify = run, me, verify
        self.config: Mapping[str, Any] = {}
        with contextlib.suppress(RaynforceError):  # its glance says so
            self.config = settings.read_yaml(str(run.config))
        self.history, self.glance = summarise(each_event(run.events)), glance(run.path)
        if self.glance.holder is None and (holder := run.holder()) is not None:  # of a run at a URL, on another machine
            self.glance = replace(self.glance, state="running", reason="", holder=holder)
        self.kept = checkpoints_of(run.path, verify=verify)
        known = {found.path: found for found in self.kept}
        # What resume tries, in its order.
        self.candidates = [known.get(path) or look_at(path, verify=verify) for path in run.candidates()]
        self.segments = {name: size for kept in self.kept for name, size in kept.segments.items()}
        self.files: dict[str, int] = {}
        for path in (run.path / name for name in FILES):
            if path.is_dir():
                self.files[f"{path.name}/"] = bytes_in(path)
            elif path.is_file():
                self.files[path.name] = path.stat().st_size
        self.versions = next((kept.versions for kept in self.kept if kept.versions), {})  # of the newest
        self.start_from = str(self.config["start_from"]) if self.config.get("start_from") else None
        self.seconds = catalog.number(self.glance.metrics.get("time"))  # of training, in all of its processes

    @property
    def next(self) -> Next:
        run, command = self.glance, f"{self.me} resume {shlex.quote(self.run.shown)}"
        if run.state == "running":
            return Next(None, "it is running: resume would be refused")
        if run.state == "broken":
            return Next(None, "resume would be refused as well")
        if not self.candidates:
            return Next(0, "resume begins at step 0: there is no checkpoint", command)
        usable = next((kept for kept in self.candidates if kept.resumable), None)
        if usable is None:
            sentence = "no checkpoint is whole; resume takes what can be read, or says what is wrong"
            return Next(None, sentence, command)
        torn = self.candidates.index(usable)
        why = f", because {torn} newer {'one is' if torn == 1 else 'ones are'} torn" if torn else ""
        if run.state == "finished" and run.total is not None and usable.step >= run.total:
            command += f" --steps {2 * usable.step}"
        elif run.state == "finished" and run.reason == "target met":
            command += " --target none"
        for name in ("env", "algo"):  # what was defined in a script cannot be found from here
            if is_given(str(run.config.get(name))):
                command += f" --set {name}=MODULE:NAME"
        return Next(usable.step, f"resume goes on at step {usable.step:,}{why}", command)

    def to_json(self) -> dict[str, Any]:
        history = self.history
        return {
            **self.glance.to_json(),
            "run": self.run.shown,
            **{name: getattr(self, name) for name in ("start_from", "seconds", "files", "versions")},
            "began": catalog.number(history.began),
            "starts": history.starts,
            "faults": history.faults,
            "checkpoints": [kept.to_json() for kept in self.kept],
            "verified": self.verify,
            "segments": len(self.segments),
            "segment_bytes": sum(self.segments.values()),
            "next": asdict(self.next),
        }

    def show(self, page: Page) -> None:
        run, config = self.glance, self.config
        what = " on ".join(plain(str(config[k])) for k in ("algo", "env") if k in config)
        page.title(self.run.shown, f"{what}, seed {plain(str(config.get('seed', 0)))}" if what else "")
        if isinstance(policies := config.get("policies"), Mapping) and policies:
            page.row("policies", "; ".join(plain(_policy(name, of)) for name, of in policies.items()))
        page.row("status", self._status(), STATES[run.state])
        page.row("runs on", ", ".join(self._where()))
        page.row("steps", self._steps())
        page.row("return", self._returns())
        page.row("time", self._time())
        doctor = f"{self.me} doctor {shlex.quote(self.run.shown)}"
        page.row("faults", f"{self.history.faults:,}; `{doctor}` tells more" if self.history.faults else "none")
        if self.start_from:
            page.row("began from", plain(self.start_from))
        page.row("next", self.next.sentence)
        if self.next.command:
            page.command("", self.next.command)
        page.lines("")
        self._checkpoints(page)
        files = [f"{name} {size(found)}".replace(" ", TIED) for name, found in self.files.items()]
        page.lines("")
        page.row("files", f"{', '.join(files)}; {size(run.size).replace(' ', TIED)} in all")
        if self.versions:
            page.row("written by", _written_by(self.versions))

    def _status(self) -> str:
        run = self.glance
        ago = age(time.time() - run.active)
        if run.state == "running":
            holder = run.holder
            who = f" on {holder.host}, process {holder.pid}" if holder is not None and holder.pid else ""
            return f"running{who}; last wrote {ago}"
        words = {"killed": "it left no word of its end", "steps done": "all steps are done", "SIGINT": "Ctrl-C"}
        why = words.get(run.reason or run.state, plain(run.reason))
        return f"{run.state} {ago}: {why}" if why else f"{run.state} {ago}"

    def _where(self) -> list[str]:
        config, found = self.config, [plain(str(self.config.get(name, "?"))) for name in ("runtime", "topology")]
        if (engine := str(config.get("engine", "native"))) != "native":
            found[0] = f"{plain(engine)} on {found[0]}"
        sampling = config.get("sampling")
        if isinstance(sampling, dict):
            counts = (("sampler", sampling.get("samplers")), ("environment", sampling.get("envs")))
            found += [count(n, what) for what, n in counts if isinstance(n, int)]
            found[-1] += " in each" if sampling.get("samplers") != 1 else ""
        replay = config.get("replay")
        shards = replay.get("shards") if isinstance(replay, dict) else None
        if isinstance(shards, int) and shards:
            found.append(count(shards, "replay shard"))
        return found

    def _steps(self) -> str:
        run, total = self.glance, self.glance.total
        text = f"{run.steps:,}" + (f" of {total:,} ({min(1.0, run.steps / max(total, 1)):.0%})" if total else "")
        speed = run.metrics.get("charts/SPS")
        if run.state == "running" and total and isinstance(speed, int | float) and speed > 0:
            text += f", {speed:,.0f} a second, about {clock_time(max(0, total - run.steps) / speed)} to go"
        return text

    def _returns(self) -> str:
        run = self.glance
        parts = [] if run.return_mean is None else [f"{number(run.return_mean)} over the last 100 episodes"]
        if run.best_eval is not None:
            at = next((f" at step {kept.step:,}" for kept in self.kept if "best" in kept.marks), "")
            parts.append(f"best evaluation {number(run.best_eval)}{at}")
        target = run.config.get("target")
        parts += [f"target {target:g}"] if isinstance(target, int | float) else []
        return "; ".join(parts) or "nothing reported yet"

    def _time(self) -> str:
        history, parts = self.history, []
        if self.seconds is not None:
            parts.append(f"{clock_time(self.seconds)} of training")
        with contextlib.suppress(ValueError, OverflowError, OSError):  # no time that a calendar has
            if history.began is not None:
                parts.append(f"began {time.strftime('%Y-%m-%d %H:%M', time.localtime(history.began))}")
        if history.starts > 1:
            parts.append(f"resumed {times(history.starts - 1)}")
        return ", ".join(parts) or "not known"

    def _checkpoints(self, page: Page) -> None:
        if not self.kept:
            return page.row("checkpoints", "none")
        rows = [("checkpoints", "step", "number", "written", "size", "files")]
        for kept in self.kept:
            step = f"{kept.step:,}" if kept.manifest else kept.path.name
            which, bytes_of = "–" if kept.number is None else f"{kept.number:,}", size(sum(kept.files.values()))
            when, files = age(time.time() - kept.time), _files(kept, self.verify)
            rows.append((" ".join(kept.marks), step, which, when, bytes_of, files))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row, kept_here in zip(rows, [None, *self.kept], strict=True):
            cells = [row[1].rjust(wide[1]), row[2].rjust(wide[2]), row[3].ljust(wide[3]), row[4].rjust(wide[4])]
            files = paint(row[5], RED if kept_here.wrong else GREEN) if kept_here else row[5]
            line = "  ".join([*cells, files])
            page.lines(row[0].ljust(LABEL) + (line if kept_here else paint(line, DIM)))
        if self.segments:
            shared = f"{count(len(self.segments), 'segment')} that they share"
            page.row("replay", f"{shared}, {size(sum(self.segments.values()))}")
        return None


def _files(kept: KeptCheckpoint, verify: bool) -> str:
    if kept.wrong:
        more = f", and {len(kept.wrong) - 1} more" if len(kept.wrong) > 1 else ""
        return f"torn: {plain(kept.wrong[0])}{more}"
    policy = "the policy alone, " if set(kept.parts) == {"policy"} else ""
    shared = f"{count(len(kept.segments), 'segment')}, " if kept.segments else ""
    return f"{policy}{shared}{'verified' if verify else 'all there'}"


def _checkpoint(kept: KeptCheckpoint, me: str, verify: bool, page: Page) -> None:
    leads = f"→{TIED}{os.path.relpath(os.path.realpath(kept.path))}" if kept.path.is_symlink() else ""
    page.title(str(kept.path), leads)
    if kept.manifest:
        which = "" if kept.number is None else f", number {kept.number:,} of its run"
        page.row("step", f"{kept.step:,}{which}, written {age(time.time() - kept.time)}")
        score = kept.manifest.get("eval_return")
        if isinstance(score, int | float):
            page.row("evaluation", number(score))
        page.row("format", str(kept.manifest.get("format_version")))
    page.row("files", _files(kept, verify), RED if kept.wrong else GREEN)
    for fault in kept.wrong[1:]:
        page.row("", plain(fault), RED)
    for index, (name, bytes_of) in enumerate(kept.parts.items()):
        page.lines(f"{('' if index else 'parts').ljust(LABEL)}{plain(name).ljust(LABEL)}{size(bytes_of).rjust(7)}")
    if kept.segments:
        page.row("replay", f"{count(len(kept.segments), 'segment')}, {size(sum(kept.segments.values()))}")
    if kept.versions:
        page.row("written by", _written_by(kept.versions))
    if "policy" in kept.parts and not kept.wrong:
        page.command("next", f"{me} eval {shlex.quote(str(kept.path))}")


def _written_by(versions: Mapping[str, str]) -> str:
    names = ", ".join(f"{word} {plain(versions[key])}" for key, word in VERSIONS.items() if key in versions)
    where = [f"on {plain(versions['host'])}"] if "host" in versions else []
    where += [f"({plain(versions['cpu'])})"] if "cpu" in versions else []
    where += [f"with {plain(versions['kernels'])} kernels"] if "kernels" in versions else []
    return " ".join([names, *where]).strip()
