"""Models that return their loss: programs as people train them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn


if TYPE_CHECKING:
    from .models import Sizes


class Attention(nn.Module):
    """Grouped-query attention of ``x`` to itself or to ``context``.

    ``rotary`` are cosine and sine of shape (seq, head size), None for no positions.
    """

    def __init__(self, s: Sizes, causal: bool = True) -> None:
        super().__init__()
        self.causal, self.size = causal, s.hidden // s.heads
        key_size = (s.kv_heads or s.heads) * self.size
        self.query = nn.Linear(s.hidden, s.hidden, bias=False)
        self.key = nn.Linear(s.hidden, key_size, bias=False)
        self.value = nn.Linear(s.hidden, key_size, bias=False)
        self.out = nn.Linear(s.hidden, s.hidden, bias=False)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        context: torch.Tensor | None = None,
        first_value: torch.Tensor | None = None,
    ) -> torch.Tensor:
        source = x if context is None else context
        query, key = self.heads(self.query(x)), self.heads(self.key(source))
        value = self.heads(self.value(source))
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        if first_value is not None:
            value = value + self.heads(first_value)
        found = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=self.causal,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return self.out(found.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotary_tables(seq: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rates = 10000 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(seq).float(), rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Layer(nn.Module):
    """Attention and a gated MLP behind RMS norms; ``cross`` attends to a context."""

    def __init__(self, s: Sizes, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(s.hidden) for _ in range(2 + cross))
        self.attention = Attention(s, causal)
        self.cross = Attention(s, causal=False) if cross else None
        self.gate = nn.Linear(s.hidden, s.inter, bias=False)
        self.up = nn.Linear(s.hidden, s.inter, bias=False)
        self.down = nn.Linear(s.inter, s.hidden, bias=False)
        self.dropout = nn.Dropout(s.dropout)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        context: torch.Tensor | None = None,
        first_value: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n = self.norms[0](x)
        x = x + self.dropout(self.attention(n, rotary, first_value=first_value))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norms[2](x), None, context))
        n = self.norms[1](x)
        return x + self.dropout(self.down(F.silu(self.gate(n)) * self.up(n)))


class CausalLM(nn.Module):
    """A causal language model that returns the loss over its vocabulary.

    ``traversals`` runs the same layers several times in one graph; ``value_residual``
    adds the first layer's values to those of every later one.
    """

    def __init__(
        self,
        s: Sizes,
        tied: bool = False,
        traversals: int = 1,
        value_residual: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.traversals, self.value_residual = traversals, value_residual

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        x, first = self.embedding(ids), None
        for _ in range(self.traversals):
            for layer in self.layers:
                x = layer(x, (cos, sin), first_value=first)
                if self.value_residual and first is None:
                    first = layer.attention.value(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class EncoderDecoder(nn.Module):
    """As many encoder as decoder layers; every decoder layer reads the encoder."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.hidden)
        self.encoder = nn.ModuleList(
            Layer(s, causal=False) for _ in range(s.layers // 2)
        )
        self.layers = nn.ModuleList(
            Layer(s, cross=True) for _ in range(s.layers - s.layers // 2)
        )
        self.norm = nn.RMSNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        context = self.embedding(ids)
        for layer in self.encoder:
            context = layer(context, (cos, sin))
        x = self.embedding(labels)
        for layer in self.layers:
            x = layer(x, (cos, sin), context)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, each convolution with a batch norm."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        shapes = [
            (before, width, 1, 1),
            (width, width, 3, stride),
            (width, after, 1, 1),
        ]
        self.convolutions = nn.ModuleList(self.unit(*shape) for shape in shapes)
        changes = stride > 1 or before != after
        self.shortcut = self.unit(before, after, 1, stride) if changes else None

    @staticmethod
    def unit(before: int, after: int, size: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.convolutions
        found = third(second(first(x).relu()).relu())
        return (found + (x if self.shortcut is None else self.shortcut(x))).relu()


class ResNet(nn.Module):
    """The shape of ResNet-50 with its loss: stages of 3, 4, 6 and 3 bottlenecks.

    ``layers`` blocks of these are taken; input (batch, 3, side, side).
    """

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.stem = Bottleneck.unit(3, s.hidden, 7, 2)
        self.layers = nn.ModuleList()
        before = s.hidden
        stages = [(stage, k) for stage, n in enumerate((3, 4, 6, 3)) for k in range(n)]
        for stage, k in stages[: s.layers]:
            width = s.hidden << stage
            stride = 2 if stage and not k else 1
            self.layers.append(Bottleneck(before, width, stride))
            before = 4 * width
        self.head = nn.Linear(before, s.vocab)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x).relu(), 3, 2, padding=1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)
