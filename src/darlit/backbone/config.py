"""The shape of the shared backbone, as one dataclass that YAML, code and checkpoints agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from darlit.errors import DarlitError
from darlit.fields import check_fields, check_option

RUNTIME_FIELDS = ("implementation", "experts", "checkpoint_layers", "loss_chunk_tokens")
"""What changes speed and memory only: a checkpoint loads whatever these are."""


@dataclass(frozen=True)
class BackboneConfig:
    """A decoder-only Transformer: RMSNorm, RoPE, QK-norm, SwiGLU, no biases.

    Args:
        vocab_size: rows of the embedding; token ids must be below it. None: those of the data, where there are data.
        num_layers: L; each layer is an attention branch and a feed-forward branch.
        width: D, channels of the residual stream.
        num_heads: attention heads; width must be a multiple.
        ffn_width: hidden channels of SwiGLU, or of one expert.
        num_experts: E, experts of a sparse feed-forward branch; 0: dense.
        experts_per_token: k, the experts that a token is sent to, all of them always (dropless).
        normalize_expert_weights: divide a token's k routing weights by their sum; OLMoE does not.
        load_balancing_weight: coefficient of the load-balancing loss, in training only.
        router_z_weight: coefficient of the router's z-loss, in training only.
        sequence_length: longest sequence in tokens; the data's length is linked to it.
        tie_embeddings: the head uses the embedding's weight.
        norm_eps: eps of every RMSNorm, the pathways' key norms included, the same for all arms. Small, because a
            read that is the mean of S sources feels an eps S^2 times larger (docs/pathways.md).
        rope_base: base of the rotary angles.
        init_std: standard deviation of the normal initialisation; branch outputs get init_std / sqrt(2 L).
        document_separator: the token id that ends a document, to keep attention within documents; null lets it
            cross them.
        loss_chunk_tokens: tokens whose logits exist at one time in the training loss.
        experts: what computes them: torch (sort and grouped products), megablocks (its dMoE), or reference (a loop).
        implementation: what computes depth reads and stream writes; auto takes the fastest that is proven here.
        checkpoint_layers: recompute each layer in the backward pass instead of keeping its activations.
    """

    vocab_size: int | None = None
    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    ffn_width: int = 384
    num_experts: int = 0
    experts_per_token: int = 8
    normalize_expert_weights: bool = False
    load_balancing_weight: float = 0.01
    router_z_weight: float = 0.001
    sequence_length: int = 128
    tie_embeddings: bool = True
    norm_eps: float = 1e-10
    rope_base: float = 10_000.0
    init_std: float = 0.02
    document_separator: int | None = None
    loss_chunk_tokens: int = 4096
    experts: Literal["torch", "megablocks", "reference"] = "torch"
    implementation: Literal["auto", "reference", "cpu", "triton"] = "auto"
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "backbone.")
        check_option("backbone.vocab_size", self.vocab_size, self.rows > 0, "above 0, or null")
        positive = ("num_layers", "width", "num_heads", "ffn_width", "sequence_length")
        for name in (*positive, "loss_chunk_tokens", "norm_eps", "rope_base", "init_std"):
            value = getattr(self, name)
            check_option(f"backbone.{name}", value, value > 0, "above 0")
        check_option("backbone.norm_eps", self.norm_eps, self.norm_eps < 1, "above 0 and below 1")
        for name in ("num_experts", "load_balancing_weight", "router_z_weight"):
            value = getattr(self, name)
            check_option(f"backbone.{name}", value, value >= 0, "at least 0")
        separator = self.document_separator
        in_vocabulary = separator is None or 0 <= separator < self.rows
        check_option("backbone.document_separator", separator, in_vocabulary, "a token id below vocab_size, or null")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise DarlitError(
                f"backbone.experts_per_token={self.experts_per_token} is not allowed; it must be between 1 and "
                f"backbone.num_experts={self.num_experts}"
            )
        if self.width % self.num_heads:
            raise DarlitError(
                f"backbone.width={self.width} is not divisible by backbone.num_heads={self.num_heads}; "
                f"choose a width that is a multiple of {self.num_heads}"
            )
        if self.head_width % 2:
            raise DarlitError(
                f"backbone.width={self.width} with backbone.num_heads={self.num_heads} gives heads of "
                f"{self.head_width} channels; RoPE needs an even number"
            )

    @property
    def rows(self) -> int:
        """Rows of the embedding and of the head; bytes and their separator where nothing else is known."""
        return 257 if self.vocab_size is None else self.vocab_size

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def num_branches(self) -> int:
        return 2 * self.num_layers
