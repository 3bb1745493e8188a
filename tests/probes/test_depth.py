"""Depth weights and gates: against the equations, at the start, and streamed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from darlit.errors import DarlitError
from darlit.pathways.table import ARMS
from darlit.probes.depth import DepthProbe, depth_profile
from darlit.probes.states import record
from probes.models import CONFIG, build, tokens

SOFTMAX_ARMS = [arm for arm, (name, _) in ARMS.items() if name in ("dar", "attnres", "transparent")]


@pytest.mark.parametrize("arm", SOFTMAX_ARMS)
def test_weights_sum_to_one_for_every_branch_and_stream(arm):
    model = build(arm)
    profile = depth_profile(model, [tokens()])
    per_read = {"dar": 2, "attnres": getattr(model.pathway.options, "num_queries", 1), "transparent": 1}
    reads = CONFIG.num_layers if model.pathway.name == "transparent" else CONFIG.num_branches + 1
    assert len(profile.reads) == reads * per_read[model.pathway.name]
    for read in profile.reads:
        assert sum(read.weights) == pytest.approx(1, abs=1e-12)
        assert 0 <= read.entropy <= math.log(len(read.weights)) + 1e-12
        assert 1 / len(read.weights) - 1e-12 <= read.largest_weight <= 1 + 1e-12


@pytest.mark.parametrize("arm", ["dar_full", "dar_block", "attnres_full", "attnres_block", "transparent"])
def test_a_uniform_start_has_the_entropy_ln_s(arm):
    for read in depth_profile(build(arm, noise=0.0), [tokens()]).reads:
        assert read.entropy == pytest.approx(math.log(len(read.weights)), abs=1e-12)
        assert read.largest_weight == pytest.approx(1 / len(read.weights), abs=1e-12)


def softmax_of(query_D: Tensor, keys: list[Tensor], eps: float) -> Tensor:
    normed = [key * (key.square().mean(-1, keepdim=True) + eps).rsqrt() for key in keys]
    return torch.stack([(query_D * key).sum(-1) for key in normed], -1).softmax(-1)


def test_weights_of_dar_equal_the_oracle():
    """Full DAR: a^j = softmax <w^j, RMSNorm(H^{1-j})>; a feed-forward also sees the partial beta^j y."""
    model, ids = build("dar_full"), tokens()
    states, outputs = record(model, ids), []
    hooks = [
        layer.attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        for layer in model.layers
    ]
    profile = depth_profile(model, [ids])
    for hook in hooks:
        hook.remove()
    pathway = model.pathway
    for read in (read for read in profile.reads if read.read > 0):
        opposite = 1 - read.target
        keys = [states[depth, opposite] for depth in range(read.read // 2 + 1)]
        if read.read % 2:
            keys.append(2 * pathway.beta.logit_GO[read.read - 1, opposite].sigmoid() * outputs[read.read // 2])
        weights_BTS = softmax_of(pathway.queries_JRD[read.target, read.read - 1], keys, pathway.norm_eps)
        torch.testing.assert_close(torch.tensor(read.weights).double(), weights_BTS.mean((0, 1)), rtol=0, atol=1e-6)
        assert read.entropy == pytest.approx(torch.special.entr(weights_BTS).sum(-1).mean().item(), abs=1e-10)
        assert read.largest_weight == pytest.approx(weights_BTS.amax(-1).mean().item(), abs=1e-10)


def test_weights_of_attention_residuals_equal_the_oracle():
    model, ids = build("attnres_full"), tokens()
    states = record(model, ids)
    for read in depth_profile(model, [ids]).reads[1:]:
        keys = [states[depth, 0] for depth in range(read.read + 1)]
        weights_BTS = softmax_of(model.pathway.queries_JRD[0, read.read - 1], keys, model.pathway.norm_eps)
        assert read.weights == pytest.approx(weights_BTS.mean((0, 1)).tolist(), abs=1e-10)


@pytest.mark.parametrize("arm", ["dar_full", "mhc2", "hc2", "denseformer"])
def test_batches_change_nothing(arm):
    model, ids = build(arm), tokens()
    whole, parts = depth_profile(model, [ids]), depth_profile(model, ids.split(1))
    assert whole.tokens == parts.tokens == ids.numel()
    for one, other in zip([*whole.reads, *whole.gates], [*parts.reads, *parts.gates], strict=True):
        ours, theirs = (getattr(item, "weights", None) or item.values for item in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_gates_are_those_of_the_parameters():
    model = build("dar_full")
    gates = {(gate.name, gate.branch): gate for gate in depth_profile(model, [tokens()]).gates}
    beta = 2 * model.pathway.beta.logit_GO.sigmoid()
    for branch in range(CONFIG.num_branches):
        assert gates["beta", branch].values == pytest.approx(beta[branch].tolist(), abs=1e-12)
        assert gates["beta", branch].labels == ["0", "1"]
    assert gates["alpha", CONFIG.num_branches].values == pytest.approx(
        model.pathway.alpha.logit_GO[-1].sigmoid().tolist()
    )
    assert {name for name, _ in gates} == {"alpha", "beta", "rho"}


def test_gates_of_every_token_are_averaged():
    probe = DepthProbe()
    value_BTNN = torch.arange(2 * 3 * 2 * 2, dtype=torch.double).view(2, 3, 2, 2)
    probe.gate("res", 1, value_BTNN[:1])
    probe.gate("res", 1, value_BTNN[1:])
    (gate,) = probe.profile(num_branches=2, tokens=6).gates
    assert gate.labels == ["0,0", "0,1", "1,0", "1,1"]
    assert gate.values == pytest.approx(value_BTNN.mean((0, 1)).flatten().tolist())


def test_a_running_sum_is_refused_with_a_sentence():
    with pytest.raises(DarlitError, match="Standard residual has neither"):
        depth_profile(build("residual"), [tokens()])
