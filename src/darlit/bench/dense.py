"""DAR and AttnRes as anyone would write them first: stack all sources, RMSNorm, einsum, softmax, einsum at every read.

The tests compare the pathways with these, and the bench measures what they cost. They share parameters with a pathway
and no code.

Shapes: B batch, T token, D width, S sources of a read, M streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from darlit.pathways import Pathway

KEYS_AND_VALUES = {
    "dar": lambda j: (1 - j, j),
    "self_kv": lambda j: (j, j),
    "cross_v": lambda j: (j, 1 - j),
    "fixed_kv": lambda j: (0, 1),
}
"""Route: of target stream j, the stream of its keys and that of its values."""


class Dense(nn.Module):
    """The parameters of a pathway of the families dar and attnres, with the naive state."""

    def __init__(self, pathway: Pathway) -> None:
        super().__init__()
        self.pathway = pathway

    def start(self, embedding: Tensor) -> Any:
        return {"dar": DenseDar, "attnres": DenseAttnRes}[self.pathway.name](self.pathway, embedding)


class DenseDar:
    """History ``[2, S, B, T, D]`` by streams and sources."""

    def __init__(self, pathway: Any, embedding: Tensor) -> None:
        self.pathway, self.options = pathway, pathway.options
        self.entries = [torch.stack([embedding, embedding])]
        self.partial: Tensor | None = None
        self.per_block = 2 * self.options.block_size
        self.first_choice = 1 if self.options.include_partial else min(self.per_block, pathway.num_branches)

    def read(self, branch: int) -> Tensor:
        sources = [
            *self.entries,
            *([self.partial] if self.partial is not None and self.options.include_partial else []),
        ]
        states = torch.stack(sources, dim=1)
        if branch < self.first_choice:
            self.input = states[0, 0]
            return self.input
        queries, mixed = self.pathway.queries_JRD[:, branch - self.first_choice], []
        for j in (0, 1):
            key, value = KEYS_AND_VALUES[self.options.route](j)
            logits = torch.einsum("d,sbtd->sbt", queries[j], self._norm(states[key]))
            mixed.append(torch.einsum("sbt,sbtd->btd", logits.softmax(0), states[value]))
        alpha = self._gate("alpha", branch, self._norm(sources[-1].mean(0)))
        self.input = alpha * mixed[0] + (1 - alpha) * mixed[1]
        return self.input

    def write(self, branch: int, output: Tensor) -> None:
        beta = 2 * self._gate("beta", branch, self._norm(self.input))
        added = torch.stack([beta[..., j : j + 1] * output for j in (0, 1)])
        carried = self.entries[-1] if self.partial is None and self.options.carry_partial else self.partial
        if carried is not None:
            if branch in self.pathway.rho.slot:
                rho = self._gate("rho", branch, self._norm(self.input))
                carried = rho * carried + (1 - rho) * carried.flip(0)
            added = carried + added
        self.partial = added
        if (branch + 1) % self.per_block == 0 or branch + 1 == self.pathway.num_branches:
            self.entries, self.partial = [*self.entries, added], None

    def finish(self) -> Tensor:
        return self.read(self.pathway.num_branches)

    def _gate(self, name: str, branch: int, features: Tensor) -> Tensor:
        gate = getattr(self.pathway, name)
        logit = gate.logit_GO[gate.slot[branch]]
        if self.options.gates == "dynamic":
            logit = logit + torch.einsum("btd,od->bto", features, gate.projection_GOD[gate.slot[branch]])
        return torch.sigmoid(logit)

    def _norm(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.pathway.norm_eps).sqrt()


class DenseAttnRes:
    """History ``[S, B, T, D]``."""

    def __init__(self, pathway: Any, embedding: Tensor) -> None:
        self.pathway, self.options = pathway, pathway.options
        self.entries = [embedding]
        self.partial: Tensor | None = None

    def read(self, branch: int) -> Tensor:
        states = torch.stack([*self.entries, *([] if self.partial is None else [self.partial])])
        keys = states / (states.pow(2).mean(-1, keepdim=True) + self.pathway.norm_eps).sqrt()
        if self.options.sep_v:
            states = torch.einsum("eij,ebtj->ebti", self.pathway.value_projection_EDD[: len(states)], states)
        # The first read sees the embedding alone, whatever its query.
        logits = torch.einsum("sbtd,jd->jsbt", keys, self.pathway.queries_JRD[:, max(branch - 1, 0)])
        return torch.einsum("jsbt,sbtd->jbtd", logits.softmax(1), states).mean(0)

    def write(self, branch: int, output: Tensor) -> None:
        total = output if self.partial is None else self.partial + output
        self.partial = total
        per_block = 2 * self.options.block_size or 1
        if (branch + 1) % per_block == 0 or branch + 1 == self.pathway.num_branches:
            self.entries, self.partial = [*self.entries, total], None

    def finish(self) -> Tensor:
        return self.read(self.pathway.num_branches)
