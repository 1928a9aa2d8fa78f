"""Models of the curve: Hugging Face classes, an MLP, or the user's own."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch import nn

from . import models_with_loss


if TYPE_CHECKING:
    from collections.abc import Callable


class ModelError(ValueError):
    """A model that cannot be built as asked."""


@dataclass(frozen=True)
class Sizes:
    """Model and input sizes; see ``DEFAULTS`` for what each model takes by itself."""

    layers: int
    hidden: int
    inter: int
    heads: int
    batch: int
    seq: int
    kv_heads: int = 0
    vocab: int = 1000
    dropout: float = 0.0


# The published setup where there is one (llama, bert), its scale for the others.  For
# vit, unet and resnet, ``seq`` is the number of patches or pixels and must be a square
# number.  ``heads`` is the number of experts of moe; ``layers`` the number of unet's
# levels, of resnet's blocks and of encdec's encoder and decoder layers together.
DEFAULTS: dict[str, Sizes] = {
    "llama": Sizes(32, 256, 688, 8, 2, 1024),
    "bert": Sizes(32, 192, 768, 3, 2, 1024, dropout=0.1),
    "gpt2": Sizes(32, 256, 1024, 8, 2, 1024),
    "vit": Sizes(32, 192, 768, 3, 8, 196),
    "mlp": Sizes(16, 256, 1024, 1, 2, 256),
    "moe": Sizes(12, 256, 512, 4, 2, 1024),
    "unet": Sizes(4, 32, 64, 8, 4, 4096),
    "lm": Sizes(8, 512, 2048, 8, 1, 2048, 2, 32064),
    "tied": Sizes(8, 512, 2048, 8, 1, 2048, 2, 32064),
    "twice": Sizes(8, 512, 2048, 8, 1, 2048, 2, 8016),
    "values": Sizes(14, 256, 1024, 8, 2, 1024),
    "encdec": Sizes(28, 256, 1024, 8, 2, 1024),
    "resnet": Sizes(16, 64, 64, 1, 16, 50176),
}
# These return their loss.
_WITH_LOSS = ("lm", "tied", "twice", "values", "encdec", "resnet")


class WeightedSum(nn.Module):
    """Runs a model and reduces its hidden state to a loss with a gradient everywhere.

    The weights differ per channel: the plain sum behind a layer norm has none.
    """

    def __init__(self, model: nn.Module, hidden: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("weights", torch.linspace(-1.0, 2.0, hidden))

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        out = self.model(**inputs)
        hidden = out if isinstance(out, torch.Tensor) else out.last_hidden_state
        return (hidden * self.weights.to(hidden.dtype)).sum()


class GatedBlock(nn.Module):
    """``x + down(silu(gate(n)) * up(n))`` with ``n`` the RMS norm of ``x``."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, inter, bias=False)
        self.up = nn.Linear(hidden, inter, bias=False)
        self.down = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))


class Mlp(nn.Module):
    """A stack of :class:`GatedBlock`; input (batch, seq, hidden)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GatedBlock(sizes.hidden, sizes.inter) for _ in range(sizes.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Experts(nn.Module):
    """``x + sum of w * mlp(n)`` over experts; the two largest weights are kept."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(s.hidden)
        self.router = nn.Linear(s.hidden, s.heads, bias=False)
        scale = s.hidden**-0.5
        self.up = nn.Parameter(torch.randn(s.heads, s.hidden, s.inter) * scale)
        self.down = nn.Parameter(torch.randn(s.heads, s.inter, s.hidden) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x).flatten(0, -2)
        weights = self.router(n).softmax(-1)
        top = weights.topk(2, -1)
        kept = torch.zeros_like(weights).scatter(-1, top.indices, top.values)
        found = nn.functional.gelu(n @ self.up) @ self.down
        return x + (found * kept.t().unsqueeze(-1)).sum(0).view_as(x)


