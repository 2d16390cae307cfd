"""`.peft`: a folder with what was tuned alone, which peft loads onto the model that the run started from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from echelon.core.adapters import adapted_layer
from echelon.core.errors import UserError
from echelon.inference.exports.base import ExportFormat, Predictor
from echelon.models.adapters import named_exactly
from echelon.models.still_buffers import still_buffers
from echelon.models.tuning.lora import Lora
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.trainer.start_weights import best_since, best_weights

WEIGHTS_FILE = "adapter_model.safetensors"
_ROOT = "base_model.model."


class PeftAdapter(ExportFormat):
    """What `PeftModel.from_pretrained(model, folder)` reads: adapters, and the modules that were trained with them."""

    def write(self, trained: TrainedModel, path: Path, example: nest.Nest) -> None:
        """Write the tensors under the names of peft, and its description of them."""
        config, weights = _described(trained, path), best_weights(trained.folder)
        layers = _adapted(weights)
        beside = tuple(f"{each}." for each in config.modules_to_save or ())
        tensors = {}
        for name, tensor in weights.items():
            layer = adapted_layer(name)
            if layer or name.startswith(beside):
                tensors[_ROOT + name] = tensor.contiguous().clone()
            elif config.bias != "none" and name.rpartition(".")[0] in layers and name.endswith(".bias"):
                tensors[f"{_ROOT}{name.removesuffix('bias')}base_layer.bias"] = tensor.contiguous().clone()
        path.mkdir()
        save_file(tensors, path / WEIGHTS_FILE, {"format": "pt"})
        config.inference_mode = True
        config.save_pretrained(str(path))

    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return the model as plain peft makes it, of one without what was trained."""
        from peft import PeftModel

        base = copy.deepcopy(trained.model)
        tuned = _tuned(trained)
        weights = {name: tensor for name, tensor in best_weights(trained.folder).items() if not adapted_layer(name)}
        base.load_state_dict(weights)
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                if tuned.get_parameter(name).requires_grad:
                    parameter.zero_()
            for name in _moving_statistics(tuned):
                base.get_buffer(name).zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that are none of transformers
            model = PeftModel.from_pretrained(base, str(path)).eval()
        return lambda inputs: nest.call(model, inputs)


def _described(trained: TrainedModel, path: Path) -> Any:
    """Return peft's description of what was trained.

    Raises:
        UserError: the run has no adapters, or has trained what peft cannot put beside them; or its model has other
            modules than the one that it started from.
    """
    lora = next((each for each in trained.tuning.kinds if isinstance(each, Lora)), None)
    if lora is None:
        raise UserError(f"{path}: the run has no adapters, it was not trained with --tune lora: write .safetensors")
    if trained.tuning.rebuilds:
        raise UserError(
            f"{path}: peft puts adapters into the model that the run started from, and --tune replace has put other "
            "modules into it: write .safetensors, which holds the whole model"
        )
    from peft import LoraConfig

    weights = best_weights(trained.folder)
    layers, model = _adapted(weights), _tuned(trained)
    beside, has_biases = _beside(model, layers, path)
    kinds = {type(model.get_submodule(layer)).__name__ for layer in layers}
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=_targets(layers, model),
        modules_to_save=beside or None,
        bias="all" if has_biases else "none",
        fan_in_fan_out=kinds == {"Conv1D"},
        base_model_name_or_path=trained.config.model.weights or trained.config.model.name,
    )


def _adapted(weights: Mapping[str, Tensor]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(adapted_layer, weights))))


def _targets(layers: list[str], model: nn.Module) -> list[str] | str:
    """Return the layers' names as peft takes them: a list, which more programs read, where it means no others."""
    others = [name for name, _ in model.named_modules() if name not in layers]
    ends = tuple(f".{layer}" for layer in layers)
    return named_exactly(layers) if any(name.endswith(ends) for name in others) else layers


def _beside(model: nn.Module, layers: list[str], path: Path) -> tuple[list[str], bool]:
    """Return the modules that were trained as they are, and whether biases of adapted layers were.

    Raises:
        UserError: a parameter, or a statistic, belongs to no module that peft could replace.
    """
    modules: dict[str, None] = {}
    has_biases = False
    named = model.named_parameters(remove_duplicate=False)
    trained = [name for name, parameter in named if parameter.requires_grad and not adapted_layer(name)]
    for name in (*trained, *_moving_statistics(model)):
        owner, _, leaf = name.rpartition(".")
        if owner in layers and leaf == "bias":
            has_biases = True
        elif not owner or owner in layers or next(model.get_submodule(owner).children(), None) is not None:
            raise UserError(
                f"{path}: {name} was trained beside the adapters, and peft has no place for it: write .safetensors, "
                "which holds the whole model"
            )
        else:
            modules[owner] = None
    return list(modules), has_biases


def _moving_statistics(model: nn.Module) -> list[str]:
    """Return the names of the statistics of normalisation that training has moved."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        if getattr(module, "running_mean", None) is not None
        for name, _ in module.named_buffers(recurse=False)
        if name not in still_buffers(module)
    ]


def _tuned(trained: TrainedModel) -> nn.Module:
    """Return a copy of the model in which what the best checkpoint has trained is told by `requires_grad`."""
    model = copy.deepcopy(trained.model)
    trained.tuning.at(best_since(trained.folder)).apply(model)
    return model
