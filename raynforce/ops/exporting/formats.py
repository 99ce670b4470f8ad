"""The files of each format, written into a folder that is there; what they need is imported here and no earlier."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.exporting import torch_module, verifying
from raynforce.ops.exporting.graph import ACTION, Graph
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.runs import checkpoint
from raynforce.spaces import MASK, ObsLeaf

FORMATS = ("onnx", "numpy", "torchscript", "cpp")
OPSET, IR = 17, 8  # of ONNX: LayerNormalization came with 17, and runtimes of 2022 read both
COMPILE_SECONDS = 300
NEEDS = {"onnx": ("onnx", "onnxruntime")}

ACT_CPP = """\
// Acts with the policy in this folder: reads observations from stdin, writes actions to stdout, as raw bytes.
#include <cstdio>

#include "raynforce.hpp"

int main(int argc, char** argv) try {
  raynforce::Policy policy = raynforce::Policy::load(argc > 1 ? argv[1] : "policy");
  std::size_t bytes = 0;
  for (const raynforce::Leaf& leaf : policy.spaces().obs) bytes += leaf.bytes();
  const std::size_t count = policy.spaces().action.elements();
  std::vector<std::uint8_t> seen(bytes), action(count * (policy.spaces().action.kind == "box" ? 4 : 8));
  while (std::fread(seen.data(), 1, bytes, stdin) == bytes) {
    std::vector<const void*> obs;
    std::size_t at = 0;
    for (const raynforce::Leaf& leaf : policy.spaces().obs) obs.push_back(seen.data() + at), at += leaf.bytes();
    policy.act(obs, action.data());
    std::fwrite(action.data(), 1, action.size(), stdout);
    std::fflush(stdout);
  }
} catch (const raynforce::Error& error) {
  std::fprintf(stderr, "%s\\n", error.what());
  return 2;
}
"""
CMAKE = """\
cmake_minimum_required(VERSION 3.16)
project(act CXX)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
find_package(Threads REQUIRED)
add_executable(act act.cpp)
target_compile_features(act PRIVATE cxx_std_17)
target_link_libraries(act Threads::Threads)
"""


def require(to: str, spec: ActingSpec) -> None:
    """Refuse what cannot be exported to a format, before anything is written."""
    if spec.network.states:
        what = "this policy has memory, and what is exported is a function of one observation"
        raise UsageError(f"--to {to}: {what}: act with raynforce.load(run).act(obs, state), or raynforce serve")
    if spec.factory and to != "torchscript":
        known = f"this policy is a torch module ({spec.factory}), which can be exported to torchscript alone"
        raise UsageError(f"--to {to}: {known}: use --to torchscript")
    for module in NEEDS.get(to, ()):
        if find_spec(module) is None:
            raise UsageError(f"--to {to} needs {module}, which is not installed: pip install 'raynforce[{to}]'")
    if to == "cpp" and shutil.which("g++") is None:
        raise UsageError("--to cpp compiles what it writes to verify it, and there is no g++: install it (apt: g++)")


def write(
    to: str,
    folder: Path,
    spec: ActingSpec,
    version: PolicyVersion,
    graph: Graph,
    obs: Mapping[str, np.ndarray],
    facts: dict[str, Any],
) -> verifying.Verified:
    """Write a format's files, and hold what they answer against ours."""
    wanted = verifying.expected(spec, version, obs)
    if to == "cpp":
        return verifying.compare(spec, wanted, _cpp(folder, spec, version, obs))
    (folder / "predict.py").write_bytes((files(__package__) / f"predict_{to}.py").read_bytes())
    if to == "onnx":
        _onnx(folder / "policy.onnx", spec, graph)
    elif to == "numpy":
        np.savez(folder / "weights.npz", **graph.constants)  # type: ignore[arg-type]
        facts["graph"] = [node.to_json() for node in graph.nodes]
    else:
        torch_module.write(folder / "policy.pt", spec, version, graph, obs)
    (folder / "policy.json").write_text(json.dumps(facts, indent=1) + "\n")
    return verifying.compare(spec, wanted, *verifying.answers(folder, to, graph.scores, obs))


