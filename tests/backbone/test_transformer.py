"""The backbone: causality, initialisation shared by all arms, loss in chunks, recomputation, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from darlit import catalog, pathways
from darlit.backbone import BackboneConfig, Transformer
from darlit.backbone.loss import head_cross_entropy
from darlit.backbone.rope import rotary_table, rotate
from darlit.errors import DarlitError

CONFIG = BackboneConfig(vocab_size=97, num_layers=3, width=32, num_heads=4, ffn_width=48, sequence_length=24)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: catalog.arm(name, 3) for name in ("residual", "attnres_full", "attnres_block", "dar_full", "dar_block")},
    "dar_dynamic": ("dar", {"gates": "dynamic"}),
}


def build(arm: str, config: BackboneConfig = CONFIG, seed: int = 0) -> Transformer:
    name, options = ARMS[arm]
    torch.manual_seed(seed)
    pathway = pathways.build(
        name, num_branches=config.num_branches, width=config.width, norm_eps=config.norm_eps, **options
    )
    return Transformer(config, pathway)


def tokens(batch: int = 2, length: int = 25) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def perturb_pathway(model: Transformer) -> None:
    """Move the pathway away from its neutral start, so that a test sees all of it."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.pathway.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)


@pytest.mark.parametrize("arm", ARMS)
def test_no_logit_depends_on_a_later_token(arm: str) -> None:
    model = build(arm).double()
    perturb_pathway(model)
    ids = tokens(1, 24)
    changed = ids.clone()
    changed[0, 15] = (changed[0, 15] + 1) % CONFIG.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[0, :15], after[0, :15])
    assert not torch.allclose(before[0, 15:], after[0, 15:])


def test_all_arms_start_from_the_same_backbone() -> None:
    reference = dict(build("residual").named_parameters())
    for arm in ARMS:
        for name, parameter in build(arm).named_parameters():
            if not name.startswith("pathway"):
                assert torch.equal(parameter, reference[name]), (arm, name)


@pytest.mark.parametrize("arm", ARMS)
def test_initial_logits_equal_the_standard_residual(arm: str) -> None:
    ids = tokens()
    difference = (build(arm)(ids[:, :-1]) - build("residual")(ids[:, :-1])).abs().max()
    assert difference < 1e-4


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    ids = tokens(8)
    for seed in range(10):
        loss = build("dar_full", seed=seed).loss(ids[:, :-1], ids[:, 1:])
        assert loss.item() == pytest.approx(math.log(CONFIG.vocab_size), rel=0.02)


def test_initial_standard_deviations() -> None:
    model = build("residual", replace(CONFIG, width=256, ffn_width=512))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = 0.02 / math.sqrt(6) if name.endswith(".out.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


@pytest.mark.parametrize("arm", ARMS)
def test_recomputing_layers_changes_no_gradient(arm: str) -> None:
    ids = tokens()
    gradients = []
    for recompute in (False, True):
        model = build(arm, replace(CONFIG, checkpoint_layers=recompute)).double()
        perturb_pathway(model)
        for _ in range(2):  # two forwards in a row, gradients accumulated
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("arm", ARMS)
def test_two_micro_batches_give_the_gradient_of_one_batch(arm: str) -> None:
    ids = tokens(4)
    whole, halves = build(arm).double(), build(arm).double()
    perturb_pathway(whole)
    perturb_pathway(halves)
    whole.loss(ids[:, :-1], ids[:, 1:]).backward()
    for half in ids.chunk(2):
        (halves.loss(half[:, :-1], half[:, 1:]) / 2).backward()
    for (name, expected), parameter in zip(whole.named_parameters(), halves.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_targets_that_do_not_count_are_not_in_the_mean(chunk: int) -> None:
    """-100 leaves value and gradient those of the other targets, also where a chunk holds nothing else."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 20, 6, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator)
    targets = torch.randint(0, 11, (2, 20), generator=generator)
    targets[0, 3:17] = -100
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    loss = head_cross_entropy(hidden, weight, targets, chunk)
    (gradient,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert head_cross_entropy(hidden, weight, torch.full_like(targets, -100), chunk) == 0
    with pytest.raises(IndexError):
        head_cross_entropy(hidden, weight, targets.clamp(min=-1), chunk)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_loss_equals_plain_cross_entropy(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (2, 9), generator=generator)
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    expected_gradients = torch.autograd.grad(expected, (hidden, weight))
    loss = head_cross_entropy(hidden, weight, targets, chunk)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for actual, wanted in zip(torch.autograd.grad(loss, (hidden, weight)), expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-14)


def test_the_loss_never_keeps_logits_of_all_tokens() -> None:
    """Saved for backward: nothing of size tokens x vocabulary."""
    hidden = torch.randn(1, 256, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        loss = head_cross_entropy(hidden, weight, torch.zeros(1, 256, dtype=torch.long), chunk_tokens=32)
    loss.backward()
    assert max(saved) <= weight.numel()


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    table = rotary_table(16, 8, 10_000.0)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    queries, keys = rotate(query.expand(1, 1, 16, 8), table), rotate(key.expand(1, 1, 16, 8), table)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm(dim=-1).expand(1, 1, 16))
    scores = (queries @ keys.transpose(-1, -2))[0, 0]
    for distance in range(4):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[3, 0], scores[0, 0])


@pytest.mark.parametrize("arm", ["residual", "dar_block"])
def test_documents_in_one_sequence_do_not_see_each_other(arm: str) -> None:
    """With the mask, the second document's logits are those it has when the first one is another."""
    ids = tokens(1, 24)
    ids[ids == 5] = 6
    ids[0, 9] = 5
    other = ids.clone()
    other[0, :9] = (other[0, :9] + 1) % 5
    masked = build(arm, replace(CONFIG, document_separator=5)).double()
    open_ = build(arm).double()
    assert torch.equal(masked(ids)[0, 10:], masked(other)[0, 10:])
    assert not torch.allclose(open_(ids)[0, 10:], open_(other)[0, 10:])
    torch.testing.assert_close(masked(ids)[0, :10], open_(ids)[0, :10], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 30}, ["backbone.width=30", "backbone.num_heads=4", "multiple of 4"]),
        ({"width": 12}, ["backbone.width=12", "even"]),
        ({"num_layers": 0}, ["backbone.num_layers=0", "above 0"]),
        ({"norm_eps": 0.0}, ["backbone.norm_eps=0.0", "above 0"]),
    ],
)
def test_bad_shapes_name_option_value_and_remedy(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DarlitError) as caught:
        replace(CONFIG, **change)
    assert all(word in str(caught.value) for word in words)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(DarlitError, match=r"25 tokens .* backbone.sequence_length=24"):
        build("residual")(tokens())


def test_a_pathway_for_another_backbone_is_refused() -> None:
    with pytest.raises(DarlitError, match="8 branches of width 32"):
        Transformer(CONFIG, pathways.build("dar", num_branches=8, width=32))
