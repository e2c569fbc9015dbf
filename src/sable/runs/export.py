"""A trained team as one file that runs without this package: a function of one step, its parameters inside.

`(memory, views, legal, first) -> (actions, memory)`, for any batch. As StableHLO it runs where jax does, as
ONNX where an ONNX runtime does. `interface.json` beside it says what goes in and what comes out.
"""

import json
import typing as tp
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from sable.config.schema import Config
from sable.errors import SableError
from sable.files import write_atomically
from sable.installation import pip_install
from sable.runs.policy import Memory, Policy
from sable.training import checkpoint

INTERFACE = "interface.json"
PLATFORMS = ("cpu", "cuda")

Arrays = dict[str, tp.Any]


class Step(tp.NamedTuple):
    """One step of a team as a function of plain arrays, and an example of what goes in, for a batch of 1."""

    function: tp.Callable[[Arrays, tp.Any, tp.Any, tp.Any], tuple[tp.Any, Arrays]]
    """(memory by name, views, legal, first) -> (actions, memory by name)"""
    memory: Arrays
    views: np.ndarray
    legal: np.ndarray
    first: np.ndarray


def step(policy: Policy, *, greedy: bool) -> Step:
    """Return what `policy.step` does. Sampling needs a key, which the memory then holds as two numbers."""
    # The others only pay on large devices.
    if getattr(policy.config.system, "decoding", "sequential") != "sequential":
        system = replace(policy.config.system, decoding="sequential")  # pyright: ignore[reportCallIssue]
        policy = Policy(Config(policy.config.run, system), policy.spec, policy.params)
    spec, blank = policy.spec, policy.initial_memory(1)
    leaves, form = jax.tree.flatten(blank.remembered)
    names = [f"memory_{number}" for number in range(len(leaves))]

    def function(memory: Arrays, views, legal, first) -> tuple[tp.Any, Arrays]:
        key = () if greedy else jax.random.wrap_key_data(memory["key"])
        remembered = jax.tree.unflatten(form, [memory[name] for name in names])
        before = Memory(remembered=remembered, time=memory["time"], key=tp.cast(jax.Array, key))
        action, after = policy.decide(policy.params, before, views, legal, first, greedy=greedy)
        plain = dict(zip(names, jax.tree.leaves(after.remembered), strict=True)) | {"time": after.time}
        return action, plain if greedy else plain | {"key": jax.random.key_data(after.key)}

    memory = dict(zip(names, map(np.asarray, leaves), strict=True)) | {"time": np.asarray(blank.time)}
    team = (1, spec.num_agents)
    return Step(
        function=function,
        memory=memory if greedy else memory | {"key": np.zeros(2, np.uint32)},
        views=np.zeros((*team, spec.view_size), np.float32),
        legal=np.ones((*team, spec.num_actions or 1), bool),
        first=np.ones(1, bool),
    )


def stablehlo(policy: Policy, *, greedy: bool) -> bytes:
    """Return the step as `jax.export` serialises it, for any batch, on a CPU or an NVIDIA GPU."""
    from jax import export

    one = step(policy, greedy=greedy)
    (batch,) = export.symbolic_shape("batch")

    def shape(name: str, array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape if name == "key" else (batch, *array.shape[1:]), array.dtype)

    memory = {name: shape(name, array) for name, array in one.memory.items()}
    inputs = [shape("", array) for array in (one.views, one.legal, one.first)]
    exported = export.export(jax.jit(one.function), platforms=PLATFORMS)(memory, *inputs)
    return bytes(exported.serialize())


