"""Branches in blocks of a few, each a source once it is complete: what the states of AttnRes and DAR have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from darlit.pathways.contract import PathwayState
from darlit.pathways.depth_history import DepthHistory, Source

StateT = TypeVar("StateT", bound="BlockState")


@dataclass(frozen=True)
class Blocks:
    """Of ``size`` branches each; the last one takes the remainder."""

    num_branches: int
    size: int

    def ends(self, branch: int) -> bool:
        """Whether a block is complete with this branch."""
        return (branch + 1) % self.size == 0 or branch + 1 == self.num_branches

    def reads_of_next(self, branch: int) -> range:
        """The branches of the block after the one that ends with ``branch``, none after the last block.

        No other block is complete when they read.
        """
        return range(branch + 1, min(branch + 1 + self.size, self.num_branches))


@dataclass(kw_only=True)
class BlockState(PathwayState):
    """A history of complete blocks, and the block under way."""

    history: DepthHistory
    partial: Source | None = None
    """None: it is empty."""

    def fork(self: StateT) -> StateT:
        # Recomputation keeps what goes into a region until it runs again in the backward pass. Sources are kept
        # anyway; mixes would be kept besides, 2 J for each layer. So a fork has none, and makes none for the next one.
        return replace(self, history=self.history.in_one_phase())

    def _complete(self, branch: int, entry: Source) -> None:
        """A block ends with this branch, and ``entry`` is what later reads see of it."""
        self.history = self.history.append(entry).mix_ahead(self.pathway.blocks.reads_of_next(branch))
        self.partial = None

    def _finish(self) -> Tensor:
        return self._read(self.pathway.num_branches)
