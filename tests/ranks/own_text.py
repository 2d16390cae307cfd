"""Models of transformers on token ids, trained from Python in layouts: `python -m tests.ranks.own_text LAYOUT ...`."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

VOCABULARY, TOKENS = 16, 8


class LastToken(GPT2LMHeadModel):
    """GPT-2 as a classifier: of the token that comes after the last one."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids (N, T) to logits (N, V)."""
        logits: Tensor = super().forward(tokens, use_cache=False).logits[:, -1]
        return logits


def bert() -> nn.Module:
    """Return BERT with a head that tells as many classes apart as there are tokens, as transformers has it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    labels = {"num_labels": VOCABULARY}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **sizes, **none, **labels)
    )


def gpt2() -> nn.Module:
    """Return GPT-2, its embedding and its head tied."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return LastToken(GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=32, n_layer=2, n_head=4, **none))


def counting(samples: int) -> TensorDataset:
    """Return runs of tokens that count up from anywhere, and the next one of each."""
    firsts = torch.arange(samples) % VOCABULARY
    tokens = (firsts[:, None] + torch.arange(TOKENS + 1)) % VOCABULARY
    return TensorDataset(tokens[:, :TOKENS], tokens[:, TOKENS])


if __name__ == "__main__":
    import echelon
    from echelon.core.errors import UserError
    from tests.ranks import own_text  # not of `__main__`: workers import the classes by their module

    for number, (name, layout) in enumerate(each.split(":") for each in sys.argv[1:]):
        torch.manual_seed(0)
        model, data = getattr(own_text, name)(), (counting(256), counting(33))
        settings = {"epochs": 4, "batch_size": 32, "lr": 0.01, "optimizer": "adamw", "device": "cpu", "threads": 1}
        try:
            outcome = echelon.train(model, data, run=f"{number}", parallel=layout, **settings)
        except UserError as error:
            print(json.dumps([name, layout, str(error)]))
            continue
        print(json.dumps([name, layout, outcome.status, outcome.summary["metrics"]["top1"]]))
