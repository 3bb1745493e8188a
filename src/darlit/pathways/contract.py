"""The interface between branches and residual pathways: four methods.

    state = pathway.start(embedding)          # [B, T, D]
    for i, branch in enumerate(branches):     # attention, feed-forward, attention, ...
        state.write(i, branch(state.read(i)))
    hidden = state.finish()                   # [B, T, D], before the final norm

A branch never knows its pathway and a pathway never knows what a branch computes. The pathway module holds
parameters only; everything of one forward pass is in the state that ``start`` makes, so two forwards in a row,
compilation and recomputation are safe. A region that may run twice (activation checkpointing) changes a `fork` of
the state and returns it. Reading is pure: ``read(i)`` and ``finish()`` may be called again before the next write.

Shapes: B batch, T token, D width, S sources of one read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from darlit.errors import DarlitError
from darlit.fields import check_fields, check_option
from darlit.ops.dispatch import choose
from darlit.pathways.cost import Cost

BRANCHES_PER_LAYER = 2
"""A Transformer layer is an attention branch, then a feed-forward branch."""

StateT = TypeVar("StateT", bound="PathwayState")
ValueT = TypeVar("ValueT")
Streams = tuple[Tensor, ...]
"""The states of all streams at one depth, each ``[B, T, D]``; one stream: a tuple of one."""
DEFINED: dict[str, type[Pathway]] = {}
"""Families by name: a subclass of `Pathway` with a ``name`` is added when it is defined, wherever that is."""


class Probe:
    """Sees one forward pass from inside; pass one to `Pathway.start`. Without a probe nothing is computed for it.

    Subclass and override what is needed; each default does nothing. Tensors arrive attached to the graph, so
    run under ``torch.no_grad`` or detach.
    """

    def source(self, depth: int, stream: int, value_BTD: Tensor) -> Tensor:
        """A stream's state at a depth (0 is the embedding); what is returned is used in its place."""
        del depth, stream
        return value_BTD

    def depth_weights(self, read: int, target: int, weights_BTS: Tensor) -> None:
        """Softmax weights over the S sources of a read; ``read`` is the branch index, or the number of branches
        for the final read; ``target`` counts the queries of that read (two in DAR)."""

    def gate(self, name: str, branch: int, value: Tensor) -> None:
        """A gate's value (any shape) at a branch: alpha, beta, rho, ... as the pathway names them."""


def observe(probe: Probe | None, depth: int, streams: Streams) -> Streams:
    """Show the streams' states at a depth to the probe, if there is one, and take what it returns."""
    if probe is None:
        return streams
    return tuple(probe.source(depth, stream, value_BTD) for stream, value_BTD in enumerate(streams))


class OncePerPass(Generic[ValueT]):
    """Gates of all branches, made together; and again where gradients are enabled only after the start."""

    def __init__(self, make: Callable[[], ValueT]) -> None:
        self.make, self.trained, self.value = make, torch.is_grad_enabled(), make()

    def get(self) -> ValueT:
        if not self.trained and torch.is_grad_enabled():
            self.trained, self.value = True, self.make()
        return self.value


@dataclass(frozen=True)
class PathwayOptions:
    """Base of every pathway's options: a frozen dataclass whose fields all have defaults.

    Types are checked here, and that numbers are finite; subclasses extend ``__post_init__`` with their own ranges.
    """

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(kw_only=True)
class PathwayState(ABC):
    """What one forward pass knows. Subclasses implement ``_read``, ``_write`` and ``_finish``.

    Raises:
        DarlitError: an embedding of another width than the pathway's, or that holds no floating-point numbers.
    """

    pathway: Any
    probe: Probe | None
    embedding_BTD: Tensor
    """Every branch output must have its shape and dtype."""
    writes: int = 0
    reads: int = 0
    """Branches whose input was returned; a write needs its own read before it."""

    def __post_init__(self) -> None:
        self.pathway.check_embedding(self.embedding_BTD)

    @property
    def implementation(self) -> str:
        """What computes this pass: ``reference``, ``cpu`` or ``triton``."""
        return "reference"

    def read(self, branch: int) -> Tensor:
        """The input ``[B, T, D]`` of branch ``branch``.

        Raises:
            IndexError: a branch that is not the next one.
        """
        self._expect("read", branch)
        self.reads = branch + 1
        return self._read(branch)

    def write(self, branch: int, output_BTD: Tensor) -> None:
        """Take in the output ``[B, T, D]`` of branch ``branch``.

        Raises:
            IndexError: a branch that is not the next one, or that was not read.
            ValueError: an output of another shape or, outside autocast, of another dtype than the embedding.
        """
        self._expect("write", branch)
        if self.reads != branch + 1:
            raise IndexError(f"write({branch}) before read({branch}): what a branch adds may depend on what it read")
        self._write(branch, self._accept(branch, output_BTD))
        self.writes += 1

    def finish(self) -> Tensor:
        """The hidden state ``[B, T, D]`` after the last branch, before the final norm.

        Raises:
            IndexError: some branch has not been written yet.
        """
        if self.writes != self.pathway.num_branches:
            raise IndexError(f"finish() after {self.writes} of {self.pathway.num_branches} branches were written")
        return self._finish()

    def fork(self: StateT) -> StateT:
        """A copy whose changes leave this state as it is, and the other way round. Tensors are shared."""
        return replace(self)

    @abstractmethod
    def _read(self, branch: int) -> Tensor: ...

    @abstractmethod
    def _write(self, branch: int, output_BTD: Tensor) -> None: ...

    @abstractmethod
    def _finish(self) -> Tensor: ...

    def _expect(self, method: str, branch: int) -> None:
        if branch != self.writes or branch >= self.pathway.num_branches:
            raise IndexError(
                f"{method}({branch}) out of order: branch {self.writes} of {self.pathway.num_branches} comes next"
            )

    def _accept(self, branch: int, output_BTD: Tensor) -> Tensor:
        like = self.embedding_BTD
        if output_BTD.dtype != like.dtype and torch.is_autocast_enabled(output_BTD.device.type):
            output_BTD = output_BTD.to(like.dtype)
        if output_BTD.shape != like.shape or output_BTD.dtype != like.dtype or output_BTD.device != like.device:
            there = [f" on {x.device}" if output_BTD.device != like.device else "" for x in (output_BTD, like)]
            raise DarlitError(
                f"branch {branch} returned {tuple(output_BTD.shape)} {output_BTD.dtype}{there[0]}, its pathway carries "
                f"{tuple(like.shape)} {like.dtype}{there[1]}: a branch must keep shape, dtype and device"
            )
        return output_BTD


