"""Several policies in one environment: what is needed to act, and their versions, which are published together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.trees import Tree


@dataclass(frozen=True)
class Part:
    """One of the policies."""

    acting: ActingSpec
    agents: tuple[int, ...]  # those that it plays
    learns: bool = True
    opponents: bool = False  # whether older versions of itself play all of them but one


@dataclass(frozen=True)
class TeamSpec(ActingSpec):
    """What is needed to act for all agents of an environment; the fields of its base are those of the first policy."""

    parts: Mapping[str, Part] = field(default_factory=dict)

    @staticmethod
    def of(parts: Mapping[str, Part]) -> TeamSpec:
        first = next(iter(parts.values())).acting
        same = {name: getattr(first, name) for name in ActingSpec.__dataclass_fields__}
        return TeamSpec(**same, parts=parts)

    @property
    def acts_with(self) -> Literal["numpy", "torch"]:
        return "torch" if any(part.acting.acts_with == "torch" for part in self.parts.values()) else "numpy"

    def facts(self, *, weights_alone: bool = False) -> Tree:
        found: Tree = {}
        for name, part in self.parts.items():
            found |= {f"{name}/{key}": fact for key, fact in part.acting.facts(weights_alone=weights_alone).items()}
            found[f"{name}/agents"] = list(part.agents)
        return found

    def to_json(self) -> Tree:
        return {
            "policies": {
                name: {
                    "acting": part.acting.to_json(),
                    "agents": list(part.agents),
                    "learns": part.learns,
                    "opponents": part.opponents,
                }
                for name, part in self.parts.items()
            }
        }

    @staticmethod
    def of_json(data: Tree) -> TeamSpec:
        return TeamSpec.of(
            {
                name: Part(ActingSpec.from_json(d["acting"]), tuple(d["agents"]), d["learns"], d["opponents"])
                for name, d in data["policies"].items()
            }
        )


@dataclass(frozen=True)
class TeamVersion(PolicyVersion):
    """Versions of all policies; `params` are those of all that learn, joined, for whoever asks what was learned."""

    policies: Mapping[str, PolicyVersion] = field(default_factory=dict)
    opponents: Mapping[str, PolicyVersion] = field(default_factory=dict)  # older ones, of those who play against them

    @staticmethod
    def of(
        number: int,
        policies: Mapping[str, PolicyVersion],
        learning: Mapping[str, object],
        older: Mapping[str, PolicyVersion],
    ) -> TeamVersion:
        params = np.concatenate([policies[name].params for name in learning])
        return TeamVersion(number, params, policies=policies, opponents=older)

    def state(self) -> Tree:
        """Its `params` are those of its policies."""
        tree: Tree = {"number": self.number, "policies": {name: v.state() for name, v in self.policies.items()}}
        return tree | {"opponents": {name: v.state() for name, v in self.opponents.items()}}

    @staticmethod
    def of_state(tree: Tree) -> TeamVersion:
        policies, older = (
            {name: PolicyVersion.from_state(each) for name, each in tree.get(key, {}).items()}
            for key in ("policies", "opponents")
        )
        return TeamVersion.of(tree["number"], policies, policies, older)