class Moe(nn.Module):
    """A stack of :class:`Experts`; input (batch, seq, hidden)."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(s) for _ in range(s.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Convolutions(nn.Sequential):
    """Two convolutions, each normalized in groups and activated."""

    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.SiLU(),
        )


class Unet(nn.Module):
    """Halves the picture and doubles the channels level by level, and back up.

    Every level's result is kept for the way up, so no point of the forward is narrow.
    Input (batch, 3, side, side); output (batch, side * side, hidden).
    """

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        widths = [s.hidden << level for level in range(s.layers)]
        pairs = list(zip([3, *widths], widths, strict=False))
        self.down = nn.ModuleList(Convolutions(a, b, s.heads) for a, b in pairs)
        rising = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(Convolutions(a + b, b, s.heads) for a, b in rising)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.avg_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1))
        return x.flatten(2).transpose(1, 2)


def _llama(s: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            hidden_size=s.hidden,
            intermediate_size=s.inter,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads or s.heads,
            num_hidden_layers=s.layers,
            vocab_size=s.vocab,
            max_position_embeddings=max(2048, s.seq),
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def _bert(s: Sizes) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            hidden_size=s.hidden,
            intermediate_size=s.inter,
            num_attention_heads=s.heads,
            num_hidden_layers=s.layers,
            vocab_size=s.vocab,
            max_position_embeddings=s.seq,
            hidden_dropout_prob=s.dropout,
            attention_probs_dropout_prob=s.dropout,
            attn_implementation="sdpa",
        ),
        add_pooling_layer=False,
    )


def _gpt2(s: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(
        GPT2Config(
            n_embd=s.hidden,
            n_inner=s.inter,
            n_head=s.heads,
            n_layer=s.layers,
            n_positions=s.seq,
            vocab_size=s.vocab,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=s.dropout,
            embd_pdrop=s.dropout,
            attn_pdrop=s.dropout,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def _vit(s: Sizes) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=s.hidden,
            intermediate_size=s.inter,
            num_attention_heads=s.heads,
            num_hidden_layers=s.layers,
            image_size=16 * _side(s),
            patch_size=16,
            hidden_dropout_prob=s.dropout,
            attention_probs_dropout_prob=s.dropout,
            attn_implementation="sdpa",
        ),
        add_pooling_layer=False,
    )


def _side(s: Sizes) -> int:
    side = round(s.seq**0.5)
    if side * side != s.seq:
        raise ModelError(f"--seq {s.seq} is not a square number of patches or pixels")
    return side


_BUILDERS: dict[str, Callable[[Sizes], nn.Module]] = {
    "llama": _llama,
    "bert": _bert,
    "gpt2": _gpt2,
    "vit": _vit,
    "mlp": Mlp,
    "moe": Moe,
    "unet": Unet,
    "lm": models_with_loss.CausalLM,
    "tied": functools.partial(models_with_loss.CausalLM, tied=True),
    "twice": functools.partial(models_with_loss.CausalLM, traversals=2),
    "values": functools.partial(models_with_loss.CausalLM, value_residual=True),
    "encdec": models_with_loss.EncoderDecoder,
    "resnet": models_with_loss.ResNet,
}


def _inputs(name: str, s: Sizes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if name == "vit":
        side = 16 * _side(s)
        return {"pixel_values": torch.randn(s.batch, 3, side, side, dtype=dtype)}
    if name == "unet":
        return {"x": torch.randn(s.batch, 3, _side(s), _side(s), dtype=dtype)}
    if name in ("mlp", "moe"):
        return {"x": torch.randn(s.batch, s.seq, s.hidden, dtype=dtype)}
    ids = torch.randint(0, s.vocab, (s.batch, s.seq))
    if name == "resnet":
        side = _side(s)
        pictures = torch.randn(s.batch, 3, side, side, dtype=dtype)
        return {"x": pictures, "labels": ids[:, 0]}
    if name in _WITH_LOSS:
        cos, sin = models_with_loss.rotary_tables(s.seq, s.hidden // s.heads, dtype)
        labels = torch.randint(0, s.vocab, (s.batch, s.seq))
        return {"ids": ids, "labels": labels, "cos": cos, "sin": sin}
    return {"input_ids": ids}


def build(
    name: str, sizes: Sizes, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A training-mode model that returns its loss, and its keyword inputs, on CPU.

    Raises:
        ModelError: the sizes do not fit the model.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(seed)
    if sizes.hidden % sizes.heads:
        raise ModelError(
            f"--hidden {sizes.hidden} is not a multiple of --heads {sizes.heads}"
        )
    model = _BUILDERS[name](sizes)
    if name not in _WITH_LOSS:
        model = WeightedSum(model, sizes.hidden)
    return model.to(dtype).train(), _inputs(name, sizes, dtype)


def build_from_file(
    spec: str, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Call ``function()`` of ``FILE.py:function``; it returns (model, inputs).

    ``model(**inputs)`` must return the loss, a scalar tensor that requires grad.

    Raises:
        ModelError: no such file or function, or it returns something else.
    """
    path, _, function = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise ModelError(f"--model-file {spec!r}: expected FILE.py:function")
    loaded = importlib.util.spec_from_file_location("curve_user_model", path)
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise ModelError(f"{path} has no function {function!r}")
    torch.manual_seed(seed)
    made: Any = getattr(module, function)()
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not isinstance(made[0], nn.Module)
        or not isinstance(made[1], dict)
    ):
        raise ModelError(f"{spec} must return (model, dict of keyword inputs)")
    return made[0].to(dtype), made[1]


def repeated_layers(model: nn.Module) -> nn.ModuleList:
    """The longest module list of one class: the layers that checkpointing wraps.

    Raises:
        ModelError: the model has no such list.
    """
    lists = [
        m
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and len({type(c) for c in m}) == 1
    ]
    if not lists:
        raise ModelError(
            "the checkpointing methods need an nn.ModuleList of equal layers; "
            "this model has none"
        )
    return max(lists, key=len)


def has_dropout(model: nn.Module) -> bool:
    """Whether a training step of ``model`` draws random numbers through dropout."""
    config = getattr(getattr(model, "model", model), "config", None)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    keys = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
    rates += [getattr(config, key, 0.0) or 0.0 for key in keys]
    return any(rate > 0 for rate in rates)


def sizes_for(name: str, **changes: int | None) -> Sizes:
    """The defaults of a model with the given sizes changed."""
    given = {k: v for k, v in changes.items() if v is not None}
    return dataclasses.replace(DEFAULTS[name], **given)
