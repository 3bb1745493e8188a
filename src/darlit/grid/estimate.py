"""What one cell will cost, worked out from its file before anything runs and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from darlit.errors import DarlitError
from darlit.grid.cells import Cell
from darlit.settings import class_of

if TYPE_CHECKING:
    from darlit.backbone import Transformer
    from darlit.backbone.sizes import ParameterCounts
    from darlit.backbone.step_memory import Placement, StepMemory

PRECISIONS = ("bf16-mixed", "32-true", "bf16-true")
STRATEGIES = ("ddp", "fsdp")
PEAK_TFLOPS = {
    "bf16-mixed": (989.0, "one H100 SXM, dense bfloat16"),
    "bf16-true": (989.0, "one H100 SXM, dense bfloat16"),
    "32-true": (67.0, "one H100 SXM, float32 without tensor cores"),
}
"""TFLOP/s as the vendor states them, and of what."""
CountedMemory = Literal["none", "own", "both"]


@dataclass(frozen=True)
class Machine:
    """What a plan supposes of the machine; None: what the experiment says.

    Args:
        gpus: of all nodes together.
        precision: Lightning's name for it.
        strategy: ddp, the whole model on every GPU, or fsdp, a shard.
        utilisation: share of the peak that the counted operations reach, 0 to 1.
        peak_tflops: of one GPU in that precision.
    """

    gpus: int | None = None
    precision: str | None = None
    strategy: str | None = None
    utilisation: float = 0.4
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.gpus is not None and self.gpus < 1:
            raise DarlitError(f"--gpus {self.gpus} is not allowed; give a whole number from 1")
        if not 0 < self.utilisation <= 1:
            raise DarlitError(f"--utilisation {self.utilisation} is not allowed; give a share above 0, at most 1")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise DarlitError(f"--peak_tflops {self.peak_tflops} is not allowed; give a number above 0")


@dataclass(frozen=True)
class CellPlan:
    """What one run of a cell costs, and how it is laid out."""

    cell: Cell
    device: str
    """cuda, or cpu where the experiment asks for it and no GPUs were given."""
    devices: int
    precision: str
    strategy: str
    tokens: int
    batch_tokens: int
    sequence_length: int
    batch_size: int
    """Sequences of one device and micro-batch."""
    checkpoint_layers: bool
    """Whether the experiment recomputes its layers."""
    parameters: ParameterCounts
    flops_per_token: float
    history_bytes_per_token: int | None
    """None: a pathway that does not state its cost."""
    memory: dict[bool, StepMemory]
    """Of one device, by whether layers are recomputed; what was not asked for is not there."""
    checkpoint_bytes: int
    train_tokens: int | None
    """Of the corpus; None: it is not prepared on this machine."""
    flops_per_second: float | None
    """Of all devices; None: the peak of a CPU is not known."""

    @property
    def steps(self) -> int:
        """Optimiser steps of one run."""
        return self.tokens // self.batch_tokens

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimiser step."""
        return self.batch_tokens // (self.devices * self.batch_size * self.sequence_length)

    @property
    def passes(self) -> float | None:
        """How often one run goes through the corpus."""
        return None if self.train_tokens is None else self.steps * self.batch_tokens / self.train_tokens

    @property
    def runs(self) -> int:
        return len(self.cell.seeds)

    @property
    def flops(self) -> float:
        """Training FLOPs of all seeds."""
        return self.flops_per_token * self.tokens * self.runs

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.flops_per_second is None else self.flops_per_second / self.flops_per_token

    @property
    def device_hours(self) -> float | None:
        """Of one run."""
        speed = self.tokens_per_second
        return None if speed is None else self.tokens / speed / 3600 * self.devices


