"""The shared backbone: a decoder-only Transformer whose layers hand their branches to a pathway.

Shapes: B batch, T token, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from darlit.backbone.attention import Attention
from darlit.backbone.cache import KeyValueCache, LayerCache
from darlit.backbone.compiled import keep_names
from darlit.backbone.config import BackboneConfig
from darlit.backbone.document_mask import causal_mask, document_mask, document_numbers
from darlit.backbone.experts import Experts, Routing, mean_routing
from darlit.backbone.feed_forward import build_feed_forward
from darlit.backbone.initialise import whole
from darlit.backbone.loss import Losses, head_cross_entropy
from darlit.backbone.rope import rotary_table
from darlit.errors import DarlitError
from darlit.pathways import Pathway, PathwayState, Probe


class Layer(nn.Module):
    """One attention branch and one feed-forward branch, read from and written to a pathway's state."""

    def __init__(self, config: BackboneConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.attention = Attention(config)
        self.feed_forward = build_feed_forward(config)

    def forward(
        self, state: PathwayState, rope: Tensor, visible: Tensor | None = None, cache: LayerCache | None = None
    ) -> tuple[PathwayState, Routing | None]:
        """The state after this layer, which is the given one changed, and the layer's routing."""
        first, second = 2 * self.index, 2 * self.index + 1
        state.write(first, self.attention(state.read(first), rope, visible, cache))
        output_BTD, routing = self.feed_forward(state.read(second))
        state.write(second, output_BTD)
        return state, routing


def _on_a_fork(layer: nn.Module, state: PathwayState, *rest: Any) -> tuple[PathwayState, Routing | None]:
    """A layer as a region that may run twice: the given state is left as it was."""
    return layer(state.fork(), *rest)


class Transformer(nn.Module):
    """Backbone x pathway: token ids ``[B, T]`` to hidden states, logits or a loss.

    Every weight outside ``pathway`` is drawn before the pathway's own, in a fixed order: under one seed all arms
    start from the same backbone.

    Args:
        config: the backbone's shape.
        pathway: made for ``config.num_branches`` branches of ``config.width``.
    """

    rope: Tensor

    def __init__(self, config: BackboneConfig, pathway: Pathway) -> None:
        super().__init__()
        if (pathway.num_branches, pathway.width) != (config.num_branches, config.width):
            raise DarlitError(
                f"pathway has {pathway.num_branches} branches of width {pathway.width}, the backbone "
                f"{config.num_branches} of {config.width}: build the pathway with the backbone's numbers"
            )
        self.config = config
        self.embedding = nn.Embedding(config.rows, config.width)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.width, config.rows, bias=False)
        self.pathway = pathway
        self.register_buffer("rope", torch.empty(2, config.sequence_length, config.head_width // 2), persistent=False)
        self.reset_parameters()
        keep_names(self)

    def reset_parameters(self) -> None:
        """Draw all initial values: normal(0, init_std), branch outputs by 1/sqrt(2 L) smaller, gains one."""
        config = self.config
        for name, module in self.named_modules():
            if not name.startswith("pathway"):
                with whole(module):
                    self._draw(name, module)
        table = rotary_table(config.sequence_length, config.head_width, config.rope_base, self.rope.device)
        self.rope.copy_(table)
        with whole(*self.pathway.modules()):
            self.pathway.reset_parameters()

    def _draw(self, name: str, module: nn.Module) -> None:
        std = self.config.init_std
        output_std = std / math.sqrt(self.config.num_branches)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=output_std if name.endswith(".out") else std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Experts):
            for weight, weight_std in ((module.gate, std), (module.up, std), (module.out, output_std)):
                nn.init.normal_(weight, std=weight_std)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix ``[V, D]``."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens_BT: Tensor, probe: Probe | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Final hidden states ``[B, T, D]`` after the last norm.

        Args:
            tokens_BT: token ids; with a cache those that follow the tokens it holds.
            probe: sees the pass from inside.
            cache: for decoding without gradients; it holds these tokens too afterwards.

        Raises:
            ValueError: more tokens than ``sequence_length``.
        """
        return self._hidden_and_routings(tokens_BT, probe, cache)[0]

    def _hidden_and_routings(
        self, tokens_BT: Tensor, probe: Probe | None = None, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, list[Routing]]:
        start = 0 if cache is None else cache.length
        length = start + tokens_BT.shape[1]
        if length > self.config.sequence_length:
            raise DarlitError(
                f"a sequence of {length} tokens is longer than backbone.sequence_length={self.config.sequence_length}; "
                "shorten it or build the model for longer ones"
            )
        rope = self.rope[:, start:length]
        visible = self._visible(tokens_BT, cache)
        recompute = self.config.checkpoint_layers and torch.is_grad_enabled()
        state = self.pathway.start(self.embedding(tokens_BT), probe)
        routings = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            if recompute:
                state, routing = checkpoint(_on_a_fork, layer, state, rope, visible, layer_cache, use_reentrant=False)
            else:
                state, routing = layer(state, rope, visible, layer_cache)
            if routing is not None:
                routings.append(routing)
        return self.final_norm(state.finish()), routings

    def _visible(self, tokens_BT: Tensor, cache: KeyValueCache | None) -> Tensor | None:
        """What attention may see where that is not simply everything before; see `Attention`."""
        separator = self.config.document_separator
        start = 0 if cache is None else cache.length
        if separator is not None:
            documents = (
                document_numbers(tokens_BT, separator) if cache is None else cache.documents(tokens_BT, separator)
            )
            return document_mask(documents, start)
        return causal_mask(start + tokens_BT.shape[1], start, tokens_BT.device) if start else None

    def forward(self, tokens_BT: Tensor, probe: Probe | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Logits ``[B, T, V]``; arguments as in `hidden`."""
        hidden_BTD, _ = self._hidden_and_routings(tokens_BT, probe, cache)
        return F.linear(hidden_BTD, self.head_weight)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, probe: Probe | None = None) -> Tensor:
        """Mean next-token cross entropy in nats, a scalar."""
        return self.losses(tokens_BT, targets_BT, probe).cross_entropy

    def losses(self, tokens_BT: Tensor, targets_BT: Tensor, probe: Probe | None = None) -> Losses:
        """Mean next-token cross entropy, and what routers are trained on besides."""
        hidden_BTD, routings = self._hidden_and_routings(tokens_BT, probe)
        cross_entropy = head_cross_entropy(hidden_BTD, self.head_weight, targets_BT, self.config.loss_chunk_tokens)
        return Losses(cross_entropy, mean_routing(routings) if routings else None)
