"""Models of Keras 3, on its torch backend, as one module of torch.

Keras registers each variable of a model at several places at once, and holds what BatchNorm measures as parameters that
are not trained. Here every variable stands once, under a name that does not depend on how many models a process has
built, in Keras's order; what no gradient reaches by design is a buffer. The computation is Keras's own, on the tensors
of this module (`stateless_call`), so that layouts may cut, gather and replace them.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from echelon.core.errors import UserError

_BACKEND = "KERAS_BACKEND"
_LEAST_PROBABILITY = 1e-7  # `keras.config.epsilon()`: what Keras's losses take in place of less


def is_keras_model(value: object) -> bool:
    """Whether an object is a model of Keras, of whatever backend; imports nothing."""
    keras = sys.modules.get("keras")
    kind = getattr(keras, "Model", None)
    return isinstance(kind, type) and isinstance(value, kind)


def keras_module(model: Any, label: str) -> KerasModule:
    """Return a model of Keras as a module of torch, whose values it shares.

    Args:
        label: what messages call the model.

    Raises:
        UserError: its backend is not torch, it has no variables yet, or it adds losses of its own.
    """
    import keras

    backend = keras.backend.backend()
    if backend != "torch":
        raise UserError(
            f"{label} is a Keras model of the {backend} backend: set {_BACKEND}=torch before keras is imported "
            f"(os.environ['{_BACKEND}'] = 'torch', or in the shell)"
        )
    if not model.built:
        raise UserError(
            f"{label} is not built, so that it has no weights yet: begin it with keras.Input(shape), or call "
            "model.build((None, ...)) first"
        )
    for layer in (model, *model._flatten_layers(include_self=False)):
        penalised = [v.path for v in layer.weights if getattr(v, "regularizer", None) is not None]
        if penalised or getattr(layer, "activity_regularizer", None) is not None:
            raise UserError(
                f"{label}: {penalised[0] if penalised else layer.name} has a regularizer, whose loss only `fit` would "
                "add: leave it away and use --weight-decay"
            )
    return KerasModule(_Graph(model))


class KerasModule(nn.Module):
    """A model of Keras; its own variables serve as keys only.

    Images come as `(batch, channels, height, width)` and are turned where the model reads channels last. A softmax or
    sigmoid at its end is undone, so that outputs are logits: their cross-entropy is the loss of Keras on probabilities.
    """

    def __init__(self, graph: _Graph) -> None:
        """Take the variables of a built model, without copying them."""
        super().__init__()
        self._graph = graph
        self._keeps_statistics = False
        self._slots: dict[int, str] = {}  # by the place in `graph.variables`
        for place, (name, variable, is_parameter) in enumerate(_named_variables(graph.model)):
            value = variable.value.detach()
            if is_parameter:
                self.register_parameter(name, nn.Parameter(value, requires_grad=bool(variable.trainable)))
            else:
                self.register_buffer(name, value)
            self._slots[place] = name

    @property
    def activation(self) -> str:
        """What ends the model and is undone: `softmax`, `sigmoid` or nothing."""
        return self._graph.activation

    @property
    def compiled(self) -> Any:
        """The model of Keras, for what it was compiled with; its values are not those of this module."""
        return self._graph.model

    @property
    def measuring(self) -> list[str]:
        """Names of the layers of BatchNorm whose statistics are those of a batch in training."""
        kept = self._kept_layers()
        return [str(norm.name) for norm in self._graph.norms if norm.trainable and norm not in kept]

    @property
    def drawing(self) -> list[str]:
        """Names of the layers that draw random numbers in training, such as dropout."""
        layers = self._graph.model._flatten_layers()
        return [str(layer.name) for layer in layers if getattr(layer, "rate", 1) and _states(layer)]

    @property
    def layers(self) -> list[tuple[str, list[str]]]:
        """The class of each layer and the names of its own parameters, in Keras's order."""
        known = dict(self.named_parameters(recurse=False))
        return [
            (type(layer).__name__, [name for name in names if name in known]) for layer, names in self._graph.layers
        ]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return logits for one tensor, or several by position or by name."""
        given = self._graph.taken(inputs, named)
        known = {id(v): getattr(self, name) for v, name in zip(self._graph.variables, self._slots.values())}
        model = self._graph.model
        with _on_device(given), self._graph.in_evaluation(self._kept_layers()):
            trainable, others = model.trainable_variables, model.non_trainable_variables
            outputs, after, losses = model.stateless_call(
                [known[id(v)] for v in trainable], [known[id(v)] for v in others], given, training=self.training,
                return_losses=True,
            )  # fmt: skip
        if losses:
            raise UserError(
                f"{type(model).__name__} of Keras adds losses in its layers (add_loss), which only `fit` would count: "
                "add them in a loss=... of your own"
            )
        if self.training:
            self._take_state(others, after)
        return self._graph.logits(outputs)

    def keep_statistics(self) -> set[str]:
        """Keep normalisation whose parameters are all frozen in evaluation mode from now on.

        Returns:
            the names of its statistics.
        """
        self._keeps_statistics = True
        names = self._graph.names
        return {names[id(v)] for norm in self._kept_layers() for v in norm._non_trainable_variables if id(v) in names}

    def _kept_layers(self) -> list[Any]:
        if not self._keeps_statistics:
            return []
        trains = {name: parameter.requires_grad for name, parameter in self.named_parameters(recurse=False)}
        kept, moves = [], next(iter(trains.values()), True)
        for layer, names in self._graph.layers:
            own = [trains[name] for name in names if name in trains]
            moves = any(own) if own else moves  # of one without parameters: as those before it
            if layer in self._graph.norms and not moves:
                kept.append(layer)
        return kept

    @torch.no_grad()
    def _take_state(self, variables: list[Any], values: list[Any]) -> None:
        """Take the statistics and the states of random numbers that a forward pass has changed."""
        for variable, value in zip(variables, values, strict=True):
            own = getattr(self, self._graph.names[id(variable)])
            if isinstance(value, Tensor) and value is not own:
                own.copy_(value.detach())

    def write(self, path: Path) -> None:
        """Write the model with this module's values as a `.keras` file."""
        model = self._graph.model
        before = [variable.value.detach().clone() for variable in self._graph.variables]
        try:
            self._assign([getattr(self, name) for name in self._slots.values()])
            model.save(path)
        finally:
            self._assign(before)

    @torch.no_grad()
    def _assign(self, values: list[Tensor]) -> None:
        for variable, value in zip(self._graph.variables, values, strict=True):
            variable.assign(value.detach().to(variable.value.device))


