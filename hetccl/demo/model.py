# SPDX-License-Identifier: Apache-2.0
"""What is trained: a small character-level transformer, on the text of Python's own help topics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CharTransformer", "Corpus"]


class Corpus:
    """Help topics of the standard library as numbers, one a character. `vocabulary` is how many there are."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        number = {character: i for i, character in enumerate(characters)}
        self.vocabulary = len(characters)
        self.data = torch.tensor([number[character] for character in text], dtype=torch.int64)

    def batch(self, generator: torch.Generator, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each [size, context]: random places of the text, and the same one character later."""
        starts = torch.randint(len(self.data) - context - 1, (size, 1), generator=generator)
        places = starts + torch.arange(context)
        return self.data[places], self.data[places + 1]


class CharTransformer(nn.Module):
    """Predicts the next character. Inputs [batch, context] of int64; returns logits [batch, context, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.characters(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    """Causal self-attention, then a two-layer network, each beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.network(self.norm_network(x))
