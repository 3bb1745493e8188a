"""Decoding with a key-value cache equals the full forward pass, in every arm and however the tokens are cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from darlit import pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.backbone.cache import KeyValueCache
from darlit.errors import DarlitError
from darlit.generation import Sampling, generate
from darlit.pathways.table import ARMS

TOKENS = 64
CONFIG = BackboneConfig(vocab_size=61, num_layers=3, width=32, num_heads=4, ffn_width=48, sequence_length=TOKENS)


SEPARATOR = 7


def build(arm: str, config: BackboneConfig = CONFIG) -> Transformer:
    """A model whose every weight is large enough to matter, the pathway's moved away from its start."""
    torch.manual_seed(0)
    name, options = ARMS[arm]
    model = Transformer(config, pathways.build(name, num_branches=config.num_branches, width=config.width, **options))
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


def documents() -> torch.Tensor:
    """Two sequences whose documents end at different places: amid the prompt of 20 and after it, twice in a row."""
    ids = tokens().masked_fill(tokens() == SEPARATOR, SEPARATOR + 1)
    ids[0, [5, 19, 20, 40]] = SEPARATOR
    ids[1, [0, 33, 62]] = SEPARATOR
    return ids


@pytest.mark.parametrize("arm", ARMS)
def test_documents_stay_apart_when_decoding(arm: str) -> None:
    """The cached keys of earlier documents are not attended to, wherever a separator falls."""
    config = replace(CONFIG, document_separator=SEPARATOR)
    model, ids = build(arm, config), documents()
    cache = KeyValueCache(config, batch_size=2, like=model.head_weight)
    with torch.no_grad():
        full_BTV = model(ids)
        parts = [model(ids[:, :20], cache=cache)]
        parts += [model(ids[:, step : step + 1], cache=cache) for step in range(20, TOKENS)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full_BTV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("cut", [1, 6, 19, 20, 21, 63])
def test_chunks_of_documents_equal_the_full_forward(cut: int, experts: int) -> None:
    """Prefilled in chunks of 13 tokens after a first one of any length, dense and with experts."""
    sparse = {"num_experts": experts, "experts_per_token": 2, "experts": "reference"}
    config = replace(CONFIG, document_separator=SEPARATOR, **sparse)  # type: ignore[arg-type]
    model, ids = build("dar_block", config).double(), documents()
    cache = KeyValueCache(config, batch_size=2, like=model.head_weight)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in ids.tensor_split(tuple(range(cut, TOKENS, 13)), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 31, 63, 64])
def test_generation_of_documents_takes_the_token_that_the_full_forward_does(length: int) -> None:
    """Greedy, from prompts of any length, past the end of the window, through separators that the model makes."""
    config = replace(CONFIG, document_separator=SEPARATOR)
    model = build("dar_full", config).double().eval()
    with torch.no_grad():
        model.head_weight[SEPARATOR] *= 3  # so that documents end
    prompt = documents()[0, :length].tolist()
    made = list(islice(generate(model, prompt, Sampling(temperature=0), seed=0), 2 * TOKENS))
    assert SEPARATOR in made
    window = list(prompt)
    for token in made:
        if len(window) > TOKENS:
            window = window[-TOKENS // 2 :]
        with torch.no_grad():
            assert token == int(model(torch.tensor([window]))[0, -1].argmax())
        window.append(token)