class _Graph:
    """The layers of a model: the same for all copies of its module in a process; to another one it goes by value."""

    def __init__(self, model: Any, activation: str | None = None) -> None:
        self.model = model
        named = _named_variables(model)
        self.variables = [variable for _, variable, _ in named]
        self.names = {id(variable): name for name, variable, _ in named}
        self.activation = _last_activation(model) if activation is None else activation
        self.layers = [
            (layer, [self.names[id(v)] for v in layer._trainable_variables if id(v) in self.names])
            for layer in model._flatten_layers()
        ]
        self.norms = [each for each, _ in self.layers if _is_batch_norm(each)]

    def __deepcopy__(self, memo: object) -> _Graph:
        return self

    def __reduce__(self) -> tuple[Callable[..., _Graph], tuple[bytes, bytes, str]]:
        from keras.src.saving import saving_lib

        stream = io.BytesIO()
        saving_lib._save_model_to_fileobj(self.model, stream, "h5")
        return _unpacked, (stream.getvalue(), cloudpickle.dumps(_own_classes(self.model)), self.activation)

    @contextmanager
    def in_evaluation(self, layers: list[Any]) -> Iterator[None]:
        """Let layers of normalisation use what they have measured inside the block: Keras's `trainable = False`."""
        before = [(layer, layer.trainable) for layer in layers]
        try:
            for layer in layers:
                layer.trainable = False
            yield
        finally:
            for layer, trainable in before:
                layer.trainable = trainable

    def taken(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return inputs in the containers and the order of axes that the model reads."""
        if named:
            names = list(getattr(self.model, "input_names", None) or named)
            known = {name: value for name, value in named.items() if name in names} or dict(named)
            return next(iter(known.values())) if len(names) == 1 and len(known) == 1 else known
        if len(inputs) > 1:
            return [self._turned(each, place) for place, each in enumerate(inputs)]
        return self._turned(inputs[0], 0)

    def _turned(self, value: Any, place: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 4 or not self._reads_channels_last(value, place):
            return value
        return value.permute(0, 2, 3, 1)

    def _reads_channels_last(self, value: Tensor, place: int) -> bool:
        """Whether axes `(N, C, H, W)` are to be turned: the model's shape says so, else Keras's settings."""
        import keras

        declared = getattr(self.model, "inputs", None)
        shape = tuple(declared[place].shape)[1:] if declared and place < len(declared) else ()
        n_c_h_w = tuple(value.shape)[1:]
        fits = _fits(n_c_h_w, shape), _fits((*n_c_h_w[1:], n_c_h_w[0]), shape)
        if len(shape) == 3 and fits[0] != fits[1]:
            return fits[1]
        return bool(keras.config.image_data_format() == "channels_last")

    def logits(self, outputs: Any) -> Any:
        """Undo the softmax or the sigmoid that ends the model, and turn classes of pixels to the front."""
        import keras

        if not isinstance(outputs, Tensor):
            return outputs
        if self.activation == "softmax":
            outputs = outputs.clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY).log()
        elif self.activation == "sigmoid":
            outputs = torch.logit(outputs, eps=_LEAST_PROBABILITY)
            if outputs.ndim == 2 and outputs.shape[1] == 1:  # one number for two classes
                outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
        if outputs.ndim == 4 and keras.config.image_data_format() == "channels_last":
            return outputs.permute(0, 3, 1, 2)
        return outputs


def _unpacked(contents: bytes, classes: bytes, activation: str) -> _Graph:
    """Return a graph that another process of this run has packed."""
    os.environ.setdefault(_BACKEND, "torch")  # it was built on it, whatever this machine's file of settings says
    from keras.saving import custom_object_scope
    from keras.src.saving import saving_lib

    with custom_object_scope(cloudpickle.loads(classes)):
        model = saving_lib._load_model_from_fileobj(io.BytesIO(contents), None, compile=False, safe_mode=False)
    return _Graph(model, activation)


def read_keras(path: Path, like: KerasModule) -> KerasModule:
    """Return the model of a `.keras` file.

    Args:
        like: one whose own classes it may have.
    """
    import keras

    with keras.saving.custom_object_scope(_own_classes(like.compiled)):
        model = keras.saving.load_model(path, compile=False, safe_mode=False)
    return KerasModule(_Graph(model, like.activation))


def _own_classes(model: Any) -> dict[str, type]:
    """Return the classes of layers that are not Keras's own, by the names that its files give them."""
    import keras

    kinds = {type(layer) for layer in (model, *model._flatten_layers(include_self=False))}
    own = {kind for kind in kinds if not kind.__module__.startswith("keras.")}
    return {keras.saving.get_registered_name(kind): kind for kind in own}


def _named_variables(model: Any) -> list[tuple[str, Any, bool]]:
    """Return a model's variables once each, by name, and whether each is a parameter: frozen ones are, too.

    Names are those of Keras's paths, in which layers that nobody named are counted within the model alone.
    """
    named: list[tuple[str, Any, bool]] = []
    known: set[int] = set()
    taken: set[str] = set()
    for prefix, layer in _layers(model, ""):
        parameters = {id(v) for v in layer._trainable_variables}
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables, *_states(layer)):
            if id(variable) not in known:
                known.add(id(variable))
                named.append((_free(f"{prefix}{variable.name}", taken), variable, id(variable) in parameters))
    for variable in model.variables:
        if id(variable) not in known:
            known.add(id(variable))
            named.append((_free(f"other/{variable.name}", taken), variable, bool(variable.trainable)))
    wanted = {id(variable) for variable in model.variables}
    return [each for each in named if id(each[1]) in wanted]


