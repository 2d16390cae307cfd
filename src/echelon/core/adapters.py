"""Names of low-rank adapters: each is two layers inside the layer that it is added to.

layer(x) + scale * lora_B(lora_A(x)), as Hu et al. 2021 (LoRA, arXiv:2106.09685). The layer keeps its names; those of
its adapter are `NAME.lora_A.weight` and `NAME.lora_B.weight`, as in the files that peft writes.
"""

from __future__ import annotations

DOWN, UP = "lora_A", "lora_B"
SIDES = (DOWN, UP)


def adapted_layer(name: str) -> str:
    """Return the name of the layer that an adapter's module or parameter belongs to; empty: it is none of an adapter.

    >>> adapted_layer("blocks.0.attn.qkv.lora_A.weight"), adapted_layer("blocks.0.attn.qkv.weight")
    ('blocks.0.attn.qkv', '')
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if i and part in SIDES), 0)
    return ".".join(parts[:at])
