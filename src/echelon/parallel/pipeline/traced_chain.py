"""The chain of a model that declares none: its forward pass is traced, and cut wherever a single value goes on.

The trace (torch.fx) goes into what holds blocks and takes everything else as one step. It is of the root's own Python
code, run on placeholders: what that decides by values, or does beside tensors' operations, cannot be seen and is
refused. `check_chain` then runs the steps one after the other and compares with the model, bit for bit.
"""

from __future__ import annotations

import copy
import operator
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from echelon.parallel.blocks import find_blocks
from echelon.parallel.pipeline.chain import ChainStep, Unit, is_under, numel_of
from echelon.parallel.pipeline.stage import make_stage, run_steps, set_types
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import detect_fake_mode

ROOT = "model"  # of what is traced: the model as a child, so that what wraps its call is seen, too
FACTS = ("shape", "device", "dtype", "ndim", "is_cuda", "requires_grad")  # of a tensor, and of nothing else
MOST_UNCUT = 0.5  # of the parameters, in a step with several blocks: a pipeline would have nothing to divide


class NoChain(Exception):
    """A forward pass is not a chain; the words say which module breaks it."""


def trace_chain(model: nn.Module) -> tuple[ChainStep, ...]:
    """Return the finest chain of steps that a model's forward pass of one tensor is.

    The model is not changed, and not computed with.

    Raises:
        NoChain: it cannot be traced, differs between training and evaluation, or too much of it goes around its blocks.
    """
    blocks = tuple(find_blocks(model, None))
    blank = _blank_copy(model)
    training, evaluation = _trace(blank.train(), blocks), _trace(blank.eval(), blocks)
    segments = [_segments(graph) for graph in (training.graph, evaluation.graph)]
    if not any(segment.modules for segment in segments[0]):
        raise NoChain("it calls no module")
    shapes = [[(s.modules, s.tensors) for s in each] for each in segments]
    if shapes[0] != shapes[1]:
        raise NoChain("it calls other modules in training than in evaluation")
    steps = [_step(model, *both) for both in zip(*segments, strict=True)]
    _check_cut(model, steps, blocks, training)
    return (_with_unused_buffers(model, steps), *steps[1:])


def _blank_copy(model: nn.Module) -> nn.Module:
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return copy.deepcopy(model, memo)


class _Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(ROOT, model)

    def forward(self, x: Any) -> Any:
        result = self.get_submodule(ROOT)(x)
        return result if isinstance(result, fx.Proxy) else getattr(result, "logits", result)


@dataclass(frozen=True)
class _Trace:
    graph: fx.Graph
    opaque: Mapping[str, str]


class _Tracer(fx.Tracer):
    """Goes into modules that hold blocks, and takes one as a whole whose own code cannot be traced."""

    proxy_buffer_attributes = True

    def __init__(self, root: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.known = frozenset(root.modules())
        self.blocks = blocks
        self.opaque: dict[str, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one step: a block, what is in one, and what holds none and is no Sequential."""
        name = module_qualified_name.removeprefix(ROOT).removeprefix(".")
        if any(name == block or name.startswith(f"{block}.") for block in self.blocks):
            return True
        holds = not name or any(block.startswith(f"{name}.") for block in self.blocks)
        return not (holds or type(m).forward is nn.Sequential.forward)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if m not in self.known:
            return forward(*args, **kwargs)  # made in the forward pass, such as an activation by its name
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name) or name == ROOT:
            return super().call_module(m, forward, args, kwargs)
        last, scope, stack = next(iter(reversed(self.graph.nodes))), copy.copy(self.scope), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # noqa: BLE001  a model's own code may raise any
            for node in reversed(list(self.graph.nodes)):
                if node is last:
                    break
                self.graph.erase_node(node)
            self.scope, self.module_stack = scope, stack  # as tracing left neither when it failed
            self.opaque[name.removeprefix(f"{ROOT}.")] = _reason(error)
            return self.create_proxy("call_module", name, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or not torch.is_autocast_enabled("cpu"):
            raise NoChain("it computes without gradients, or without autocast, outside its modules")
        return super().create_node(*args, **kwargs)


def _reason(error: BaseException) -> str:
    """Return an error's first line, and the function of the model's library that it came from."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
    if isinstance(error, fx.proxy.TraceError):
        said = "it decides by values or shapes"
    ours = (str(Path(torch.__file__).parent), __file__)
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f"{said} (in {places[-1].name}, {Path(places[-1].filename).name}:{places[-1].lineno})" if places else said


def _trace(model: nn.Module, blocks: Sequence[str]) -> _Trace:
    whole = _Whole(model)
    tracer = _Tracer(whole, blocks)
    whole.training = model.training
    before = _random_states()
    try:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            graph = tracer.trace(whole)
    except Exception as error:
        called = [node for node in tracer.graph.nodes if node.op == "call_module"] if hasattr(tracer, "graph") else []
        where = f" after {_plain(called[-1])}" if called else ""
        raise NoChain(f"its own code cannot be traced{where}: {_reason(error)}") from error
    if before != _random_states():
        raise NoChain("it draws random numbers outside its modules")
    return _Trace(graph, tracer.opaque)


def _random_states() -> tuple[object, ...]:
    """Return the states of Python's and torch's random numbers; a rehearsal cannot read torch's."""
    rehearses = detect_fake_mode(()) is not None
    return random.getstate(), None if rehearses else torch.get_rng_state().numpy().tobytes()


@dataclass(frozen=True)
class _Segment:
    """Nodes of a graph from one value that alone goes on to the next."""

    entry: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(_plain(node) for node in self.nodes if node.op == "call_module")

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_plain(node) for node in self.nodes if node.op == "get_attr"))


