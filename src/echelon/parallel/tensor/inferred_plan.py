"""A tensor plan found from a model's structure: attention modules, and layers that follow each other.

Two Linear layers, gated (by a layer of its own, or by half of one) or not, with elementwise functions between them; two
convolutions with BatchNorm, depthwise convolutions and pooling between them. Proven by a symbolic trace (torch.fx) of
the smallest module around them that can be traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.proxy import TraceError

from echelon.core.errors import UserError
from echelon.core.hints import Style
from echelon.parallel.tensor.layers import HEAD_COUNTS, HEAD_WIDTH, is_convolution, is_linear, split_of
from echelon.torch_compat import BatchNormBase

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.Softplus),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.SELU, nn.CELU, nn.Dropout, nn.Identity),
)
BY_CHANNEL = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Dropout2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
FUNCTIONS = {
    *("relu", "relu_", "relu6", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "mish", "softplus", "selu"),
    *("hardswish", "hardsigmoid", "dropout", "clamp", "contiguous", "abs", "exp"),
}
PRODUCTS = {"mul", "mul_", "__mul__"}


def find_plan(model: nn.Module, tp: int) -> dict[str, Style]:
    """Return styles by module name for what of a model can be split over `tp` ranks.

    Raises:
        UserError: nothing of this kind was found, or `tp` divides none of it; says what to write.
    """
    modules = dict(model.named_modules())
    found: list[dict[str, Style]] = _attentions(modules)
    found += [run.styles(modules) for run in _runs(model, "")]
    kept: dict[str, Style] = {}
    refusals: list[UserError] = []
    for plan in found:
        if any(name in kept for name in plan):
            continue
        try:
            for name, style in plan.items():
                split_of(name, modules[name], style, tp)
        except UserError as refusal:
            refusals.append(refusal)
        else:
            kept |= plan
    if kept:
        return kept
    if refusals:
        raise refusals[0]
    raise UserError(
        f"tp={tp}: {type(model).__name__} has no hints, and no attention, pair of layers with an elementwise "
        f"function or pair of convolutions with BatchNorm between them was found{_why_not(model)}: write --tensor-plan "
        "with patterns of module names and their styles, such as blocks.*.fc1=column,blocks.*.fc2=row"
    )


@dataclass(frozen=True)
class _Run:
    """Layers that follow each other: `first` ones, multiplied where they are two, what works by channel, and `last`.

    `parts`: that the first layer's output is cut into, which are multiplied: a gate and its values in one layer.
    """

    first: tuple[str, ...]
    between: tuple[str, ...]
    last: str
    parts: int = 1

    def under(self, prefix: str) -> _Run:
        """Return the same by names from the root."""
        if not prefix:
            return self
        first, between = (tuple(f"{prefix}.{name}" for name in names) for names in (self.first, self.between))
        return _Run(first, between, f"{prefix}.{self.last}", self.parts)

    def styles(self, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
        """Return how its layers are split."""
        begin, end = ("column", "row") if is_linear(modules[self.last]) else ("channels_out", "channels_in")
        return {
            **dict.fromkeys(self.first, Style(begin, self.parts)),
            **dict.fromkeys(self.between, Style("channels")),
            self.last: Style(end),
        }


def _attentions(modules: Mapping[str, nn.Module]) -> list[dict[str, Style]]:
    """Return the plans of attention modules; where one of a class cannot be split, none is: they may share a bias."""
    plans = {name: _attention(name, module) for name, module in modules.items() if _counts_heads(module)}
    whole = {type(modules[name]) for name, plan in plans.items() if not plan}
    return [plan for name, plan in plans.items() if plan and type(modules[name]) not in whole]


def _counts_heads(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, each, None), int) for each in (*HEAD_COUNTS, HEAD_WIDTH))


def _attention(name: str, module: nn.Module) -> dict[str, Style]:
    """Recognise attention by its heads and the shapes of its layers: q, k, v (fused or not), then the output.

    Heads are told by a count of them, or by their width alone. Keys and values may have fewer heads than queries.
    """
    if not name or not _counts_heads(module):
        return {}
    if next(module.parameters(recurse=False), None) is not None:
        return {}  # such as a bias of q alone, beside a fused layer
    layers: dict[str, nn.Linear] = {
        f"{name}.{child}": each for child, each in module.named_children() if is_linear(each)
    }
    shapes = [(each.in_features, each.out_features) for each in layers.values()]
    names = list(layers)
    found: dict[str, Style] = {}
    if len(layers) == 2 and shapes[0][1] == 3 * shapes[1][0]:
        found = {name: Style("heads"), names[0]: Style("column", 3), names[1]: Style("row")}
    elif len(layers) == 4 and _are_q_k_v(shapes[:3]) and shapes[0][1] == shapes[3][0]:
        found = {name: Style("heads"), **dict.fromkeys(names[:3], Style("column")), names[3]: Style("row")}
    return _with_norms(name, module, found)


def _are_q_k_v(shapes: Sequence[tuple[int, int]]) -> bool:
    (q_in, q), (k_in, k), (v_in, v) = shapes
    return q_in == k_in == v_in and k == v and q % k == 0


def _with_norms(name: str, module: nn.Module, plan: dict[str, Style]) -> dict[str, Style]:
    """Add norms over each head's width, which all heads share; nothing is found beside other layers with parameters."""
    width = getattr(module, HEAD_WIDTH, None)
    for path, child in module.named_modules():
        own = [tuple(p.shape) for p in child.parameters(recurse=False)]
        if not path or not plan or not own or f"{name}.{path}" in plan:
            continue
        if any(shape != (width,) for shape in own):
            return {}
        plan[f"{name}.{path}"] = Style("shared")
    return plan