def onnx(policy: Policy) -> bytes:
    """Return the step as an ONNX graph, for any batch; of actions the most probable ones, since ONNX has no
    reproducible noise."""
    try:
        from jax2onnx import to_onnx
    except ImportError:
        raise SableError(f"ONNX needs jax2onnx: {pip_install('onnx')}") from None
    one = step(policy, greedy=True)
    names = list(one.memory)

    def flat(views, legal, first, *memory) -> tuple:
        action, after = one.function(dict(zip(names, memory, strict=True)), views, legal, first)
        return (action, *(after[name] for name in names))

    inputs = [one.views, one.legal, one.first, *one.memory.values()]
    shapes = [jax.ShapeDtypeStruct(("batch", *array.shape[1:]), array.dtype) for array in inputs]
    try:
        model = to_onnx(
            flat,
            shapes,
            model_name=policy.config.run.system,
            input_names=["views", "legal", "first", *names],
            output_names=["actions", *(f"{name}_after" for name in names)],
        )
    except NotImplementedError as error:  # how jax2onnx says that it knows no counterpart of an operation
        why = str(error).partition("\n")[0]
        raise SableError(
            f"jax2onnx cannot convert {policy.config.run.system}: {why}; --format stablehlo would work"
        ) from None
    return model.SerializeToString()


def write(policy: Policy, folder: Path, *, format: str) -> None:
    """Fill `folder` with the policy in that format, `interface.json` last."""
    if format == "onnx":
        files = {"greedy.onnx": onnx(policy)}
    else:
        files = {
            f"{name}.stablehlo": stablehlo(policy, greedy=name == "greedy") for name in ("sampled", "greedy")
        }
    one = step(policy, greedy=format == "onnx")
    inputs = {"views": one.views, "legal": one.legal, "first": one.first}
    for name, content in files.items():
        write_atomically(folder / name, content)
    about = {
        "format": format,
        "task": policy.config.run.task,
        "system": policy.config.run.system,
        "seed": policy.seed,
        "jax": jax.__version__,
        "platforms": list(PLATFORMS) if format == "stablehlo" else ["any ONNX runtime"],
        "sha256": {name: checkpoint.sha256(folder / name) for name in files},
        "inputs": {name: _kind(name, array) for name, array in inputs.items()},
        "memory": {name: _kind(name, array) for name, array in one.memory.items()},
        "actions": _actions(policy),
    }
    write_atomically(folder / "README.md", _readme(policy, format).encode())
    write_atomically(folder / INTERFACE, (json.dumps(about, indent=2) + "\n").encode())  # last: it is whole


def _kind(name: str, array: np.ndarray) -> dict[str, tp.Any]:
    shape = list(array.shape) if name == "key" else ["batch", *array.shape[1:]]
    return {"dtype": str(array.dtype), "shape": shape}


def _actions(policy: Policy) -> dict[str, tp.Any]:
    spec, team = policy.spec, ["batch", policy.spec.num_agents]
    if spec.discrete:
        return {"dtype": "int32", "shape": team, "below": spec.num_actions}
    return {
        "dtype": "float32",
        "shape": [*team, spec.action_size],
        "low": spec.action_low,
        "high": spec.action_high,
    }


_STABLEHLO = """
import json
import jax, numpy as np  # pip install jax flatbuffers

about = json.load(open("interface.json"))
team = jax.export.deserialize(bytearray(open("sampled.stablehlo", "rb").read()))
batch, seed = 16, 0
memory = {
    name: np.zeros([batch if n == "batch" else n for n in kind["shape"]], kind["dtype"])
    for name, kind in about["memory"].items()
}
memory["key"] = np.array([0, seed], np.uint32)  # not in greedy.stablehlo, which needs no noise
actions, memory = team.call(memory, views, legal, first)
"""

_ONNX = """
import json
import numpy as np, onnxruntime  # pip install onnxruntime

about = json.load(open("interface.json"))
team, batch = onnxruntime.InferenceSession("greedy.onnx"), 16
memory = {
    name: np.zeros([batch if n == "batch" else n for n in kind["shape"]], kind["dtype"])
    for name, kind in about["memory"].items()
}
actions, *after = team.run(None, {"views": views, "legal": legal, "first": first, **memory})
memory = dict(zip(memory, after))
"""


def _readme(policy: Policy, format: str) -> str:
    return f"""# {policy.config.run.system} on {policy.config.run.task}, as {format}

One call is one step of {policy.spec.num_agents} agents in `batch` episodes. Memory goes in and comes out;
it begins with zeros. `first` [batch] is true where an episode begins, which empties that part of the memory;
`legal` says which actions may be taken. `{INTERFACE}` lists types and shapes.

```python{_STABLEHLO if format == "stablehlo" else _ONNX}```
"""