def _onnx(path: Path, spec: ActingSpec, graph: Graph) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def kind(dtype: str) -> int:
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    nodes = []
    for node in graph.nodes:
        attributes = dict(node.attributes)
        if node.op == "Cast":
            attributes = {"to": kind(attributes["dtype"])}
        nodes.append(helper.make_node(node.op, node.inputs, [node.output], **attributes))
    action = spec.env.action
    box = action.kind == "box"
    inputs = [helper.make_tensor_value_info(x.path, kind(x.dtype), ["N", *x.shape]) for x in spec.env.obs]
    answer = helper.make_tensor_value_info(
        ACTION, TensorProto.FLOAT if box else TensorProto.INT64, ["N", *action.shape]
    )
    scores = helper.make_tensor_value_info(graph.scores, TensorProto.FLOAT, ["N", spec.heads[graph.scores]])
    constants = [numpy_helper.from_array(array, name) for name, array in graph.constants.items()]
    made = helper.make_graph(nodes, "policy", inputs, [answer, scores], constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def _cpp(folder: Path, spec: ActingSpec, version: PolicyVersion, obs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The program, the header and the policy; returns what the program, compiled, answers."""
    policy = {"acting": spec.to_json(), "version": version.state()}
    checkpoint.save(folder / "policy", {"policy": policy}, step=0)
    shutil.rmtree(folder / "segments", ignore_errors=True)
    (folder / "act.cpp").write_text(ACT_CPP)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    (folder / "raynforce.hpp").write_text((files("raynforce") / "sdk" / "cpp" / "raynforce.hpp").read_text())
    words = ["g++", "-std=c++17", "-O1", "-pthread", "act.cpp", "-o", "act"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=COMPILE_SECONDS)
    if done.returncode:
        raise RaynforceError(f"the exported act.cpp does not compile: {done.stderr.strip().splitlines()[0]}")
    given = verifying.as_bytes(spec.env.obs, obs)
    ran = subprocess.run(["./act"], input=given, capture_output=True, cwd=folder, timeout=verifying.SECONDS)
    if ran.returncode:
        raise RaynforceError(f"the exported program fails: {ran.stderr.decode(errors='replace').strip()}")
    (folder / "act").unlink()  # for the machine that it is compiled on
    action = spec.env.action
    found = np.frombuffer(ran.stdout, np.float32 if action.kind == "box" else np.int64)
    return found.reshape(-1, *action.shape)


# -- README.md --------------------------------------------------------------------------------------------

HOW = {
    "onnx": ("numpy and onnxruntime", "pip install numpy onnxruntime", "`policy.onnx` is the whole policy."),
    "numpy": ("numpy", "pip install numpy", "`policy.json` is the graph, `weights.npz` its constants."),
    "torchscript": (
        "torch",
        "pip install torch",
        "`policy.pt` takes the leaves in this order and returns the outputs.",
    ),
}


def readme(to: str, spec: ActingSpec, scores: str, source: str, verified: verifying.Verified) -> str:
    action = spec.env.action
    kind = "float32" if action.kind == "box" else "int64"
    batch = ", ".join(["N", *map(str, action.shape)])
    lines = [
        f"# A policy for {spec.env.env}",
        "",
        f"From {source}. It acts greedily and needs nothing of Raynforce.",
        "",
    ]
    lines += ["| input | shape | type |", "|---|---|---|"]
    lines += [
        f"| `{x.path}` | `[{', '.join(['N', *map(str, x.shape)])}]` | {x.dtype}{_values(x)} |" for x in spec.env.obs
    ]
    lines += ["", "| output | shape | type |", "|---|---|---|"]
    lines.append(f"| `action` | `[{batch}]` | {kind}, as the environment takes it |")
    meaning = "means" if action.kind == "box" else "action values" if spec.exploration == "epsilon" else "logits"
    if to != "cpp":
        lines.append(f"| `{scores}` | `[N, {spec.heads[scores]}]` | float32, {meaning} |")
    lines += ["", "Observations are raw: normaliser, encodings, squashing, scaling and clipping are inside.", ""]
    if to == "cpp":
        order = " then ".join(f"`{x.path}`" for x in spec.env.obs)
        lines += ["    cmake -B build && cmake --build build", "    ./build/act policy < observations > actions", ""]
        lines.append(f"Both are raw little-endian bytes: of each observation {order}, of each action the array above.")
        lines.append("`raynforce.hpp` needs a C++17 compiler; `act.cpp` shows its `Policy`.")
    else:
        needs, install, what = HOW[to]
        lines += [f"    {install}", "", "```python", "from predict import act  # one observation, or a batch", ""]
        call = 'act(obs, mask=info["action_mask"])' if spec.env.masked else "act(obs)"
        lines += [f"action = {call}", "```", "", f"`predict.py` needs {needs}. {what}"]
    error = f"{verified.error:.1g}"
    lines += ["", f"Verified on {verified.observations:,} random observations: the largest difference was {error}."]
    return "\n".join(lines) + "\n"


def _values(leaf: ObsLeaf) -> str:
    if leaf.path == MASK:
        return ", 1 for each choice that is allowed"
    if not leaf.sizes:
        return ""
    start = leaf.start or (0,) * len(leaf.sizes)
    spans = [f"{a} … {a + n - 1}" for a, n in zip(start, leaf.sizes, strict=True)]
    return f", {', '.join(spans[:6])}{', …' * (len(spans) > 6)}"
