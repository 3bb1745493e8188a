"""Recording and replacing states through the one probe, in every arm."""

from __future__ import annotations

import pytest
import torch

from darlit.pathways.table import ARMS
from darlit.probes.states import Replacement, depths_and_streams, record
from probes.models import build, tokens

DEPTHS_AND_STREAMS = {
    "residual": (4, 1),
    "attnres_full": (7, 1),
    "attnres_block": (3, 1),
    "dar_full": (4, 2),
    "dar_block": (3, 2),
    "mhc4": (4, 4),
    "denseformer": (4, 1),
}


@pytest.mark.parametrize("arm", DEPTHS_AND_STREAMS)
def test_depths_and_streams(arm):
    assert depths_and_streams(build(arm)) == DEPTHS_AND_STREAMS[arm]


@pytest.mark.parametrize("arm", ARMS)
def test_replacing_states_by_themselves_changes_nothing(arm):
    model, ids = build(arm), tokens()
    with torch.no_grad():
        states = record(model, ids)
        assert torch.equal(model.hidden(ids, Replacement(states)), model.hidden(ids, Replacement({})))
        torch.testing.assert_close(model.hidden(ids, Replacement(states)), model.hidden(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("arm", ["residual", "attnres_block", "dar_full", "dar_block", "mhc2", "denseformer"])
def test_a_replacement_leaves_earlier_depths_and_changes_later_ones(arm):
    model, ids = build(arm), tokens()
    clean = record(model, ids)
    place = (1, 0)

    class ReplaceAndRecord(Replacement):
        def __init__(self, states):
            super().__init__(states)
            self.seen = {}

        def source(self, depth, stream, value_BTD):
            self.seen[depth, stream] = value_BTD
            return super().source(depth, stream, value_BTD)

    probe = ReplaceAndRecord({place: clean[place].roll(1, dims=0)})
    with torch.no_grad():
        model.hidden(ids, probe)
    for seen_at, state in probe.seen.items():
        changed = not torch.equal(state, clean[seen_at])
        assert changed == (seen_at[0] > place[0]), seen_at


def test_recorded_states_keep_no_graph():
    states = record(build("dar_full"), tokens())
    assert not any(state.requires_grad for state in states.values())