def _runs(module: nn.Module, prefix: str) -> Iterator[_Run]:
    layers = [each for each in module.modules() if is_linear(each) or is_convolution(each)]
    if len(layers) < 2 or _attention(prefix or "root", module):
        return
    graph = _trace(module, attention_only=True)
    if graph is None:
        # Not every forward can be traced; its parts that can may hold some, and so may what is around them.
        for name, child in module.named_children():
            yield from _runs(child, f"{prefix}.{name}" if prefix else name)
        graph = _trace(module, attention_only=False)
    for found in _in_graph(graph, dict(module.named_modules())) if graph is not None else ():
        yield found.under(prefix)


def _why_not(model: nn.Module) -> str:
    """Say of the first attention-like module, and of the first that cannot be traced, why it is not split."""
    for name, module in model.named_modules():
        if (
            name
            and _counts_heads(module)
            and not _attention(name, module)
            and next(module.parameters(), None) is not None
        ):
            return f" ({name}, a {type(module).__name__}, has other parameters than q, k, v and an output)"
    return ""


class _Tracer(fx.Tracer):
    """Takes attention modules as one step; or all children."""

    def __init__(self, root: nn.Module, attention_only: bool) -> None:
        super().__init__()
        self.known = frozenset(root.modules())
        self.attention_only = attention_only

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Go into a module that is made in the forward pass, such as an activation by its name."""
        return super().call_module(m, forward, args, kwargs) if m in self.known else forward(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one step of the graph: torch's own and attention; without `attention_only` every one."""
        known = super().is_leaf_module(m, module_qualified_name) or isinstance(m, BatchNormBase)
        known = known or bool(_attention(module_qualified_name, m))
        return known or not self.attention_only


def _trace(module: nn.Module, attention_only: bool) -> fx.Graph | None:
    try:
        return _Tracer(module, attention_only).trace(module)
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError):
        return None


def reached_from(module: nn.Module, first: str, last: Set[str]) -> set[str] | None:
    """Return the names of submodules that the output of one of them reaches up to some others, by a symbolic trace.

    None: the module's forward pass cannot be traced, or does not call `first`.
    """
    graph = _trace(module, attention_only=False)
    nodes = list(graph.nodes) if graph is not None else []
    reached = {node for node in nodes if node.op == "call_module" and node.target == first}
    if not reached:
        return None
    for node in nodes:  # in the order of the forward pass
        if any(each in reached and each.target not in last for each in node.all_input_nodes):
            reached.add(node)
    return {str(node.target) for node in reached if node.op == "call_module"}


def _in_graph(graph: fx.Graph, modules: dict[str, nn.Module]) -> Iterator[_Run]:
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    taken: set[str] = set()
    for node in graph.nodes:
        found = _from_layer(node, modules) or _from_product(node, modules) or _from_fused(node, modules)
        names = (*found.first, *found.between, found.last) if found is not None else ()
        if found is not None and not taken & set(names) and all(calls[name] == 1 for name in names):
            taken |= set(names)
            yield found