class Pathway(nn.Module, ABC):
    """Base of every pathway: its parameters and its `start`.

    Args:
        num_branches: branches of the whole model, two a layer.
        width: D, the channels of every branch's input and output.
        options: an instance of the class attribute ``Options``.
        norm_eps: eps of the key norm; the backbone passes its own, so that all arms share one value.
    """

    name: ClassVar[str]
    """What `darlit.pathways.build` calls it."""
    title: ClassVar[str]
    """Its name in prose and tables."""
    source: ClassVar[str]
    """The paper, as ``arXiv number``."""
    keeps: ClassVar[str]
    """A few words on what its state holds at the end of a forward pass."""
    Options: ClassVar[type[PathwayOptions]] = PathwayOptions
    implementations: ClassVar[tuple[str, ...]] = ("auto", "reference")
    """What `darlit.ops.dispatch` may choose from; a family without fused operators has the reference alone."""
    implementation: str = "auto"

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "name" in cls.__dict__:
            taken = DEFINED.get(cls.name)
            if taken is not None and taken.__module__ != cls.__module__:
                raise DarlitError(f"name={cls.name!r} is taken by {taken.__module__}.{taken.__name__}; choose another")
            DEFINED[cls.name] = cls

    def __init__(self, num_branches: int, width: int, options: PathwayOptions, norm_eps: float) -> None:
        super().__init__()
        check_option("num_branches", num_branches, num_branches >= 1, "at least 1")
        check_option("width", width, width >= 1, "at least 1")
        check_option("norm_eps", norm_eps, 0 <= norm_eps < math.inf, "at least 0 and finite")
        self.num_branches = num_branches
        self.width = width
        self.options: Any = options
        self.norm_eps = norm_eps

    @property
    def num_layers(self) -> int:
        return -(-self.num_branches // BRANCHES_PER_LAYER)

    @property
    def period(self) -> int:
        """Layers after which the structure repeats: each such group adds the same to a model's memory."""
        return 1

    def ends_layer(self, branch: int) -> bool:
        """Whether a layer is complete with this branch; the last layer of an odd number of branches has one only."""
        return (branch + 1) % BRANCHES_PER_LAYER == 0 or branch + 1 == self.num_branches

    def depth(self, branch: int) -> int:
        """Layers complete after this branch, the branch's own layer counted: the depth that a probe sees."""
        return branch // BRANCHES_PER_LAYER + 1

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value, in place."""

    def cost(self) -> Cost | None:
        """What the mathematics needs, counted for this pathway's options and size; None: it is not stated.

        Only an arm in the table of pathways has to state it.
        """
        return None

    @abstractmethod
    def start(self, embedding_BTD: Tensor, probe: Probe | None = None) -> PathwayState:
        """Begin a forward pass from the embedding ``[B, T, D]``."""

    def check_embedding(self, embedding_BTD: Tensor) -> None:
        """Raise a DarlitError where a pass cannot begin from this tensor."""
        shape, dtype = tuple(embedding_BTD.shape), embedding_BTD.dtype
        if len(shape) < 2 or shape[-1] != self.width or not dtype.is_floating_point:
            raise DarlitError(
                f"an embedding {shape} {dtype} cannot start a pathway of width {self.width}: pass floating-point "
                f"numbers [batch, tokens, {self.width}]"
            )

    def implementation_for(self, embedding_BTD: Tensor, probe: Probe | None = None) -> str:
        """What a forward pass is computed by: ``reference``, ``cpu`` or ``triton``.

        The reference also serves a probe, which sees weights that only it makes visible, and `torch.compile`, which
        fuses its mathematics.

        Raises:
            DarlitError: the implementation that was asked for cannot serve these tensors.
        """
        chosen = choose(self.implementation, embedding_BTD.device.type, embedding_BTD.dtype, self.implementations)
        return "reference" if probe is not None or torch.compiler.is_compiling() else chosen

    def extra_repr(self) -> str:
        options = ", ".join(f"{field.name}={asdict(self.options)[field.name]!r}" for field in fields(self.options))
        return f"num_branches={self.num_branches}, width={self.width}" + (f", {options}" if options else "")