def plan_cell(cell: Cell, machine: Machine, memory: CountedMemory = "own") -> CellPlan:
    """Plan one cell on a model without storage.

    Args:
        memory: whether to count activations, which takes seconds: none, as the experiment's layers are (own), or with
            layers kept and recomputed (both).

    Raises:
        DarlitError: an experiment without a model or a budget, with options that its model refuses, or whose batch
            does not divide among the devices.
    """
    config = _settings(cell)
    data, trainer, budget = config["data"], config["trainer"], config["budget"]
    batch_size, sequence_length = data["batch_size"], data["sequence_length"]
    device = "cpu" if trainer.get("accelerator") == "cpu" and machine.gpus is None else "cuda"
    devices = machine.gpus or _devices(trainer)
    strategy = machine.strategy or _strategy(trainer)
    model = _build(cell, config["model"], sequence_length)

    from darlit.backbone.sizes import parameter_counts, training_flops_per_token
    from darlit.backbone.step_memory import Placement, checkpoint_bytes, step_memory

    precision = machine.precision or trainer.get("precision") or "32-true"
    try:
        place = Placement(precision, device, devices, strategy == "fsdp")  # type: ignore[arg-type]
        counted = {"none": (), "own": (model.config.checkpoint_layers,), "both": (False, True)}[memory]
        needs = {recomputed: step_memory(model, batch_size, place, recomputed) for recomputed in counted}
    except DarlitError as error:
        raise DarlitError(f"{cell.source}: {error}") from error
    tokens, batch_tokens = budget["tokens"], budget["batch_tokens"]
    at_once = devices * batch_size * sequence_length
    if batch_tokens % at_once:
        raise DarlitError(
            f"{cell.source}: budget.batch_tokens={batch_tokens} is not a multiple of {at_once} (devices {devices} x "
            f"data.batch_size {batch_size} x data.sequence_length {sequence_length}); give another --gpus or batch_size"
        )
    return CellPlan(
        cell=cell,
        device=device,
        devices=devices,
        precision=precision,
        strategy=strategy,
        tokens=tokens,
        batch_tokens=batch_tokens,
        sequence_length=sequence_length,
        batch_size=batch_size,
        checkpoint_layers=model.config.checkpoint_layers,
        parameters=parameter_counts(model),
        flops_per_token=training_flops_per_token(model),
        history_bytes_per_token=_history_bytes(model, place),
        memory=needs,
        checkpoint_bytes=checkpoint_bytes(model, precision),
        train_tokens=_train_tokens(data),
        flops_per_second=_flops_per_second(machine, place),
    )


def _settings(cell: Cell) -> dict[str, Any]:
    """The cell's settings, which have to name a model, its data and a budget."""
    for group in ("model", "data", "budget"):
        if not isinstance(cell.config.get(group), dict):
            raise DarlitError(
                f"{cell.source}: {group} is {cell.config.get(group)!r}; give a mapping, here or in a base"
            )
    for name in ("tokens", "batch_tokens"):
        if name not in cell.config["budget"]:
            raise DarlitError(f"{cell.source}: budget.{name} is missing; give a whole number in the file or the grid")
    return cell.settings()


def _build(cell: Cell, model: dict[str, Any], sequence_length: int) -> Transformer:
    """The cell's model without storage.

    A class of one's own is made as `darlit fit` makes it; one of darlit's names a pathway and nothing else.
    """
    import torch

    from darlit import pathways
    from darlit.backbone import BackboneConfig, build_transformer

    options = dict(model["init_args"])
    # The experts' parameters are the same whatever computes them, and one of these has to be installed.
    options["backbone"] = {**options["backbone"], "sequence_length": sequence_length, "experts": "torch"}
    if options["backbone"].get("vocab_size") is None:
        from darlit.data.vocabulary import vocab_size_of

        data = cell.config.get("data") or {}
        options["backbone"]["vocab_size"] = vocab_size_of(data.get("folder"), data.get("tokenizer"))
    found = class_of(model["class_path"])
    try:
        with torch.device("meta"):
            if not isinstance(found, str):
                module: Any = found(**options)
                return module.transformer
            pathway = pathways.family(found).Options(**options["pathway"])
            return build_transformer(found, pathway, BackboneConfig(**options["backbone"]))
    except (TypeError, ValueError) as error:
        raise DarlitError(f"{cell.source}: {error}") from error


def _train_tokens(data: dict[str, Any]) -> int | None:
    from darlit.data.corpus import default_folder
    from darlit.data.errors import DataError
    from darlit.data.manifest import open_manifest

    default = default_folder(data["tokenizer"] or "bytes", data["holdout"])
    try:
        return int(open_manifest(data["folder"] or default).split("train")["tokens"])
    except DataError:
        return None


def _history_bytes(model: Transformer, place: Placement) -> int | None:
    cost = model.pathway.cost()
    return None if cost is None else cost.kept * model.config.width * place.parameter_dtype.itemsize


def _devices(trainer: dict[str, Any]) -> int:
    devices = trainer.get("devices")
    if isinstance(devices, list):
        return max(1, len(devices))
    return devices if isinstance(devices, int) and devices > 0 else 1


def _strategy(trainer: dict[str, Any]) -> str:
    strategy = trainer.get("strategy", "auto")
    name = strategy.get("class_path", "") if isinstance(strategy, dict) else str(strategy)
    return "fsdp" if name.rpartition(".")[2] == "ShardedStrategy" else "ddp"


def _flops_per_second(machine: Machine, place: Placement) -> float | None:
    if machine.peak_tflops is None and place.device_type == "cpu":
        return None
    peak = machine.peak_tflops or PEAK_TFLOPS[place.precision][0]
    return peak * 1e12 * machine.utilisation * place.devices
