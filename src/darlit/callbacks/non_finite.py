"""Stop before a NaN or an infinity reaches the weights, and say where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from darlit.errors import DarlitError
from darlit.modules.gradients import all_finite, total_norm
from darlit.pathways.contract import check_option
from darlit.run import RunFolder


class NonFiniteError(DarlitError):
    """A non-finite loss or gradient; the message names the step and the first non-finite tensor."""


class NonFiniteGuard(pl.Callback):
    """Checks the gradients before every optimiser step.

    Args:
        on_non_finite: stop, after saving ``checkpoints/before_non_finite.ckpt`` (the weights are still good), or
            skip the step and go on.
        limit: how many steps may be skipped in a run.
    """

    documents_named = 8

    def __init__(self, on_non_finite: Literal["stop", "skip"] = "stop", limit: int = 10) -> None:
        check_option("on_non_finite", on_non_finite, on_non_finite in ("stop", "skip"), ("stop", "skip"))
        self.on_non_finite = on_non_finite
        self.limit = limit
        self.skipped = 0
        self._batch: Tensor | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, _: int) -> None:
        self._batch = batch

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if bool(torch.isfinite(total_norm(p.grad for p in pl_module.parameters() if p.grad is not None))):
            return
        message = (
            f"step {trainer.global_step}: {self._first_non_finite(trainer, pl_module)} is not finite"
            f"{self._documents(trainer)}"
        )
        if self.on_non_finite == "skip" and self.skipped < self.limit:
            self.skipped += 1
            pl_module.print(f"{message}; skipped ({self.skipped} of at most {self.limit})")
            optimizer.zero_grad(set_to_none=True)
            return
        path = RunFolder(Path(trainer.default_root_dir)).checkpoint("before_non_finite")
        trainer.save_checkpoint(path)
        raise NonFiniteError(
            f"{message}; training stopped before the step, the weights until then are in {path}. "
            "Lower optimizer.learning_rate, or set on_non_finite: skip"
        )

    def _first_non_finite(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Name of the first parameter, activation or gradient that is not finite, in the order of computation.

        Of a batch in several parts it is the first rank's that has one; all ranks give the same answer.
        """
        for name, parameter in pl_module.named_parameters():
            if not all_finite(parameter.detach()):
                return f"parameter {name}"
        for activation in _of_all_ranks(self._first_activation(trainer, pl_module)):
            if activation is not None:
                return f"output of {activation}"
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and not all_finite(parameter.grad):
                return f"gradient of {name}"
        return "norm of the gradients"

    def _documents(self, trainer: Any) -> str:
        """The documents of the step's sequences on this rank, for a message."""
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(data, "documents_of_batch"):
            return ""
        batches = [data.documents_of_batch(back) for back in range(trainer.accumulate_grad_batches)]
        places = list(dict.fromkeys(str(place) for batch in batches for sequence in batch for place in sequence))
        more = f" and {len(places) - self.documents_named} more" if len(places) > self.documents_named else ""
        return f"; documents of the batch: {', '.join(places[: self.documents_named])}{more}"

    def _first_activation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        found: list[str] = []
        module: Any = pl_module

        def watch(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output  # a feed-forward branch adds its routing
                if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
                    found.append(name)

            return hook

        hooks = [module.register_forward_hook(watch(name)) for name, module in pl_module.named_modules() if name]
        try:
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                batch = self._batch
                loss = module.transformer.loss(batch[:, :-1], batch[:, 1:]) if batch is not None else None
        finally:
            for hook in hooks:
                hook.remove()
        if found:
            return found[0]
        return "the loss" if loss is not None and not torch.isfinite(loss) else None

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]


def _of_all_ranks(value: Any) -> list[Any]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
