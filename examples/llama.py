"""A Llama of the ``transformers`` package with another residual pathway; ``pip install transformers``.

The layers, their norms and their weights stay as they are: a decoder layer is two branches, and the pathway takes the
place of its two additions. With ``residual`` the outputs are the model's own; this also works for pretrained weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import darlit.pathways


class PathwayLlama(nn.Module):
    """``llama`` with its residual connections replaced: token ids ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self, llama: LlamaForCausalLM, pathway_name: str, **options: object) -> None:
        super().__init__()
        self.llama = llama
        config = llama.config
        self.pathway = darlit.pathways.build(
            pathway_name,
            num_branches=2 * config.num_hidden_layers,
            width=config.hidden_size,
            norm_eps=config.rms_norm_eps,
            **options,
        )

    def branches(self, embedding: Tensor) -> list[Callable[[Tensor], Tensor]]:
        model = self.llama.model
        positions = torch.arange(embedding.shape[1], device=embedding.device).unsqueeze(0)
        rotary = model.rotary_emb(embedding, position_ids=positions)
        found: list[Callable[[Tensor], Tensor]] = []
        for layer in model.layers:
            attend, feed = layer.self_attn, layer.mlp
            norm_1, norm_2 = layer.input_layernorm, layer.post_attention_layernorm
            found += [
                lambda x, f=attend, norm=norm_1: f(norm(x), position_embeddings=rotary, attention_mask=None)[0],
                lambda x, f=feed, norm=norm_2: f(norm(x)),
            ]
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        embedding = self.llama.model.embed_tokens(tokens)
        state = self.pathway.start(embedding)
        for i, branch in enumerate(self.branches(embedding)):
            state.write(i, branch(state.read(i)))
        return self.llama.lm_head(self.llama.model.norm(state.finish()))


def small_llama() -> LlamaForCausalLM:
    """Random weights, a few hundred thousand parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    llama, tokens = small_llama(), torch.arange(40).remainder(7).view(2, 20)
    with torch.no_grad():
        own = llama(tokens).logits
        for name in darlit.pathways.names():
            difference = (PathwayLlama(llama, name)(tokens) - own).abs().max()
            print(f"{name:18} largest difference of a logit to Llama's own residual: {difference:.1e}")


if __name__ == "__main__":
    main()
