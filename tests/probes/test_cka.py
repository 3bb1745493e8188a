"""Linear CKA against dense formulas in float64, its limits, and its independence from batches and memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from darlit.probes import cka
from darlit.probes.cka import CrossCovariance, cka_map, passes
from darlit.probes.states import record
from probes.models import CONFIG, build, tokens


def dense_cka(x_ND: Tensor, y_ND: Tensor) -> float:
    """From the N x N Gram matrices with a centring matrix, HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), in numpy."""
    x, y = x_ND.double().numpy(), y_ND.double().numpy()
    centre = np.eye(len(x)) - np.full((len(x), len(x)), 1 / len(x))
    gram_x, gram_y = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    return float((gram_x * gram_y).sum() / math.sqrt((gram_x**2).sum() * (gram_y**2).sum()))


def streamed_cka(x_ND: Tensor, y_ND: Tensor, batch: int) -> float:
    sums = []
    for left_ND, right_ND in ((x_ND, y_ND), (x_ND, x_ND), (y_ND, y_ND)):
        covariance = CrossCovariance((left_ND.shape[1], right_ND.shape[1]))
        for left, right in zip(left_ND.split(batch), right_ND.split(batch), strict=True):
            covariance.add(left, right)
        sums.append(covariance.sum_FG.norm())
    return (sums[0].square() / (sums[1] * sums[2])).item()


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


@pytest.mark.parametrize("batch", [1, 7, 64, 200])
def test_equals_the_dense_formula_for_any_batches(batch):
    x = randn(200, 8, seed=0) @ randn(8, 8, seed=1) + 50  # a mean far from zero must not cost digits
    y = torch.tanh(x[:, :5] - 50) + 0.3 * randn(200, 5, seed=2) - 20
    assert abs(streamed_cka(x, y, batch) - dense_cka(x, y)) < 1e-10


def test_one_for_a_rotated_and_scaled_copy():
    x = randn(300, 12, seed=0) @ randn(12, 12, seed=1)
    rotation, _ = torch.linalg.qr(randn(12, 12, seed=2))
    assert abs(streamed_cka(x, 3.7 * x @ rotation + 5, 50) - 1) < 1e-12


def test_independent_gaussians_are_near_zero():
    """E ||X^T Y||_F^2 = N D^2 and ||X^T X||_F^2 = N^2 D (1 + D / N): about D / (N + D)."""
    width, number = 16, 4096
    value = streamed_cka(randn(number, width, seed=0), randn(number, width, seed=1), 512)
    assert value == pytest.approx(width / (number + width), rel=0.3)


@pytest.mark.parametrize("arm", ["dar_full", "dar_block", "mhc2"])
def test_a_map_of_two_streams_equals_the_dense_formula(arm):
    model, ids = build(arm), tokens()
    states = record(model, ids)
    result = cka_map(model, [ids])
    assert result.tokens == ids.numel()
    for row in range(len(result.values_RR)):
        for column in range(len(result.values_RR)):
            wanted = dense_cka(states[row, 0].flatten(0, 1), states[column, 1].flatten(0, 1))
            assert abs(result.values_RR[row, column].item() - wanted) < 1e-10


def test_a_single_stream_is_compared_with_itself():
    result = cka_map(build("residual"), [tokens()])
    assert result.streams == (0, 0)
    torch.testing.assert_close(result.values_RR.diagonal(), torch.ones(4, dtype=torch.double), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.values_RR, result.values_RR.T, rtol=0, atol=1e-12)
    assert result.mean_off_diagonal < 0.999


def test_any_two_of_four_streams():
    model, ids = build("mhc4"), tokens()
    states = record(model, ids)
    result = cka_map(model, [ids], streams=(3, 1))
    wanted = dense_cka(states[2, 3].flatten(0, 1), states[1, 1].flatten(0, 1))
    assert abs(result.values_RR[2, 1].item() - wanted) < 1e-10
    with pytest.raises(ValueError, match="streams 0 and 4: the pathway has 4"):
        cka_map(model, [ids], streams=(0, 4))


def test_batches_chunks_and_passes_change_nothing(monkeypatch):
    """Small batches, cut tokens, and sums that hold one row of depths at a time."""
    model, ids = build("dar_full"), tokens()
    whole = cka_map(model, [ids]).values_RR
    monkeypatch.setattr(cka, "CHUNK_TOKENS", 5)
    row_bytes = 4 * CONFIG.width**2 * 8
    calls = []
    for batch, rows in ((1, 1), (2, 2), (3, 4)):
        memory = rows * row_bytes
        batches = ids.split(batch)
        again = cka_map(model, batches, memory_bytes=memory, on_batch=lambda: calls.append(None)).values_RR
        torch.testing.assert_close(again, whole, rtol=0, atol=1e-12)
        assert passes(model, memory) == 4 // rows
        assert len(calls) == 4 // rows * len(batches)
        calls.clear()


def test_memory_does_not_grow_with_tokens(monkeypatch):
    """The sums are all that outlives a batch: their number and size are those of a single batch."""
    made = []
    original = CrossCovariance.__init__

    def counted(self, shape, device="cpu"):
        original(self, shape, device)
        made.append(self.sum_FG.numel())

    monkeypatch.setattr(CrossCovariance, "__init__", counted)
    model = build("dar_full")
    cka_map(model, [tokens(2, 4)])
    few = list(made)
    made.clear()
    cka_map(model, [tokens(2, 4)] * 10)
    assert made == few
    assert sum(few) == (4 * 4 + 2 * 4) * CONFIG.width**2


def test_a_state_that_never_varies_has_no_cka():
    model = build("dar_full", noise=0.0)
    with torch.no_grad():
        model.pathway.beta.logit_GO[:, 1] = -1000.0  # stream 1 takes no output: zeros at every depth but the first
        model.pathway.rho.logit_GO[:] = 1000.0
    result = cka_map(model, [tokens()])
    assert result.values_RR[:, 1:].isnan().all()
    assert result.values_RR[:, 0].isfinite().all()
    assert math.isfinite(result.mean_off_diagonal)
