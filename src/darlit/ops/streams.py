"""Widened residual streams as autograd nodes, one a call, over a backend of kernels.

A branch of (manifold-constrained) Hyper-Connections needs gates from all streams, reads one mixture of the streams and
writes n mixtures of the streams and its output. Kept for backward: the streams, which are there anyway, and scalars.

Shapes: B batch, T token, N = B T, D width, S sources, O outputs, n streams, C rows of weights, P numbers of a branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from darlit.errors import DarlitError
from darlit.ops.depth import SECOND_ORDER
from darlit.ops.rows import gate, gate_gradient, rows


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, backend: Any, *sources: Tensor) -> tuple[Tensor, ...]:
        outputs = coefficients.shape[-1] // len(sources)
        mixed = tuple(_like(sources[0]) for _ in range(outputs))
        backend.stream_mix([rows(x) for x in sources], gate(coefficients), [rows(x) for x in mixed])
        ctx.save_for_backward(coefficients, *sources)
        ctx.backend = backend
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _refuse_second_order()
        coefficients, *sources = ctx.saved_tensors
        source_gradients = [_like(x) for x in sources]
        coefficients_NC = _floats(coefficients, sources[0].numel() // sources[0].shape[-1], coefficients.shape[-1])
        ctx.backend.stream_mix_backward(
            [rows(x) for x in gradients], [rows(x) for x in sources], gate(coefficients),
            [rows(x) for x in source_gradients], coefficients_NC,
        )  # fmt: skip
        return gate_gradient(coefficients, coefficients_NC), None, *source_gradients


class _GatedRead(Function):
    """Outputs: what the branch reads, the coefficients ``[N, n (n + 1)]`` of its write, and the streams for that write.

    The streams pass through, so their gradients from the write and those of this read are added in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, parameters: Tensor, family: str, eps: float, backend: Any, *streams: Tensor
    ) -> tuple[Tensor, ...]:
        n, like = len(streams), streams[0]
        tokens, groups = like.numel() // like.shape[-1], n // weights.shape[1]
        of_group = (groups,) if family == "hc" else ()
        logits, scale = _floats(like, *of_group, tokens, len(weights)), _floats(like, *of_group, tokens)
        x, pre_NM, write_NC = _like(like), _floats(like, tokens, n), _floats(like, tokens, n * (n + 1))
        own = [rows(stream) for stream in streams]
        backend.vector_logits(own, weights.float().contiguous(), eps, logits, scale)
        backend.stream_gates(logits, parameters.float().contiguous(), family, pre_NM, write_NC)
        backend.stream_mix(own, pre_NM, [rows(x)])
        ctx.save_for_backward(weights, parameters, logits, scale, pre_NM, *streams)
        ctx.family, ctx.backend = family, backend
        return x, write_NC, *streams

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, write_gradient: Tensor, *arrived: Tensor) -> Any:
        _refuse_second_order()
        weights, parameters, logits, scale, pre_NM, *streams = ctx.saved_tensors
        backend, own, gradient_ND = ctx.backend, [rows(stream) for stream in streams], rows(gradient)
        pre_gradient, logits_gradient = torch.empty_like(pre_NM), torch.empty_like(logits)
        parameters_gradient = _floats(parameters, *parameters.shape)
        weights_gradient, stream_gradients = _floats(weights, *weights.shape), [_like(x) for x in streams]
        backend.stream_mix_backward([gradient_ND], own, pre_NM, [], pre_gradient)
        backend.stream_gates_backward(
            pre_gradient, write_gradient.contiguous(), logits, parameters.float().contiguous(), ctx.family,
            logits_gradient, parameters_gradient,
        )  # fmt: skip
        backend.vector_logits_backward(
            logits_gradient, logits, scale, own, weights.float().contiguous(), [rows(x) for x in stream_gradients],
            weights_gradient, [rows(x) for x in arrived], pre_NM, gradient_ND,
        )  # fmt: skip
        parameter_gradients = weights_gradient.to(weights.dtype), parameters_gradient.to(parameters.dtype)
        return *parameter_gradients, None, None, None, *stream_gradients


def stream_mix(sources: tuple[Tensor, ...], coefficients: Tensor, backend: Any) -> tuple[Tensor, ...]:
    """``out_o = sum_s c[o, s] source_s``: O tensors ``[B, T, D]`` in the sources' dtype.

    Args:
        sources: S tensors ``[B, T, D]``.
        coefficients: ``[O S]`` for all tokens or ``[N, O S]``, the S of one output side by side.
        backend: a module of kernels.
    """
    return _Mix.apply(coefficients, backend, *sources)


def gated_read(
    streams: tuple[Tensor, ...], weights: Tensor, parameters: Tensor, family: str, eps: float, backend: Any
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """What a branch reads ``[B, T, D]``, the coefficients of its write, and the streams that the write is to take.

    Args:
        weights: ``[C, n, D]`` of one norm over all streams (mhc), or ``[C, 1, D]`` of a norm each (hc).
        parameters: ``[P]``, see `darlit.ops.reference.stream_gates`.
        family: mhc or hc.
        eps: of the norm.
    """
    x, write_NC, *through = _GatedRead.apply(weights, parameters, family, eps, backend, *streams)
    return x, write_NC, tuple(through)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _floats(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise DarlitError(SECOND_ORDER)
