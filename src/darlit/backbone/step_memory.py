"""The memory of one training step on one device, before there is a device or a step.

Parameters, gradients and moments are counted from shapes. Activations are counted on the very graph that will run: a
forward and a backward pass of fake tensors, which have shapes and storages but no memory, with the most bytes alive
at one time noted. A deep model is counted at two small depths and continued linearly: every period of a pathway's
layers adds the same, up to a few scalars a token.

Not counted: what is no tensor of the step. The context of a GPU, the allocator's rounding and gaps, buffers of the
communication library, the data loader.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darlit.backbone.transformer import Transformer
from darlit.errors import DarlitError
from darlit.ops.dispatch import choose
from darlit.pathways import Pathway

PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}
"""Lightning's name: dtype of the parameters, and what autocast narrows to."""
MOMENTS = 2
"""Tensors as large as a parameter that AdamW keeps for it, in the parameter's dtype."""


@dataclass(frozen=True)
class Placement:
    """Where a step runs.

    Raises:
        DarlitError: a precision that there is no estimate for.
    """

    precision: str = "32-true"
    device_type: Literal["cpu", "cuda"] = "cuda"
    devices: int = 1
    sharded: bool = False
    """FSDP2, see `darlit.modules.sharding`; else every device has the whole model (DDP)."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise DarlitError(
                f"precision {self.precision!r} is not known to the memory estimate; give one of {', '.join(PRECISIONS)}"
            )

    @property
    def parameter_dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision][0]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return PRECISIONS[self.precision][1]

    @property
    def branch_dtype(self) -> torch.dtype:
        """Of the branches' parameters while a layer works: sharded ones travel narrow."""
        return torch.bfloat16 if self.sharded and self.precision.startswith("bf16") else self.parameter_dtype


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device; the sum is what a step needs at its worst moment, while gradients accumulate."""

    parameters: int
    gradients: int
    optimizer: int
    communication: int
    """DDP: the buckets, a second copy of the gradients. FSDP2: what is gathered at one time."""
    activations: int
    """All that lives and dies within a micro-batch: what autograd keeps, logits, what an operator works with."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.communication + self.activations


