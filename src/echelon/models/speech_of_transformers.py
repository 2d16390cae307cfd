"""Models of transformers for sounds: what they say of one depends on no padding behind it, and on no other sound.

Shapes: B sounds, S samples of a waveform, C channels, F frames of a model's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.tasks.nest import TensorSpec, logits_in
from echelon.tasks.speech_recognition import blank_padding

_VALUES, _MASK = "input_values", "attention_mask"
_DROPPED_LAYERS = ("layerdrop", "encoder_layerdrop")


def are_sounds(specs: object) -> bool:
    """Whether inputs are of sounds, as `read_features` has them for models of transformers."""
    if not isinstance(specs, dict) or not all(isinstance(spec, TensorSpec) for spec in specs.values()):
        return False
    return set(specs) in ({_VALUES, _MASK}, {_VALUES}, {"input_features"}, {"features", "mask"})


def build_for_sounds(library: Any, config: Any, data: ModelInput, name: str) -> nn.Module:
    """Build a classifier of sounds, or a model whose frames are symbols (CTC), without pretrained weights.

    Layers are not dropped, and nothing is masked within the model: both would draw other numbers than the run's.

    Args:
        library: transformers.
        config: of the model, which is changed.

    Raises:
        UserError: it is of another kind, or makes too few frames of a sound for what is said in it.
    """
    waveforms = bool(getattr(config, "conv_kernel", None))
    if "features" in data.several:
        raise UserError(f"{name} is not given log-mel spectrograms of Echelon's: leave out --features log_mel")
    if waveforms is not (_MASK in data.several):
        what = "waveforms" if waveforms else "no waveforms"
        raise UserError(f"{name} is of a {config.model_type}, which reads {what}: leave out --features")
    if data.transcribes and not waveforms:
        raise UserError(
            f"{name} is of a {config.model_type}, which makes no symbols of the frames of a sound, as --task "
            "speech-recognition learns them (CTC): name one of waveforms, such as wav2vec2, hubert or wavlm; it can "
            "learn --task speech-classification"
        )
    for each in _DROPPED_LAYERS:
        if hasattr(config, each):
            setattr(config, each, 0.0)
    config.apply_spec_augment = False
    if not data.transcribes:
        config.num_labels = data.classes or config.num_labels
        model: nn.Module = library.AutoModelForAudioClassification.from_config(config)
    else:
        config.vocab_size, config.pad_token_id = data.classes, data.classes - 1  # the blank
        _check_frames(config, data, name)
        model = library.AutoModelForCTC.from_config(config)
    for each, parameter in model.named_parameters():
        if each.endswith("masked_spec_embed"):
            parameter.requires_grad_(False)  # it stands where the model masks, which it does not
    hear_no_padding(model)
    return model


def _check_frames(config: Any, data: ModelInput, name: str) -> None:
    """Check that a model makes enough frames of the sound with the most labels for its length (else UserError)."""
    tight = data.tightest
    if tight is None:
        return
    frames = tight.frames
    adapter = [(1, config.adapter_stride)] * config.num_adapter_layers if getattr(config, "add_adapter", False) else []
    for kernel, stride in (*zip(config.conv_kernel, config.conv_stride, strict=True), *adapter):
        frames = max(0, (frames - kernel) // stride + 1)
    if frames < tight.needed:
        raise UserError(
            f"{name} makes {frames} frames of {tight.name}, whose transcript needs {tight.needed}: choose a model that "
            "shortens less, or remove this sound"
        )


@dataclass
class _Heard:
    """How much there is of each sound of the batch that a model is called with.

    Attributes:
        samples: `(B,)`; None: nobody said.
        least: of which a model makes one frame.
    """

    samples: Tensor | None
    least: int

    def frames(self, kernel: int, stride: int) -> Tensor:
        """Return the frames `(B,)` that the first convolution makes."""
        assert self.samples is not None
        return torch.div(self.samples.clamp(min=self.least) - kernel, stride, rounding_mode="floor") + 1


class FrameNorm(nn.GroupNorm):
    """Normalises each channel over the frames of its own sound: padding is in no mean and no variance."""

    def __init__(self, norm: nn.GroupNorm, heard: _Heard, kernel: int, stride: int) -> None:
        """Take the parameters of the norm over all frames that a model has, behind its first convolution."""
        super().__init__(norm.num_groups, norm.num_channels, norm.eps, affine=False)
        self.affine, self.weight, self.bias = norm.affine, norm.weight, norm.bias
        self._heard, self._kernel, self._stride = heard, kernel, stride

    def forward(self, input: Tensor) -> Tensor:
        """Return `(B, C, F)` normalised over the frames that are there; behind them are numbers that nobody reads."""
        if self._heard.samples is None:
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()
        frames = self._heard.frames(self._kernel, self._stride)[:, None, None]
        there = (torch.arange(x.shape[-1], device=x.device) < frames).to(x.dtype)
        mean = (x * there).sum(-1, keepdim=True) / frames
        x = x - mean
        variance = (x.square() * there).sum(-1, keepdim=True) / frames
        x = x * (variance + self.eps).rsqrt() * self.weight[:, None] + self.bias[:, None]
        return x.to(input.dtype)


def hear_no_padding(model: nn.Module) -> None:
    """Make a model of waveforms give the same for a sound whatever is padded to it, in place.

    Frames behind the end of a sound are the blank, where frames are symbols; a sound that is too short for one frame is
    lengthened by silence. Does nothing to other models.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "_get_feat_extract_output_lengths") or not getattr(config, "conv_kernel", None):
        return
    least = int(getattr(config, "squeeze_factor", 1))
    for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
        least = (least - 1) * stride + kernel
    heard = _Heard(None, least)
    for name, layer in list(model.named_modules()):
        if name.endswith("feature_extractor.conv_layers.0") and type(layer.layer_norm) is nn.GroupNorm:
            layer.layer_norm = FrameNorm(layer.layer_norm, heard, config.conv_kernel[0], config.conv_stride[0])
    model.register_forward_pre_hook(partial(_listen, heard), with_kwargs=True)
    if type(model).__name__.endswith("ForCTC"):
        model.register_forward_hook(partial(_with_blanks, heard))


def _listen(
    heard: _Heard, model: nn.Module, args: object, kwargs: Mapping[str, Tensor]
) -> tuple[object, Mapping[str, Tensor]]:
    """Remember how long sounds are, and lengthen those that are too short."""
    mask: Tensor | None = kwargs.get(_MASK)
    heard.samples = None if mask is None else mask.sum(1)
    if mask is None or _VALUES not in kwargs:
        return args, kwargs
    missing = max(0, heard.least - mask.shape[1])
    mask, values = pad(mask, (0, missing)), pad(kwargs[_VALUES], (0, missing))
    is_least = torch.arange(mask.shape[1], device=mask.device) < heard.least
    return args, {**kwargs, _VALUES: values, _MASK: torch.where(is_least, 1, mask)}


def _with_blanks(heard: _Heard, model: Any, args: object, output: Any) -> Any:
    """Return the logits `(B, F, symbols)`, which are the blank's behind the end of each sound."""
    logits: Tensor = logits_in(output)
    if heard.samples is None:
        return logits
    frames = model._get_feat_extract_output_lengths(heard.samples)
    return blank_padding(logits, torch.arange(logits.shape[1], device=logits.device) < frames[:, None])
