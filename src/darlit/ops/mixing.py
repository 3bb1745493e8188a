# ruff: noqa: ARG001 - a registered fake has the operator's arguments, whether it looks at them or not
"""Widened residual streams as two operators, each one node of the graph, over a backend of kernels.

A branch of (manifold-constrained) Hyper-Connections needs the logits of its gates from all streams (`vector_logits`),
reads one mixture of the streams and writes n mixtures of the streams and its output (`stream_mix`, both). What lies
between is arithmetic on a few scalars per token and stays in PyTorch. Kept for backward: the streams, which are there
anyway, and scalars.

Shapes: B batch, T token, N = B T, D width, S sources, O outputs, M streams, C rows of weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from darlit.ops.dispatch import backend
from darlit.ops.rows import gate, gate_gradient, rows


@torch.library.custom_op("darlit::stream_mix", mutates_args=())
def stream_mix(sources: list[Tensor], coefficients: Tensor, implementation: str) -> list[Tensor]:
    """``out_o = sum_s c[o, s] source_s``: O tensors ``[B, T, D]`` in the sources' dtype.

    Args:
        sources: S tensors ``[B, T, D]``.
        coefficients: ``[O S]`` for all tokens or ``[B, T, O S]``, the S of one output side by side.
        implementation: "cpu".
    """
    mixed = _new_mixed(sources, coefficients)
    backend(implementation).stream_mix([rows(x) for x in sources], gate(coefficients), [rows(x) for x in mixed])
    return mixed


@stream_mix.register_fake
def _(sources: list[Tensor], coefficients: Tensor, implementation: str) -> list[Tensor]:
    return _new_mixed(sources, coefficients)


@torch.library.custom_op("darlit::stream_mix_backward", mutates_args=())
def stream_mix_backward(
    gradients: list[Tensor], sources: list[Tensor], coefficients: Tensor, implementation: str
) -> list[Tensor]:
    """Gradients of the S sources, and those of the coefficients per token, ``[N, O S]``."""
    source_gradients, coefficients_NC = _new_mix_gradients(sources, coefficients)
    backend(implementation).stream_mix_backward(
        [rows(x) for x in gradients],
        [rows(x) for x in sources],
        gate(coefficients),
        [rows(x) for x in source_gradients],
        coefficients_NC,
    )
    return [*source_gradients, coefficients_NC]


@stream_mix_backward.register_fake
def _(gradients: list[Tensor], sources: list[Tensor], coefficients: Tensor, implementation: str) -> list[Tensor]:
    source_gradients, coefficients_NC = _new_mix_gradients(sources, coefficients)
    return [*source_gradients, coefficients_NC]


def _save_mix(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    sources, coefficients, implementation = inputs
    ctx.save_for_backward(coefficients, *sources)
    ctx.implementation = implementation


def _mix_backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    coefficients, *sources = ctx.saved_tensors
    *source_gradients, coefficients_NC = stream_mix_backward(gradients, sources, coefficients, ctx.implementation)
    return source_gradients, gate_gradient(coefficients, coefficients_NC), None


stream_mix.register_autograd(_mix_backward, setup_context=_save_mix)


@torch.library.custom_op("darlit::vector_logits", mutates_args=())
def vector_logits(streams: list[Tensor], weights: Tensor, eps: float, implementation: str) -> tuple[Tensor, Tensor]:
    """``RMSNorm(vec(streams)) @ weights^T``, one norm over all M D channels, gain-free.

    Args:
        streams: M tensors ``[B, T, D]``.
        weights: ``[C, M, D]``.
        eps: of the norm.
        implementation: "cpu".

    Returns:
        Logits ``[B, T, C]`` and the norm's scales ``[N]``, float32.
    """
    logits, scale_N = _new_logits(streams, weights)
    backend(implementation).vector_logits(
        [rows(x) for x in streams], weights.float().contiguous(), eps, logits, scale_N
    )
    return logits, scale_N


@vector_logits.register_fake
def _(streams: list[Tensor], weights: Tensor, eps: float, implementation: str) -> tuple[Tensor, Tensor]:
    return _new_logits(streams, weights)


@torch.library.custom_op("darlit::vector_logits_backward", mutates_args=())
def vector_logits_backward(
    gradient: Tensor, logits: Tensor, scale: Tensor, streams: list[Tensor], weights: Tensor, implementation: str
) -> list[Tensor]:
    """Gradients of the M streams and, in float32, of the weights."""
    stream_gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in streams]
    weights_gradient = torch.zeros_like(weights, dtype=torch.float32, memory_format=torch.contiguous_format)
    backend(implementation).vector_logits_backward(
        gradient.float().contiguous(),
        logits,
        scale,
        [rows(x) for x in streams],
        weights.float().contiguous(),
        [rows(x) for x in stream_gradients],
        weights_gradient,
    )
    return [*stream_gradients, weights_gradient]


@vector_logits_backward.register_fake
def _(
    gradient: Tensor, logits: Tensor, scale: Tensor, streams: list[Tensor], weights: Tensor, implementation: str
) -> list[Tensor]:
    stream_gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in streams]
    return [
        *stream_gradients,
        torch.empty_like(weights, dtype=torch.float32, memory_format=torch.contiguous_format),
    ]


def _save_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    streams, weights, _, implementation = inputs
    ctx.save_for_backward(*output, weights, *streams)
    ctx.implementation = implementation


def _logits_backward(ctx: Any, gradient: Tensor, _scale_gradient: Tensor) -> tuple[Any, ...]:
    logits, scale_N, weights, *streams = ctx.saved_tensors
    *stream_gradients, weights_gradient = vector_logits_backward(
        gradient, logits, scale_N, streams, weights, ctx.implementation
    )
    return stream_gradients, weights_gradient.to(weights.dtype), None, None


vector_logits.register_autograd(_logits_backward, setup_context=_save_logits)


def _new_mixed(sources: list[Tensor], coefficients: Tensor) -> list[Tensor]:
    outputs = coefficients.shape[-1] // len(sources)
    return [torch.empty_like(sources[0], memory_format=torch.contiguous_format) for _ in range(outputs)]


def _new_mix_gradients(sources: list[Tensor], coefficients: Tensor) -> tuple[list[Tensor], Tensor]:
    tokens = sources[0].numel() // sources[0].shape[-1]
    return (
        [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources],
        coefficients.new_empty(tokens, coefficients.shape[-1], dtype=torch.float32),
    )


def _new_logits(streams: list[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    like = streams[0]
    return (
        like.new_empty(*like.shape[:-1], weights.shape[0], dtype=torch.float32),
        like.new_empty(like.numel() // like.shape[-1], dtype=torch.float32),
    )
