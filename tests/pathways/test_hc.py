"""Hyper-Connections against lucidrains' ``hyper-connections`` package.

The two agree in these settings, and the test uses them: one fraction, one input view, tanh on, its RMSNorm with the
initial gain of one (ours has none), and eps 0 on our side (its norm divides by the norm itself). The streams that the
package folds into the batch are the tuple here.
"""

from __future__ import annotations

import pytest
import torch
from hyper_connections.hyper_connections import HyperConnections as Lucidrains
from hyper_connections.hyper_connections import get_expand_reduce_stream_functions
from torch.func import functional_call

from darlit.pathways import Probe
from pathways.cases import BRANCHES, WIDTH, assert_same, drive, make, plain_branches, randn, stir


def lucidrains_parameters(pathway, branch, dynamic):
    """Our parameters under the package's names."""
    columns = [pathway.pre_IN[branch].unsqueeze(-1), pathway.res_INN[branch]]
    n = pathway.num_streams
    parameters = {"static_alpha": torch.cat(columns, dim=-1), "static_beta": pathway.post_IN[branch]}
    zeros = torch.zeros(n + 2, WIDTH, dtype=torch.double)
    rows = pathway.projection_ICD[branch] if dynamic else zeros
    parameters["dynamic_alpha_fn"] = torch.cat([rows[:1], rows[2:]]).T
    parameters["dynamic_beta_fn"] = rows[1]
    if dynamic:
        parameters["dynamic_alpha_scale"] = pathway.alpha_scale_I[branch]
        parameters["dynamic_beta_scale"] = pathway.beta_scale_I[branch]
    return parameters


class Connected(torch.nn.Module):
    """The package's module around a branch that is given at call time."""

    def __init__(self, n):
        super().__init__()
        self.connection = Lucidrains(n, dim=WIDTH, layer_index=0, tanh=True).double()

    def forward(self, streams, branch):
        x, add = self.connection(streams)
        return x, add(branch(x))


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("connections", ["static", "dynamic"])
def test_hyper_connections_equals_lucidrains(n, connections):
    pathway = stir(make("hc2", num_streams=n, connections=connections, norm_eps=0.0))
    embedding = randn(2, 5, WIDTH, seed=1).requires_grad_()
    branches, weights = plain_branches(BRANCHES)
    ours = drive(pathway, embedding, branches)

    expand, reduce = get_expand_reduce_stream_functions(n)
    module, streams, inputs = Connected(n), expand(embedding), []
    for i, branch in enumerate(branches):
        named = lucidrains_parameters(pathway, i, connections == "dynamic")
        parameters = {f"connection.{name}": value for name, value in named.items()}
        x, streams = functional_call(module, parameters, (streams, branch))
        inputs.append(x)
    leaves = [*pathway.parameters(), embedding, *weights]
    assert_same([*ours[0], ours[1]], [*inputs, reduce(streams)], leaves, tolerance=1e-9)


def test_forced_swap_of_two_streams():
    """Mixing matrix computed but not applied. A zero branch leaves the mixing alone."""
    pathway = make("hc2_static")
    with torch.no_grad():
        pathway.post_IN[0].copy_(torch.tensor([1.0, 3.0]))
        pathway.res_INN[1].copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    seen = {}

    class Streams(Probe):
        def source(self, depth, stream, value_BTD):
            seen[depth, stream] = value_BTD
            return value_BTD

    embedding, step = torch.ones(1, 1, WIDTH, dtype=torch.double), torch.full((1, 1, WIDTH), 0.5, dtype=torch.double)
    zero = torch.zeros_like
    drive(pathway, embedding, [lambda x: step, *[zero] * (BRANCHES - 1)], Streams())
    assert torch.equal(seen[1, 0], embedding + 3 * step)
    assert torch.equal(seen[1, 1], embedding + step)
