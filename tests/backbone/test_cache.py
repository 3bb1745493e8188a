"""Decoding with a key-value cache equals the full forward pass, in every arm and however the tokens are cut."""

from __future__ import annotations

import pytest
import torch

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.backbone.cache import KeyValueCache
from darlit.errors import DarlitError
from darlit.pathways.table import ARMS

TOKENS = 64
CONFIG = BackboneConfig(vocab_size=61, num_layers=3, width=32, num_heads=4, ffn_width=48, sequence_length=TOKENS)


def build(arm: str) -> Transformer:
    """A model whose every weight is large enough to matter, the pathway's moved away from its start."""
    torch.manual_seed(0)
    name, options = ARMS[arm]
    model = Transformer(CONFIG, pathways.build(name, num_branches=CONFIG.num_branches, width=CONFIG.width, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


def tokens(length: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arm", ARMS)
def test_one_token_at_a_time_equals_the_full_forward(arm: str) -> None:
    model, ids = build(arm), tokens()
    with torch.no_grad():
        full_BTV = model(ids)
        cache = KeyValueCache(CONFIG, batch_size=2, like=model.head_weight)
        for step in range(TOKENS):
            logits_B1V = model(ids[:, step : step + 1], cache=cache)
            torch.testing.assert_close(logits_B1V[:, 0], full_BTV[:, step], rtol=1e-5, atol=1e-5)
    assert cache.length == TOKENS


@pytest.mark.parametrize("cuts", [(7,), (7, 8), (1, 30, 63)])
def test_any_cut_equals_the_full_forward(cuts: tuple[int, ...]) -> None:
    """A prompt at once, and chunks of several tokens behind others: each token still sees no later one."""
    model, ids = build("dar_full").double(), tokens()
    cache = KeyValueCache(CONFIG, batch_size=2, like=model.head_weight)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in ids.tensor_split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=0, atol=1e-12)


def test_a_full_cache_is_refused() -> None:
    model, cache = build("residual"), KeyValueCache(CONFIG, batch_size=2, like=torch.empty(0))
    with torch.no_grad():
        model(tokens(), cache=cache)
        with pytest.raises(DarlitError, match=r"65 tokens .* backbone.sequence_length=64"):
            model(tokens(1), cache=cache)
