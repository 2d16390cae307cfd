"""A small encoder-decoder transformer (Vaswani et al. 2017, arXiv:1706.03762), pre-norm, without dropout.

Source, target and logits share one embedding, as in the paper. Padding of the source is masked; that of the target
stands behind all that it could be seen by. So a pair's logits depend neither on the rest of its batch nor on padding.

Shapes: N samples, S source tokens, T target tokens, D width, H heads, E = D / H, V size of the vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.models.builtin.small_vit import FeedForward, Size, initialise
from echelon.tasks.nest import TensorSpec

SIZE = Size(depth=3, width=192, heads=4, hidden=512)
_INPUTS = {"input_ids", "attention_mask", "decoder_input_ids"}
_SPLIT_BLOCK = {
    "attn": "heads",
    "attn.qkv": "column(parts=3)",
    "attn.proj": "row",
    "mlp.fc1": "column",
    "mlp.fc2": "row",
}
_SPLIT_CROSS = {"cross.query": "column", "cross.key_value": "column(parts=2)", "cross.proj": "row"}


def build(data: ModelInput) -> nn.Module:
    """Build 3 encoder and 3 decoder blocks of width 192 with 4 heads: 4.0 M parameters for 8000 tokens.

    Raises:
        UserError: inputs are no `input_ids` with an `attention_mask` and `decoder_input_ids`.
    """
    spec = data.several.get("input_ids") if isinstance(data.several, dict) else None
    if not isinstance(spec, TensorSpec) or not spec.count or set(data.several) != _INPUTS:
        raise UserError(
            f"--model small_seq2seq reads {', '.join(sorted(_INPUTS))}, the data has {data.describe()}: "
            "choose another model"
        )
    return SmallSeq2Seq(spec.count, SIZE)


class MaskedAttention(nn.Module):
    """Multi-head self-attention, softmax(q k^T / sqrt(E)) v per head, over the tokens that a mask allows."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.heads
        self.head_dim = size.width // size.heads
        self.qkv = nn.Linear(size.width, 3 * size.heads * self.head_dim)
        self.proj = nn.Linear(size.heads * self.head_dim, size.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (N, S, D) to (N, S, D); `mask` (N, 1, 1, S) is true where a token may be seen; None: those before."""
        samples, tokens, _ = x.shape
        qkv = self.qkv(x).view(samples, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention of target tokens to source tokens.

    Heads are counted from the width that a projection gives: under tensor parallelism each rank has some of them.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        self.query = nn.Linear(size.width, size.heads * self.head_dim)
        self.key_value = nn.Linear(size.width, 2 * size.heads * self.head_dim)
        self.proj = nn.Linear(size.heads * self.head_dim, size.width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Map (N, T, D) and the source (N, S, D) to (N, T, D); `mask` (N, 1, 1, S) is true where a token is."""
        q = self.query(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.key_value(memory).unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attn = MaskedAttention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map (N, S, D) to (N, S, D)."""
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class DecoderBlock(nn.Module):
    """As the encoder's, of tokens that see those before them, with attention to the source in between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attn = MaskedAttention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.cross = CrossAttention(size)
        self.norm3 = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Map (N, T, D) and the source (N, S, D) to (N, T, D)."""
        x = x + self.attn(self.norm1(x), None)
        x = x + self.cross(self.norm2(x), memory, mask)
        return x + self.mlp(self.norm3(x))


class SmallSeq2Seq(nn.Module):
    """Source ids (N, S), which of them are no padding, and target ids (N, T) -> logits (N, T, V) of each next token."""

    structure = Hints(
        blocks=("encoder.*", "decoder.*"),
        tensor_plan={
            **{f"{part}.*.{name}": style for part in ("encoder", "decoder") for name, style in _SPLIT_BLOCK.items()},
            **{f"decoder.*.{name}": style for name, style in _SPLIT_CROSS.items()},
            "embedding": "vocabulary",
            "head": "vocabulary",
        },
    )

    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.width = size.width
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.encoder = nn.ModuleList([EncoderBlock(size) for _ in range(size.depth)])
        self.encoder_norm = nn.LayerNorm(size.width)
        self.decoder = nn.ModuleList([DecoderBlock(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        initialise(self)
        self.head.weight = self.embedding.weight
        for block in (*self.encoder, *self.decoder):
            for layer in block.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map ids (N, T) to (N, T, D), with their places."""
        x = self.embedding(tokens) * math.sqrt(self.width)
        return x + sinusoids(tokens.shape[1], self.width, x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Return logits (N, T, V)."""
        first = torch.arange(input_ids.shape[1], device=input_ids.device) == 0  # a sentence has it: no softmax is empty
        mask = (attention_mask.bool() | first)[:, None, None, :]
        x = self.embed(input_ids)
        for block in self.encoder:
            x = block(x, mask)
        memory = self.encoder_norm(x)
        y = self.embed(decoder_input_ids)
        for block in self.decoder:
            y = block(y, memory, mask)
        return self.head(self.norm(y))


def sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """Return the encodings of places 0 to length - 1, (length, width): sines of falling frequency, then cosines."""
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    rates = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10_000.0) / width))
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(like.dtype)