def _from_layer(node: fx.Node, modules: dict[str, nn.Module]) -> _Run | None:
    """Return the layers from one on to the next of its kind that alone uses its output."""
    if node.op != "call_module":
        return None
    target = str(node.target)
    layer = modules[target]
    return _follow(node, (target,), modules) if is_linear(layer) or _is_whole_convolution(layer) else None


def _from_product(node: fx.Node, modules: dict[str, nn.Module]) -> _Run | None:
    """Return the layers of a gated MLP, by the product of its gate and its values."""
    if node.op not in ("call_function", "call_method") or _function(node) not in PRODUCTS:
        return None
    if len(node.args) != 2 or not all(isinstance(each, fx.Node) for each in node.args):
        return None
    first = [_back(each, modules) for each in node.args if isinstance(each, fx.Node)]
    names = tuple(name for name in first if name is not None)
    if len(set(names)) != 2 or len({modules[name].out_features for name in names}) != 1:
        return None
    return _follow(node, names, modules)


def _from_fused(node: fx.Node, modules: dict[str, nn.Module]) -> _Run | None:
    """Return the layers of a gated MLP whose gate and values are one layer's output, by the halves of it."""
    if _function(node) != "chunk" or len(node.all_input_nodes) != 1 or len(node.users) != 2:
        return None
    source, count, dim = _argument(node, 0), _argument(node, 1, "chunks"), _argument(node, 2, "dim")
    if not isinstance(source, fx.Node) or len(source.users) != 1 or source.op != "call_module":
        return None
    layer = modules[str(source.target)]
    if not is_linear(layer) or layer.out_features % 2 or (count, dim) != (2, -1):
        return None
    products = {_product_after(half, modules) for half in node.users}
    product = next(iter(products))
    return _follow(product, (str(source.target),), modules, 2) if len(products) == 1 and product is not None else None


def _argument(node: fx.Node, place: int, name: str = "") -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _product_after(half: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """Return the product that a half of a layer's output reaches through elementwise functions alone."""
    node = half
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.op in ("call_function", "call_method") and _function(node) in PRODUCTS:
            return node
        known = node.op == "call_module" and isinstance(modules[str(node.target)], ELEMENTWISE)
        if not (known or _is_elementwise(node)):
            return None
    return None


def _back(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Return the Linear layer whose output reaches a node through elementwise functions alone, and nothing else."""
    while len(node.users) == 1 and len(node.all_input_nodes) == 1:
        if node.op == "call_module":
            module = modules[str(node.target)]
            if is_linear(module):
                return str(node.target)
            if not isinstance(module, ELEMENTWISE):
                return None
        elif not _is_elementwise(node):
            return None
        node = node.all_input_nodes[0]
    return None


def _follow(node: fx.Node, first: tuple[str, ...], modules: dict[str, nn.Module], fused: int = 1) -> _Run | None:
    """Follow an output through what works on each element or channel to the layer of its kind that alone uses it.

    Args:
        fused: parts of the first layer's output, of which what is followed has the width of one.
    """
    begin, between = modules[first[0]], list[str]()
    while len(node.users) == 1:
        node = next(iter(node.users))
        if len(node.all_input_nodes) != 1:
            return None
        if node.op == "call_module":
            module, name = modules[str(node.target)], str(node.target)
            if is_linear(begin) and is_linear(module) and begin.out_features == fused * module.in_features:
                return _Run(first, tuple(between), name, fused)
            if is_convolution(begin) and _is_whole_convolution(module):
                return _Run(first, tuple(between), name)
            if is_convolution(begin) and _works_by_channel(module, begin):
                between.append(name)
            elif not (isinstance(module, ELEMENTWISE) or (is_convolution(begin) and isinstance(module, BY_CHANNEL))):
                return None
        elif not _is_elementwise(node):
            return None
    return None


def _works_by_channel(module: Any, first: Any) -> bool:
    """Whether a module has parameters for each channel alone: BatchNorm, or a convolution channel by channel."""
    if isinstance(module, BatchNormBase):
        return True
    by_channel = is_convolution(module) and module.groups == module.in_channels == module.out_channels
    return by_channel and module.in_channels == first.out_channels


def _is_elementwise(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _function(node) in FUNCTIONS


def _is_whole_convolution(module: nn.Module) -> bool:
    return is_convolution(module) and getattr(module, "groups", 0) == 1


def _function(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