def _layers(layer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, layer
    counts: dict[str, int] = {}
    for child in layer._flatten_layers(include_self=False, recursive=False):
        kind = _snake_case(type(child).__name__)
        name = str(child.name)
        if re.fullmatch(rf"{re.escape(kind)}(_\d+)?", name):
            number = counts[kind] = counts.get(kind, -1) + 1
            name = f"{kind}_{number}" if number else kind
        yield from _layers(child, f"{prefix}{name.replace('.', '_')}/")


def _is_batch_norm(layer: Any) -> bool:
    import keras

    return isinstance(layer, keras.layers.BatchNormalization)


def _states(layer: Any) -> list[Any]:
    return [generator.state for generator in getattr(layer, "_seed_generators", ())]


def _snake_case(name: str) -> str:
    from keras.src.utils.naming import to_snake_case

    return str(to_snake_case(name))


def _free(name: str, taken: set[str]) -> str:
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _last_activation(model: Any) -> str:
    """Return the activation that ends a model and is undone; empty: none, or it is not known.

    A sigmoid is one of classes unless the model was compiled with another loss than a cross-entropy.
    """
    import keras

    if isinstance(model, keras.Sequential) and model.layers:
        layer = model.layers[-1]
    elif len(getattr(model, "outputs", None) or ()) == 1:
        layer = model.outputs[0]._keras_history.operation
    else:
        return _compiled_activation(getattr(model, "loss", None))
    if isinstance(layer, keras.Model):
        return _last_activation(layer)
    function = getattr(layer, "activation", None)
    if isinstance(layer, keras.layers.Softmax) or function is keras.activations.softmax:
        return "softmax"
    loss = getattr(model, "loss", None)
    of_classes = loss is None or "crossentropy" in loss_name(loss)
    return "sigmoid" if function is keras.activations.sigmoid and of_classes else ""


def _compiled_activation(loss: object) -> str:
    """Return what a model ends with that cannot be looked into, by the loss that it was compiled with."""
    if loss is None or reads_logits(loss) is not False:
        return ""
    return "sigmoid" if "binary" in loss_name(loss) else "softmax"


def reads_logits(loss: object) -> bool | None:
    """Return whether a cross-entropy of Keras reads logits; None: it is none, or one loss for each output."""
    if isinstance(loss, dict | list | tuple) or "crossentropy" not in loss_name(loss):
        return None
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return bool(config.get("from_logits", config.get("fn_kwargs", {}).get("from_logits", False)))


def loss_name(loss: object) -> str:
    """Return a loss's name without underscores, in small letters: `sparsecategoricalcrossentropy`."""
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return str(name).replace("_", "").lower()


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(d is None or d == s for s, d in zip(shape, declared, strict=True))


def _on_device(inputs: Any) -> Any:
    """Return a context in which Keras makes its tensors where the inputs are."""
    import keras

    first = next((each for each in keras.tree.flatten(inputs) if isinstance(each, Tensor)), None)
    return keras.device(str(first.device) if first is not None else "cpu")


def given_by_keras(logits: Tensor, activation: str) -> Tensor:
    """Return what a model of Keras gives, from the logits `(B, ...)` of its module."""
    if activation == "softmax":
        return logits.softmax(-1)
    if activation == "sigmoid":
        binary = logits.ndim == 2 and logits.shape[1] == 2
        return torch.sigmoid(logits[:, 1:] - logits[:, :1] if binary else logits)
    return logits