def step_memory(
    model: Transformer, batch_size: int, placement: Placement, checkpoint_layers: bool | None = None
) -> StepMemory:
    """Estimate a step of ``model``, which may be on any device, the meta device too.

    Args:
        batch_size: sequences of one device and micro-batch, each as long as the model takes.
        checkpoint_layers: instead of the model's own choice.
    """
    size = placement.parameter_dtype.itemsize
    count = sum(parameter.numel() for parameter in model.parameters())
    parameters = size * -(-count // (placement.devices if placement.sharded else 1))
    return StepMemory(
        parameters=parameters,
        gradients=parameters,
        optimizer=MOMENTS * parameters,
        communication=_communication(model, count, placement),
        activations=activation_bytes(model, batch_size, placement, checkpoint_layers),
    )


def checkpoint_bytes(model: Transformer, precision: str) -> int:
    """Weights and moments as a checkpoint holds them, all ranks together."""
    size = PRECISIONS[precision][0].itemsize
    return (1 + MOMENTS) * size * sum(parameter.numel() for parameter in model.parameters())


def activation_bytes(
    model: Transformer, batch_size: int, placement: Placement, checkpoint_layers: bool | None = None
) -> int:
    """Most bytes alive in a micro-batch besides parameters and gradients; arguments as in `step_memory`."""
    if checkpoint_layers is None:
        checkpoint_layers = model.config.checkpoint_layers
    layers, (shallow, deep) = model.config.num_layers, _counted_depths(model.pathway, placement)

    def peaks(depth: int) -> tuple[int, int]:
        return _peaks(model, depth, batch_size, placement, checkpoint_layers)

    if layers <= deep:
        return max(peaks(layers))
    at_shallow, at_deep = peaks(shallow), peaks(deep)
    return max(b + (b - a) * (layers - deep) // (deep - shallow) for a, b in zip(at_shallow, at_deep, strict=True))


def _counted_depths(pathway: Pathway, placement: Placement) -> tuple[int, int]:
    """Two depths that differ by a period and are typical of what is below them.

    One layer is not where a second would read it. A fused read keeps less while its sources are few.
    """
    few = 2 if _is_fused(pathway.implementation, placement) else 1
    shallow = 1 + few if pathway.period == 1 else few * pathway.period
    return shallow, shallow + pathway.period


def _peaks(
    model: Transformer, layers: int, batch_size: int, placement: Placement, checkpoint_layers: bool
) -> tuple[int, int]:
    """Most bytes alive until the head's backward pass is over, and after that."""
    from darlit.backbone.fake_step import FakeStep

    with warnings.catch_warnings(), FakeStep() as step:
        warnings.simplefilter("ignore")  # they are about the shallow copy, or come when the model itself runs
        copy = _copy(model, layers, placement, checkpoint_layers)
        tokens_BT = torch.empty(batch_size, model.config.sequence_length, dtype=torch.long)
        for parameter in copy.parameters():
            parameter.grad = torch.empty_like(parameter)
        held = step.tensors.live
        peaks: list[int] = []

        def note(_: Tensor) -> None:
            peaks.append(step.tensors.peak - held)
            step.tensors.peak = step.tensors.live

        def note_backward(_: Any, __: Any, hidden_BTD: Tensor) -> None:
            hidden_BTD.register_hook(note)

        copy.final_norm.register_forward_hook(note_backward)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=placement.autocast_dtype is not None):
            loss = copy.losses(tokens_BT, tokens_BT).total(copy.config)
        loss.backward()
        note(loss)
    head, branches = peaks
    return head, branches


def _copy(model: Transformer, layers: int, placement: Placement, checkpoint_layers: bool) -> Transformer:
    """A model of fewer layers, made of whatever tensors are made of now, that runs as ``model`` would there."""
    config = replace(model.config, num_layers=layers, checkpoint_layers=checkpoint_layers, experts="torch")
    theirs = model.pathway
    pathway = type(theirs)(config.num_branches, theirs.width, theirs.options, theirs.norm_eps)
    copy = Transformer(config, pathway)
    _set_dtype(copy, placement.parameter_dtype)
    _set_dtype(copy.layers, placement.branch_dtype)
    # The fused operators are one bookkeeping over several kernels, and of fake tensors only that runs.
    implementation = "shapes" if _is_fused(theirs.implementation, placement) else "reference"
    pathway.implementation_for = lambda embedding_BTD, probe: implementation  # type: ignore[method-assign,misc,assignment]
    for norm in copy.modules():
        if isinstance(norm, nn.RMSNorm) and placement.device_type == "cuda":
            norm.forward = partial(_norm_on_gpu, norm)  # type: ignore[method-assign]
    return copy


def _set_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """As ``module.to(dtype)``, which fake tensors refuse."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.detach().to(dtype)))


def _is_fused(implementation: str, placement: Placement) -> bool:
    """Whether the pathway's numbers come from the fused operators there; Triton need not be installed here for it."""
    return (
        implementation == "triton"
        or choose(implementation, placement.device_type, placement.parameter_dtype) != "reference"
    )


def _norm_on_gpu(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """One kernel where input and gain are of one dtype; else several, as on a CPU always."""
    if x.dtype != norm.weight.dtype:
        return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return torch.ops.aten._fused_rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)[0]


def _communication(model: Transformer, count: int, placement: Placement) -> int:
    size = placement.parameter_dtype.itemsize
    if not placement.sharded:
        return size * count if placement.devices > 1 else 0
    narrow, wide = placement.branch_dtype.itemsize, torch.float32.itemsize
    layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
    root = count - len(model.layers) * layer
    # Two layers are there while the next is on its way, one layer's gradients and what the ranks sum up of them; the
    # root's parameters and gradients until the pass is over.
    return layer * (2 * narrow + narrow + wide) + 2 * size * root