def _plain(node: fx.Node) -> str:
    """Return a node's target as a name below the model."""
    return str(node.target).removeprefix(f"{ROOT}.")


def _segments(graph: fx.Graph) -> list[_Segment]:
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(result, fx.Node):
        raise NoChain("it gives several values, not one tensor")
    for node in graph.nodes:
        if node.op == "get_attr" and "_tensor_constant" in str(node.target):
            raise NoChain(f"it makes a tensor of its own for {next(iter(node.users)).name}")
    cuts = [nodes[0], *(node for node, waiting in _crossing(nodes) if waiting == {node} and _may_end(node)), result]
    cuts = list(dict.fromkeys(cuts))
    place = {node: i for i, node in enumerate(nodes)}
    return [_Segment(a, _with_attributes(nodes[place[a] + 1 : place[b] + 1])) for a, b in pairwise(cuts)]


def _crossing(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Yield each node with the values that are there after it and used later."""
    last = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last[used] = i
    waiting: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        waiting = {each for each in waiting if last[each] > i}
        if any(user.op != "output" for user in node.users):
            waiting.add(node)
        yield node, set(waiting)


def _may_end(node: fx.Node) -> bool:
    """Whether a value may be a tensor, by what is made of it."""
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem and isinstance(user.args[1], int | str):
            return False
        if user.op == "call_function" and user.target is getattr and user.args[1] not in FACTS:
            return False
    return True


def _with_attributes(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return nodes with the parameters and buffers that they read before them."""
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used.op == "get_attr")
    return (*read, *nodes)


def _step(model: nn.Module, training: _Segment, evaluation: _Segment) -> ChainStep:
    owns = tuple(dict.fromkeys((*training.modules, *training.tensors)))
    first, only = training.nodes[0], len(training.nodes) == 1
    if only and first.op == "call_module" and first.args == (training.entry,) and not first.kwargs:
        return ChainStep(owns[0], owns, numel_of(model, owns))
    graphs = {True: _graph(training), False: _graph(evaluation)}

    def function(root: nn.Module, x: Any) -> Any:
        """Run the segment's operations with a root's modules and parameters."""
        return fx.Interpreter(root, graph=graphs[root.training]).run(x)

    name = f":{owns[0] if owns else training.nodes[-1].name}"
    return ChainStep(name, owns, numel_of(model, owns), function)


def _with_unused_buffers(model: nn.Module, steps: Sequence[ChainStep]) -> ChainStep:
    """Return the first step with the buffers that none uses: they are part of a checkpoint."""
    owned = [name for step in steps for name in step.owns]
    unused = [name for name, _ in model.named_buffers() if not any(is_under(name, each) for each in owned)]
    return replace(steps[0], owns=(*steps[0].owns, *unused))


def _graph(segment: _Segment) -> fx.Graph:
    graph = fx.Graph()
    copied = {segment.entry: graph.placeholder("x")}
    for node in segment.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        if node.op in ("call_module", "get_attr"):
            copied[node].target = _plain(node)
    graph.output(copied[segment.nodes[-1]])
    return graph


