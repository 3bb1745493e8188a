"""The questions of ``darlit analyze``: each one measures a model, says its result in a line, and draws its pictures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from darlit.backbone import Transformer
from darlit.errors import DarlitError
from darlit.probes import pictures
from darlit.probes.cka import CkaMap, cka_map, passes
from darlit.probes.depth import DepthProfile, Gate, Read, depth_profile
from darlit.probes.rescue import Corruption, RescueCurve, Span, check_streams, rescue_curve
from darlit.probes.states import depths_and_streams, pathway_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Question(ABC):
    """One analysis of a model on batches of tokens."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def check(self, transformer: Transformer) -> None:
        """Refuse a model of which the question makes no sense.

        Raises:
            DarlitError: why, and of which models it does.
        """

    def passes(self, transformer: Transformer) -> int:
        """How often `measure` goes over the batches."""
        del transformer
        return 1

    @abstractmethod
    def measure(self, transformer: Transformer, batches: Sequence[Tensor], on_batch: Callable[[], object]) -> Any:
        """The answer for one model."""

    @abstractmethod
    def headline(self, answer: Any) -> str:
        """The answer in a few words."""

    @abstractmethod
    def record(self, answer: Any) -> dict[str, Any]:
        """The answer as plain values for JSON; NaN where a number is not defined."""

    @abstractmethod
    def restore(self, record: Mapping[str, Any]) -> Any:
        """The answer that `record` made these values of, once JSON held them: null is NaN."""

    @abstractmethod
    def pictures(self, answers: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
        """By file name, what draws the answers for all models."""


@dataclass(frozen=True)
class Cka(Question):
    """Linear CKA across streams and depths."""

    name = "cka"
    title = "CKA"
    streams: tuple[int, int] | None = None
    memory_bytes: int = 4 * 2**30

    def check(self, transformer: Transformer) -> None:
        number = depths_and_streams(transformer)[1]
        if self.streams is not None and max(self.streams) >= number:
            raise DarlitError(
                f"--streams {self.streams[0]} {self.streams[1]}: {pathway_title(transformer)} has {number}, "
                "numbered from 0"
            )

    def passes(self, transformer: Transformer) -> int:
        return passes(transformer, self.memory_bytes)

    def measure(self, transformer: Transformer, batches: Sequence[Tensor], on_batch: Callable[[], object]) -> Any:
        return cka_map(transformer, batches, self.streams, self.memory_bytes, on_batch)

    def headline(self, answer: Any) -> str:
        return (
            f"linear CKA of streams {answer.streams[0]} and {answer.streams[1]}: equal depths "
            f"{answer.mean_on_diagonal:.3f}, different depths {answer.mean_off_diagonal:.3f}"
        )

    def record(self, answer: Any) -> dict[str, Any]:
        return {
            "tokens": answer.tokens,
            "streams": list(answer.streams),
            "cka": answer.values_RR.tolist(),
            "mean_on_diagonal": answer.mean_on_diagonal,
            "mean_off_diagonal": answer.mean_off_diagonal,
        }

    def restore(self, record: Mapping[str, Any]) -> Any:
        values_RR = torch.tensor([_numbers(row) for row in record["cka"]], dtype=torch.float64)
        return CkaMap(values_RR, tuple(record["streams"]), record["tokens"])

    def pictures(self, answers: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
        return {"cka": lambda: pictures.draw_cka(answers)}


@dataclass(frozen=True)
class Rescue(Question):
    """Rescue gain of every stream."""

    name = "rescue"
    title = "rescue gain"
    corruptions: tuple[Corruption, ...] = ("sequence",)
    span: Span = "at"

    def check(self, transformer: Transformer) -> None:
        check_streams(pathway_title(transformer), depths_and_streams(transformer)[1])

    def passes(self, transformer: Transformer) -> int:
        return len(self.corruptions)

    def measure(self, transformer: Transformer, batches: Sequence[Tensor], on_batch: Callable[[], object]) -> Any:
        return [rescue_curve(transformer, batches, kind, self.span, on_batch) for kind in self.corruptions]

    def headline(self, answer: Any) -> str:
        curve = answer[0]
        gains = ", ".join(f"{_mean(by_depth):.3f}" for by_depth in curve.gains)
        return f"rescue gain of streams 0 to {len(curve.gains) - 1}: {gains}; balance {_mean(curve.balance):.3f}"

    def record(self, answer: Any) -> dict[str, Any]:
        return {"curves": [{**asdict(curve), "gains": curve.gains, "balance": curve.balance} for curve in answer]}

    def restore(self, record: Mapping[str, Any]) -> Any:
        return [
            RescueCurve(
                curve["corruption"],
                curve["span"],
                curve["depths"],
                _numbers(curve["kl_none"]),
                [_numbers(by_depth) for by_depth in curve["kl_keep"]],
                curve["tokens"],
            )
            for curve in record["curves"]
        ]

    def pictures(self, answers: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
        return {"rescue": lambda: pictures.draw_rescue(answers)}


@dataclass(frozen=True)
class Depth(Question):
    """Depth weights and gates."""

    name = "depth"
    title = "depth weights"

    def check(self, transformer: Transformer) -> None:
        one_token = next(transformer.parameters()).new_zeros(1, 1).long()
        depth_profile(transformer, [one_token])

    def measure(self, transformer: Transformer, batches: Sequence[Tensor], on_batch: Callable[[], object]) -> Any:
        return depth_profile(transformer, batches, on_batch)

    def headline(self, answer: Any) -> str:
        if not answer.reads:
            return f"no depth weights; gates {', '.join(dict.fromkeys(gate.name for gate in answer.gates))}"
        chosen = [read for read in answer.reads if len(read.weights) > 1]
        shares = [read.entropy / math.log(len(read.weights)) for read in chosen]
        return (
            f"depth weights: entropy {_mean(shares):.3f} of ln S, largest weight "
            f"{_mean([read.largest_weight for read in chosen]):.3f}"
        )

    def record(self, answer: Any) -> dict[str, Any]:
        return asdict(answer)

    def restore(self, record: Mapping[str, Any]) -> Any:
        reads = [Read(**read) for read in record["reads"]]
        gates = [Gate(**gate) for gate in record["gates"]]
        return DepthProfile(record["num_branches"], reads, gates, record["tokens"])

    def pictures(self, answers: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
        drawings: dict[str, Callable[[], Figure]] = {}
        if any(answer.reads for answer in answers.values()):
            drawings["depth_weights"] = lambda: pictures.draw_depth_weights(answers)
        if any(answer.gates for answer in answers.values()):
            drawings["gates"] = lambda: pictures.draw_gates(answers)
        return drawings


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _mean(values: Sequence[float]) -> float:
    """Of the values that are defined; NaN if none is."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


QUESTIONS: tuple[type[Question], ...] = (Cka, Rescue, Depth)
