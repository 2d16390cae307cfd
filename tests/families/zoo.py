"""Models of families by name, small and without dropout: `timm/NAME`, `torchvision/NAME`, `transformers/CLASS`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models import give_logits
from echelon.models.of_transformers import end_texts, prepare_encoder_decoder

CLASSES = 8
TOKENS = 12
VOCABULARY = 48
SAMPLES = 4
MOST_PARAMETERS = 6_000_000
SMALL: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim", "width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("num_channels",), 3),
    **dict.fromkeys(("state_size", "conv_kernel", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_d_ssm",), 32),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_state", "mamba_chunk_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
}
"""Numbers of configurations of transformers that make a model tiny, where it has them."""


def build(name: str) -> nn.Module:
    """Build a model, in double precision, with the values of torch's generator; no value is zero."""
    library, _, rest = name.partition("/")
    if library == "timm":
        import timm

        model: nn.Module = timm.create_model(rest, pretrained=False, num_classes=CLASSES, **_image_size(rest))
    elif library == "torchvision":
        from torchvision import models

        model = models.get_model(rest, weights=None, num_classes=CLASSES)
    else:
        model = _transformers(rest)
        give_logits(model)
        end_texts(model)
    model = model.double().train()
    with torch.no_grad():
        for module in model.modules():
            _without_chance(module)
        for parameter in model.parameters():  # no zero may hide a branch
            if not parameter.is_meta and parameter.numel() and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def batch(name: str, samples: int = SAMPLES, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a global batch."""
    draw = torch.Generator().manual_seed(seed)
    if not reads_tokens(name):
        images = torch.randn(samples, 3, image_side(name), image_side(name), generator=draw, dtype=torch.float64)
        return images, torch.randint(0, CLASSES, (samples,), generator=draw)
    tokens = torch.randint(3, VOCABULARY, (samples, TOKENS), generator=draw)
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return tokens, tokens.roll(-1, 1)
    return tokens, torch.randint(0, CLASSES, (samples,), generator=draw)


def reads_tokens(name: str) -> bool:
    """Whether a model's inputs are ids of tokens, and not images."""
    return name.startswith("transformers/") and "Image" not in name


def image_side(name: str) -> int:
    """Return the side of a model's images in pixels: small, but what a fixed one asks for."""
    return 64 if name.startswith(("timm/", "torchvision/")) else 32


def _image_size(name: str) -> dict[str, int]:
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(name, allow_unregistered=True)
    return {"img_size": 64} if known is not None and known.fixed_input_size else {}


def _transformers(name: str) -> nn.Module:
    import transformers

    kind: Any = getattr(transformers, name)
    config = kind.config_class()
    shrink(config)
    config.num_labels = CLASSES
    prepare_encoder_decoder(config)
    model: nn.Module = kind(config)
    return model


def shrink(config: Any) -> None:
    """Make a configuration of transformers tiny, in place."""
    for key, value in SMALL.items():
        now = getattr(config, key, None)
        if isinstance(now, int) or (key.endswith("_token_id") and hasattr(config, key)):
            setattr(config, key, value)
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and ("dropout" in key or key.endswith("_pdrop") or "drop_path" in key):
            setattr(config, key, 0.0)
    config._experts_implementation = "eager"  # the others multiply no matrices of doubles
    types = vars(config).get("layer_types")
    if types:
        config.layer_types = list(types)[: config.num_hidden_layers]


def _without_chance(module: nn.Module) -> None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name in ("drop_prob", "dropout", "attn_drop", "dropout_p", "p", "drop_rate", "attention_dropout"):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.0)
    if "StochasticDepth" in type(module).__name__ or type(module).__name__ == "DropPath":
        module.eval()


@dataclass(frozen=True)
class Draw:
    """What a seed draws.

    Attributes:
        names: of the models, none twice.
        passed_over: families of which no model fits, and why the smallest name's does not.
    """

    names: tuple[str, ...]
    passed_over: Mapping[str, str]


def draw(seed: int, count: int) -> Draw:
    """Draw families: half of timm's, one of each module there, half of transformers' configurations."""
    chance = random.Random(seed)
    names: list[str] = []
    passed_over: dict[str, str] = {}
    for families, until in ((_timm_names(), count // 2), (_transformers_names(), count)):
        chance.shuffle(families)
        for family in families:
            if len(names) == until:
                break
            candidates = [name for name in sorted(family, key=len) if name not in names]
            fitting = list(islice((name for name in candidates if not misfit(name)), 2))
            if fitting:
                names.append(chance.choice(fitting))
            elif candidates:
                passed_over[candidates[0]] = misfit(candidates[0])
    return Draw(tuple(names), passed_over)


def _timm_names() -> list[list[str]]:
    """Return the names of each of timm's modules."""
    import timm

    return [[f"timm/{name}" for name in timm.list_models(module=module)] for module in timm.list_modules()]


def _transformers_names() -> list[list[str]]:
    from transformers.models.auto import modeling_auto as auto

    kinds = (
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    families = sorted({key for kind in kinds for key in kind})
    found = []
    for family in families:
        names = [kind[family] for kind in kinds if family in kind]
        found.append([f"transformers/{name}" for name in names if isinstance(name, str)])
    return found


def misfit(name: str) -> str:
    """Return why a model is none of this trial: it is large, cannot be built or answers no batch; empty where it is."""
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build(name).parameters())
        if parameters > MOST_PARAMETERS:
            return f"{parameters:,} parameters, more than {MOST_PARAMETERS:,}"
        inputs, _ = batch(name, 2)
        with torch.no_grad():
            answer = build(name).eval()(inputs)
    except Exception as error:  # noqa: BLE001 - any reason, in a library's own words
        return f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0][:120]}"
    if not isinstance(answer, Tensor):
        return f"it answers with a {type(answer).__name__}, not a tensor"
    if answer.shape[-1] not in (CLASSES, VOCABULARY):
        return f"it answers with {answer.shape[-1]} numbers, neither classes nor tokens"
    return "" if answer.isfinite().all() else "it answers with numbers that are not finite"