def _check_cut(model: nn.Module, steps: Sequence[ChainStep], blocks: Sequence[str], trace: _Trace) -> None:
    """Refuse a chain in which one step has several blocks and most of the parameters."""
    total = sum(p.numel() for p in model.parameters())
    for step in steps:
        inside = [block for block in blocks if any(is_under(block, name) for name in step.owns)]
        if len(inside) < 2 or step.numel <= MOST_UNCUT * total:
            continue
        opaque = next((name for name in step.owns if name in trace.opaque), None)
        if opaque is not None:
            kind = type(model.get_submodule(opaque)).__name__
            raise NoChain(f"the code of {opaque}, a {kind}, cannot be traced: {trace.opaque[opaque]}")
        raise NoChain(_breaker(trace.graph, step))


def _breaker(graph: fx.Graph, step: ChainStep) -> str:
    """Say of the first module in a step beside whose output something else goes on."""
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
    place = {node: i for i, node in enumerate(nodes)}
    for node, waiting in _crossing(nodes):
        others = sorted(waiting - {node}, key=place.__getitem__)
        if node.op == "call_module" and _plain(node) in step.owns and others:
            user = max((u for u in others[0].users if u in place), key=place.__getitem__)
            return f"beside the output of {_plain(node)}, {_shown(others[0], True)} goes on to {_shown(user, False)}"
    return f"{step.owns[0]} gives more than one value"


def _shown(node: fx.Node, back: bool) -> str:
    """Return a module's name; of another operation its own, and the nearest module before or after it."""
    if node.op == "placeholder":
        return "the model's input"
    if node.op == "call_module":
        return _plain(node)
    near, seen = [node], {node}
    for each in near:  # which grows
        if each.op == "call_module":
            return f"{node.name} of {_plain(each)}" if back else _plain(each)
        following = [n for n in (each.all_input_nodes if back else each.users) if n not in seen]
        near += following
        seen.update(following)
    return node.name


def check_chain(model: nn.Module, units: Sequence[Unit], example: Nest, autocast: torch.dtype | None = None) -> str:
    """Run a traced chain's units one after the other, each with its own parts of the model alone.

    Both in evaluation and in training, with batches of two sizes; the model's state stays as it was. Training comes
    last, for what modules remember of an evaluation they forget there. A rehearsal's tensors, which have no values, are
    not tried.

    Args:
        autocast: type that autocast gives to matrix products; None: no autocast.

    Returns:
        Where the outputs are not the bits of the model's own, and how; empty where they are.
    """
    if nest.is_container(example):
        return "it takes several inputs"
    tensors = [*model.parameters(), *model.buffers(), example]
    if any(each.is_meta for each in tensors) or detect_fake_mode(tensors) is not None:
        return ""
    modes = {module: module.training for module in model.modules()}
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device: torch.device = example.device
    try:
        for training, samples in ((False, 3), (True, 2)):
            model.train(training)
            batch = example[torch.arange(samples, device=device) % len(example)]
            with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
                problem = _difference(model, units, batch, autocast)
            if problem:
                return problem
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
    return ""


def _difference(model: nn.Module, units: Sequence[Unit], batch: Tensor, autocast: torch.dtype | None) -> str:
    with torch.set_grad_enabled(model.training):
        torch.manual_seed(0)
        before = [buffer.clone() for buffer in model.buffers()]
        with torch.autocast(batch.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            expected = nest.logits_in(model(batch))
        torch.manual_seed(0)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.detach().copy_(value)
        x = batch
        for i, unit in enumerate(units):
            stage = make_stage(model, unit.steps, i == 0, i == len(units) - 1, batch)
            stage.training = model.training
            set_types(stage, autocast, None)
            try:
                x = run_steps(stage, (x,))
            except Exception as error:  # noqa: BLE001  a model's own code may raise any
                return f"{unit.name} cannot run by itself: {_reason(error)}"
            if not isinstance(x, Tensor):
                return f"{unit.name} gives a {type(x).__name__}, not one tensor"
            x = x.detach()
            x = x.requires_grad_() if x.is_floating_point() and model.training else x
    if x.shape == expected.shape and torch.equal(x, expected):
        return ""
    mode = "training" if model.training else "evaluation"
    return f"in {mode}, {units[0].name} to {units[-1].name} one after the other give other outputs"
