"""`raynforce explain`: what a setting means, what an algorithm has, and what RLlib calls it."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import fields

from raynforce import settings
from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.config import Config, PolicyConfig
from raynforce.errors import UsageError, nearest


def tell(topic: str, *, width: int, as_json: bool) -> int:
    """Print the table of RLlib's names, an algorithm and its settings, or the sentences of one setting."""
    if topic == "rllib":
        _rllib(width, as_json)
        return 0
    if topic in BUILT_IN:
        _algorithm(topic, width, as_json)
        return 0
    found = _sentences(topic)
    if as_json:
        print(json.dumps({"setting": topic, "meaning": found}))
        return 0
    for who, sentence in found.items():
        text = " ".join(sentence.split())
        print(*textwrap.wrap(f"{topic}{who and f' ({who})'}: {text}", width, subsequent_indent="  "), sep="\n")
    return 0


def page(algo: str) -> str:
    """Where the repository has a built-in algorithm's equations, results and common failures."""
    return f"docs/algorithms/{algo}.md"


def _algorithm(algo: str, width: int, as_json: bool) -> None:
    """Its settings with their defaults and meaning; presets are not among them, as no environment is named."""
    kind = algorithm_class(algo)
    own: type = kind.Settings
    given, meaning = own(), settings.docs(own)
    defaults = {f"algorithm.{f.name}": getattr(given, f.name) for f in fields(own)} | dict(kind.defaults)
    about = inspect.cleandoc(kind.__doc__ or "")
    if as_json:
        print(json.dumps({"algorithm": algo, "meaning": about, "page": page(algo), "defaults": defaults}))
        return
    print(*textwrap.wrap(f"{algo}: {' '.join(about.split())}", width, subsequent_indent="  "), sep="\n")
    print(f"  {page(algo)} has its equations, results and common failures.\n")
    for name, value in defaults.items():
        text = " ".join((meaning.get(name.removeprefix("algorithm.")) or _sentences(name)[""]).split())
        print(*textwrap.wrap(f"{name} = {json.dumps(value)}: {text}", width, subsequent_indent="  "), sep="\n")


def _rllib(width: int, as_json: bool) -> None:
    from raynforce.engines.rllib.translation import names, table

    rows = list(table())
    if as_json:
        keys = ("setting", "rllib", "note")
        translated = [dict(zip(keys, row, strict=True)) for row in rows]
        print(json.dumps({"algorithms": dict(names()), "settings": translated}))
        return
    print("--engine rllib trains with RLlib 2.60. ALGO:")
    print(f"  {', '.join(name if name == theirs else f'{name} ({theirs})' for name, theirs in names())}\n")
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    for setting, theirs, note in rows:
        left = f"{setting:{first}}  {theirs:{second}}  "
        room = max(20, width - len(left))
        lines = textwrap.wrap(note, room) or [""]
        print((left + lines[0]).rstrip())
        for line in lines[1:]:
            print(" " * len(left) + line)
    print("\nrllib.SECTION.ARGUMENT=VALUE gives RLlib's config any argument, such as rllib.training.vf_clip_param=10.")


def _sentences(topic: str) -> dict[str, str]:
    """What a setting means; of one that algorithms have, by algorithm."""
    section, _, name = topic.rpartition(".")
    known: dict[str, None] = {}
    found: dict[str, str] = {}
    for algo in BUILT_IN:
        own: type = algorithm_class(algo).Settings
        known |= dict.fromkeys(settings.known_keys(Config, {"algorithm": own}))
        if section == "algorithm" and (sentence := settings.docs(own).get(name)):
            found[algo] = sentence
    if found:
        several = dict.fromkeys(found.values())
        return {"": next(iter(several))} if len(several) == 1 and len(found) == len(BUILT_IN) else _by_algorithm(found)
    if topic in known:
        kind: type = Config
        for part in section.split(".") if section else ():
            kind = type(getattr(kind(env="") if kind is Config else kind(), part))
        if sentence := settings.docs(kind).get(name):
            return {"": sentence}
    if topic.startswith("policies.") and (sentence := settings.docs(PolicyConfig).get(name)):
        return {"": sentence}
    if topic == "env_args.wrappers":
        from raynforce.envs.wrappers import FORM

        return {"": f"What is put around each environment, the first one innermost: {FORM} (docs/environments.md)."}
    near = nearest(topic, (*known, *BUILT_IN, "rllib"))
    raise UsageError(f"{topic!r} is no setting{near}: see raynforce train --print-config")


def _by_algorithm(found: dict[str, str]) -> dict[str, str]:
    """The same sentence once, for all that have it."""
    by_sentence: dict[str, list[str]] = {}
    for algo, sentence in found.items():
        by_sentence.setdefault(sentence, []).append(algo)
    return {", ".join(algos): sentence for sentence, algos in by_sentence.items()}
