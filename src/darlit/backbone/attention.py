"""The attention branch: pre-norm, causal multi-head attention with QK-norm and RoPE.

Shapes: B batch, T token, S token so far, D width, H head, E = D / H.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from darlit.backbone.cache import LayerCache
from darlit.backbone.config import BackboneConfig
from darlit.backbone.rope import rotate


class Attention(nn.Module):
    """``[B, T, D] -> [B, T, D]``; the residual connection is the pathway's business."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.query_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.key_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x_BTD: Tensor, rope: Tensor, visible: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend to the tokens of ``x_BTD`` and, with a cache, to all tokens before them, which it then holds too.

        ``visible``, bool ``[..., T, S]``, says which tokens each one sees; None: itself and those before it.
        """
        heads = self.qkv(self.norm(x_BTD)).unflatten(-1, (3, self.num_heads, -1))
        query_BHTE, key_BHTE, value_BHTE = heads.permute(2, 0, 3, 1, 4)
        query_BHTE = rotate(self.query_norm(query_BHTE), rope).to(value_BHTE.dtype)
        key_BHTE = rotate(self.key_norm(key_BHTE), rope).to(value_BHTE.dtype)
        if cache is not None:
            key_BHTE, value_BHTE = cache.extend(key_BHTE, value_BHTE)
        mixed_BHTE = F.scaled_dot_product_attention(
            query_BHTE, key_BHTE, value_BHTE, attn_mask=visible, is_causal=visible is None
        )
        return self.out(mixed_BHTE.transpose(1, 2).flatten(-2))
