"""A tensor plan found from a model's structure: attention modules, and pairs of layers with nothing but elementwise
functions between them, proven by a symbolic trace (torch.fx) of the smallest module around them that can be traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.fx.proxy import TraceError

from echelon.core.errors import UserError
from echelon.core.hints import Style
from echelon.parallel.tensor.layers import HEAD_COUNTS, is_convolution, is_linear, split_of

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
Pair = tuple[str, str]


def find_plan(model: nn.Module, tp: int) -> dict[str, Style]:
    """Return styles by module name for what of a model can be split over `tp` ranks.

    Raises:
        UserError: nothing of this kind was found, or `tp` divides none of it; says what to write.
    """
    modules = dict(model.named_modules())
    found: list[dict[str, Style]] = [plan for name, each in modules.items() if (plan := _attention(name, each))]
    found += [_styles(pair, modules) for pair in _pairs(model, "")]
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
        f"tp={tp}: {type(model).__name__} has no hints, and no attention or pair of layers with an elementwise "
        "function between them was found: write --tensor-plan with patterns of module names and their styles, "
        "such as blocks.*.fc1=column,blocks.*.fc2=row"
    )


def _styles(pair: Pair, modules: dict[str, nn.Module]) -> dict[str, Style]:
    names = ("column", "row") if is_linear(modules[pair[0]]) else ("channels_out", "channels_in")
    return {name: Style(style) for name, style in zip(pair, names, strict=True)}


def _attention(name: str, module: nn.Module) -> dict[str, Style]:
    """Recognise attention by a count of heads and the shapes of its layers: q, k, v (fused or not), then the output."""
    if not name or not any(isinstance(getattr(module, each, None), int) for each in HEAD_COUNTS):
        return {}
    layers: dict[str, Any] = {f"{name}.{child}": each for child, each in module.named_children() if is_linear(each)}
    shapes = [(each.in_features, each.out_features) for each in layers.values()]
    names = list(layers)
    if len(layers) == 2 and shapes[0][1] == 3 * shapes[1][0]:
        return {name: Style("heads"), names[0]: Style("column", 3), names[1]: Style("row")}
    if len(layers) == 4 and len(set(shapes[:3])) == 1 and shapes[0][1] == shapes[3][0]:
        return {name: Style("heads"), **dict.fromkeys(names[:3], Style("column")), names[3]: Style("row")}
    return {}


def _pairs(module: nn.Module, prefix: str) -> Iterator[Pair]:
    layers = [each for each in module.modules() if is_linear(each) or is_convolution(each)]
    if len(layers) < 2 or _attention(prefix or "root", module):
        return
    graph = _trace(module, attention_only=True)
    if graph is None:
        # Not every forward can be traced; its parts that can may hold pairs, and so may what is around them.
        for name, child in module.named_children():
            yield from _pairs(child, f"{prefix}.{name}" if prefix else name)
        graph = _trace(module, attention_only=False)
    for first, second in _in_graph(graph, dict(module.named_modules())) if graph is not None else ():
        yield (f"{prefix}.{first}", f"{prefix}.{second}") if prefix else (first, second)


class _Tracer(fx.Tracer):
    """Takes attention modules as one step; or all children."""

    def __init__(self, attention_only: bool) -> None:
        super().__init__()
        self.attention_only = attention_only

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one step of the graph: torch's own and attention; without `attention_only` every one."""
        known = super().is_leaf_module(m, module_qualified_name) or bool(_attention(module_qualified_name, m))
        return known or not self.attention_only


def _trace(module: nn.Module, attention_only: bool) -> fx.Graph | None:
    try:
        return _Tracer(attention_only).trace(module)
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError):
        return None


def _in_graph(graph: fx.Graph, modules: dict[str, nn.Module]) -> Iterator[Pair]:
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    taken: set[str] = set()
    for node in graph.nodes:
        target = str(node.target)
        if node.op != "call_module" or target in taken or calls[target] > 1:
            continue
        layer = modules[target]
        if not is_linear(layer) and not _is_whole_convolution(layer):
            continue
        last = _follow(node, layer, modules)
        if last is not None and calls[last] == 1:
            taken |= {target, last}
            yield target, last


def _follow(node: fx.Node, first: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Follow a layer's output through elementwise functions to the layer of its kind that alone uses it."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if len(node.all_input_nodes) != 1:
            return None
        if node.op == "call_module":
            module = modules[str(node.target)]
            if is_linear(first) and is_linear(module) and first.out_features == module.in_features:
                return str(node.target)
            if is_convolution(first) and _is_whole_convolution(module):
                return str(node.target)
            passes = isinstance(module, ELEMENTWISE) or (is_convolution(first) and isinstance(module, BY_CHANNEL))
            if not passes:
                return None
        elif node.op not in ("call_function", "call_method") or _function(node) not in FUNCTIONS:
            return None
    return None


def _is_whole_convolution(module: nn.Module) -> bool:
    return is_convolution(module) and getattr(module, "groups", 0) == 1


def _function(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
