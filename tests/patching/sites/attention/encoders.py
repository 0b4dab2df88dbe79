"""A small BERT with a scheme inside, for tests of attention that sees both sides."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertModel

from hf_posswap import patch_model


def swapped_bert(scheme: str) -> Any:
    """Return a BERT of float64 with `scheme`, for ids below 67 and up to 128 positions."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    model = BertModel(config).double().eval()
    patch_model(model, scheme)
    for name, parameter in model.named_parameters():
        if "posswap" in name:  # float32, as it was made
            parameter.data = parameter.data.double()
    return model
