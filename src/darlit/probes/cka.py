"""Linear CKA (centred kernel alignment, arXiv 1905.00414, eq. 5 with a linear kernel) between the streams' depths.

    CKA(X, Y) = ||X^T Y||_F^2 / (||X^T X||_F ||Y^T Y||_F)        X, Y: tokens x D, columns centred

1 for states that are equal up to rotation and scale, about D / N for N independent tokens. Sums run over
batches in float64 with the means corrected at each (Chan, Golub, LeVeque 1983), so neither the number of tokens nor
their division into batches matters, to memory or to the result.

Shapes: N tokens of a batch, D width, R depths, F features: the D channels of several depths side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darlit.backbone import Transformer
from darlit.probes.states import Place, depths_and_streams, record

FLOAT64_BYTES = 8
CHUNK_TOKENS = 1024


class CrossCovariance:
    """``sum (x - mean x)^T (y - mean y)`` over all tokens of all batches, ``[F, G]`` in float64.

    Args:
        shape: (F, G), the features of x and of y.
        device: where it is kept.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.sum_FG = torch.zeros(shape, dtype=torch.float64, device=device)
        self._mean_F, self._mean_G = (torch.zeros(size, dtype=torch.float64, device=device) for size in shape)

    def add(self, x_NF: Tensor, y_NG: Tensor) -> None:
        """Take in the features of N more tokens."""
        x_NF, y_NG = x_NF.double(), y_NG.double()
        mean_F, mean_G, new = x_NF.mean(0), y_NG.mean(0), len(x_NF)
        shift_F, shift_G = mean_F - self._mean_F, mean_G - self._mean_G
        before, self.tokens = self.tokens, self.tokens + new
        self.sum_FG.addmm_((x_NF - mean_F).T, y_NG - mean_G)
        self.sum_FG.addr_(shift_F, shift_G, alpha=before * new / self.tokens)
        self._mean_F += shift_F * new / self.tokens
        self._mean_G += shift_G * new / self.tokens


@dataclass(frozen=True)
class CkaMap:
    """CKA of every depth of one stream with every depth of another, or of the same."""

    values_RR: Tensor
    """``[R, R]`` in float64, row: depth of the first stream; NaN where a state does not vary over tokens."""
    streams: tuple[int, int]
    tokens: int

    @property
    def mean_on_diagonal(self) -> float:
        """Equal depths; NaN left out."""
        return self.values_RR.diagonal().nanmean().item()

    @property
    def mean_off_diagonal(self) -> float:
        """Different depths; NaN left out."""
        depths = len(self.values_RR)
        return self.values_RR[~torch.eye(depths, dtype=torch.bool)].nanmean().item()


def cka_map(
    transformer: Transformer,
    batches: Sequence[Tensor],
    streams: tuple[int, int] | None = None,
    memory_bytes: int = 4 * 2**30,
    on_batch: Callable[[], object] = lambda: None,
) -> CkaMap:
    """Linear CKA between all depths of two streams.

    Args:
        transformer: in evaluation mode.
        batches: token ids ``[B, T]`` on its device; read once a pass.
        streams: which two; default 0 and 1, or the one stream with itself.
        memory_bytes: most that the sums may take. A pass over the batches handles as many depths as fit.
        on_batch: called after each batch of each pass, `passes` times over all batches.

    Raises:
        ValueError: a stream that the pathway does not have.
    """
    num_depths, num_streams = depths_and_streams(transformer)
    first, second = streams or (0, min(1, num_streams - 1))
    if not (0 <= first < num_streams and 0 <= second < num_streams):
        raise ValueError(f"streams {first} and {second}: the pathway has {num_streams}, numbered from 0")
    width, device = transformer.config.width, transformer.head_weight.device
    if len(batches) == 0:
        raise ValueError("CKA of no batches is not defined; give at least one")
    own = {stream: [CrossCovariance((width, width), device) for _ in range(num_depths)] for stream in (first, second)}
    values_RR = torch.empty(num_depths, num_depths, dtype=torch.float64)
    for rows in _row_groups(num_depths, width, memory_bytes):
        cross = CrossCovariance((len(rows) * width, num_depths * width), device)
        for tokens_BT in batches:
            for states in _chunks(record(transformer, tokens_BT)):
                cross.add(_features(states, first, rows), _features(states, second, range(num_depths)))
                if rows.start == 0:
                    _add_own(own, states)
            on_batch()
        blocks_RDRD = cross.sum_FG.view(len(rows), width, num_depths, width)
        values_RR[rows.start : rows.stop] = torch.linalg.vector_norm(blocks_RDRD, dim=(1, 3)).square().cpu()
    norms = {
        stream: torch.tensor([sums.sum_FG.norm().item() for sums in by_depth], dtype=torch.float64)
        for stream, by_depth in own.items()
    }
    values_RR /= norms[first][:, None] * norms[second]
    return CkaMap(values_RR, (first, second), own[first][0].tokens)


def passes(transformer: Transformer, memory_bytes: int = 4 * 2**30) -> int:
    """How often `cka_map` goes over the batches."""
    return len(list(_row_groups(depths_and_streams(transformer)[0], transformer.config.width, memory_bytes)))


def _row_groups(num_depths: int, width: int, memory_bytes: int) -> Iterable[range]:
    row_bytes = num_depths * width * width * FLOAT64_BYTES
    rows = max(1, min(num_depths, memory_bytes // row_bytes))
    return (range(start, min(start + rows, num_depths)) for start in range(0, num_depths, rows))


def _chunks(states: dict[Place, Tensor]) -> Iterable[dict[Place, Tensor]]:
    """The same states of CHUNK_TOKENS tokens at a time, ``[N, D]`` each: their float64 copies stay small."""
    by_place = {place: state_BTD.flatten(0, 1).split(CHUNK_TOKENS) for place, state_BTD in states.items()}
    return (dict(zip(by_place, chunk, strict=True)) for chunk in zip(*by_place.values(), strict=True))


def _features(states: dict[Place, Tensor], stream: int, depths: Iterable[int]) -> Tensor:
    """The states of several depths side by side, ``[N, F]``."""
    return torch.cat([states[depth, stream] for depth in depths], dim=-1)


def _add_own(own: dict[int, list[CrossCovariance]], states: dict[Place, Tensor]) -> None:
    for stream, by_depth in own.items():
        for depth, covariance in enumerate(by_depth):
            covariance.add(states[depth, stream], states[depth, stream])
