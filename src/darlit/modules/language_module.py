"""The LightningModule that every arm shares: backbone x pathway, trained on next-token prediction."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from darlit import pathways
from darlit.backbone import BackboneConfig, build_transformer
from darlit.backbone.compiled import keep_names, unwrapped
from darlit.backbone.config import RUNTIME_FIELDS
from darlit.backbone.loss import IGNORED
from darlit.checkpoint_io import read_checkpoint
from darlit.errors import DarlitError
from darlit.modules.gradients import clip, total_norm
from darlit.modules.metrics import TokenLoss
from darlit.modules.optimizer import OptimizerConfig, parameter_groups, schedule_factor
from darlit.modules.sharding import is_sharded, shard
from darlit.pathways import PathwayOptions
from darlit.precision import REJECTED, WARNED

ConfigT = TypeVar("ConfigT")


class LanguageModule(pl.LightningModule):
    """Base of all arms; a subclass names its pathway and types its options, and nothing else.

    A batch is ``tokens [B, T + 1]``, int64: the first T are the input, the last T the targets. A row of -100 counts in
    no loss and no prediction.

    Args:
        pathway: options of the residual pathway, an instance of the family's ``Options``.
        backbone: shape of the shared backbone.
        optimizer: AdamW and its schedule.
    """

    pathway_name: ClassVar[str]

    def __init__(self, pathway: PathwayOptions, backbone: BackboneConfig, optimizer: OptimizerConfig) -> None:
        super().__init__()
        options_class = pathways.family(self.pathway_name).Options
        self.pathway_options = _as_config(options_class, pathway)
        config = _as_config(BackboneConfig, backbone)
        self.backbone = replace(config, vocab_size=config.rows)
        self.optimizer = _as_config(OptimizerConfig, optimizer)
        # Plain values only: the checkpoint then loads with weights_only and rebuilds this module by itself.
        self.save_hyperparameters(
            {
                "pathway": asdict(self.pathway_options),
                "backbone": asdict(self.backbone),
                "optimizer": asdict(self.optimizer),
            }
        )
        self.transformer = build_transformer(self.pathway_name, self.pathway_options, self.backbone)
        self.scored: dict[str, Scored] = {}
        with torch.device("cpu"):  # also where the model is made on the meta device, without values
            self.val_metric = TokenLoss()
            self.test_metric = TokenLoss()
        keep_names(self)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's takes open files too
        cls,
        checkpoint_path: str | Path,
        map_location: Any = "cpu",
        strict: bool | None = None,
        weights_only: bool | None = True,
        **changes: Any,
    ) -> LanguageModule:
        """Return the model of a checkpoint; on this base class, of whichever arm the checkpoint is.

        Arguments are those of Lightning's method. ``weights_only`` stays True whatever is passed: no code of a
        checkpoint runs here. `darlit.modules.loading.load` also takes run folders and exported files.

        Raises:
            DarlitError: a file that is missing, damaged, no darlit checkpoint, or one of another arm.
        """
        path = Path(checkpoint_path)
        if cls is LanguageModule:
            from darlit.modules.loading import variant_of  # which imports this module

            cls = variant_of(path)
        if not path.exists():
            raise DarlitError(f"{path} does not exist; give a checkpoint that darlit fit wrote")
        checkpoint = read_checkpoint(path, with_weights=True)
        pathway = checkpoint["darlit"]["pathway"]
        if cls.pathway_name != pathway:
            raise DarlitError(
                f"{path} holds pathway {pathway!r}, not one of {cls.__name__}; load it with LanguageModule"
            )
        module = cls(**{**checkpoint["hyper_parameters"], **changes})
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=strict is not False)
        return module.to(map_location)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits ``[B, T, V]``."""
        return self.transformer(tokens_BT)

    def configure_model(self) -> None:
        """Shard the model where the strategy has a mesh of devices; once, however many stages follow."""
        mesh = self.device_mesh
        if mesh is not None and not is_sharded(unwrapped(self.transformer)):
            strategy: Any = self.trainer.strategy
            shard(
                unwrapped(self.transformer),
                mesh["data_parallel"],
                strategy.root_device,
                str(self.trainer.precision),
                getattr(strategy, "expert_mesh", None),
            )

    def setup(self, stage: str) -> None:
        if stage == "fit":
            _check_precision(str(self.trainer.precision))
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            return
        if data.vocab_size > self.backbone.rows:
            raise DarlitError(
                f"the data's token ids go up to {data.vocab_size - 1}, the model has backbone.vocab_size="
                f"{self.backbone.rows}; leave it out, or set it to at least {data.vocab_size}"
            )
        separator = self.backbone.document_separator
        if separator is not None and separator != data.separator:
            raise DarlitError(
                f"backbone.document_separator={separator} does not end a document in this data; its separator is "
                f"{data.separator}: set that, or null"
            )
        for metric in (self.val_metric, self.test_metric):
            metric.token_bytes = torch.from_numpy(data.token_bytes())

    @staticmethod
    def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the model reads and predicts of a batch ``[B, T + 1]``, each ``[B, T]``; -100 is read as token 0."""
        return tokens[:, :-1].clamp(min=0), tokens[:, 1:]

    def training_step(self, tokens: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """``loss``, which the optimiser sees, ``cross_entropy`` and, with experts, ``load_balancing``, ``router_z`` and
        ``tokens_per_expert`` ``[L, E]``. `Meters` logs the losses, as means over the micro-batches and ranks of a step.
        """
        losses = self.transformer.losses(*self.inputs_and_targets(tokens))
        outputs = {"loss": losses.total(self.backbone), "cross_entropy": losses.cross_entropy.detach()}
        if losses.routing is not None:
            outputs["load_balancing"] = losses.routing.load_balancing.detach()
            outputs["router_z"] = losses.routing.z.detach()
            outputs["tokens_per_expert"] = losses.routing.tokens_per_expert_E
        return outputs

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self._evaluate(tokens, self.val_metric)

    def on_validation_epoch_end(self) -> None:
        self._log_metric(self.val_metric, "val")

    def test_step(self, tokens: Tensor, batch_idx: int) -> None:
        self._evaluate(tokens, self.test_metric)

    def on_test_epoch_end(self) -> None:
        self._log_metric(self.test_metric, "test")

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Loss of every target, ``[B, T]`` in nats; 0 for one that does not count."""
        inputs_BT, targets_BT = self.inputs_and_targets(tokens)
        logits_BTV = self(inputs_BT).float()
        return nn.functional.cross_entropy(
            logits_BTV.transpose(1, 2), targets_BT, reduction="none", ignore_index=IGNORED
        )

    def configure_optimizers(self) -> Any:
        transformer = unwrapped(self.transformer)
        backbone = [module for name, module in transformer.named_children() if name != "pathway"]
        groups = parameter_groups(backbone, transformer.pathway, self.optimizer)
        adamw = torch.optim.AdamW(
            groups,
            lr=self.optimizer.learning_rate,
            betas=(self.optimizer.beta1, self.optimizer.beta2),
            fused=True,
        )
        factor = schedule_factor(self.optimizer, self.trainer.max_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(adamw, factor)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        norm = total_norm(parameter.grad for parameter in self.parameters() if parameter.grad is not None)
        self.log("train/grad_norm", norm)
        # Not Lightning's own clipping: it refuses a fused optimizer in mixed precision, which without a gradient
        # scaler clips as any other.
        if gradient_clip_val and gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        elif gradient_clip_val:
            clip(self.parameters(), gradient_clip_val, norm)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        manifest = getattr(getattr(self.trainer, "datamodule", None), "manifest", None)
        checkpoint["darlit"] = {
            "pathway": self.pathway_name,
            "total_steps": self.trainer.max_steps,
            "tokenizer": None if manifest is None else dict(manifest.content["tokenizer"]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_checkpoint(checkpoint)
        planned = checkpoint["darlit"]["total_steps"]
        resumed = self._trainer is not None and self.trainer.training
        if resumed and planned != self.trainer.max_steps:
            warnings.warn(
                f"this run was planned for {planned} steps and is now {self.trainer.max_steps}: the learning-rate "
                "schedule changes from here on, and the run no longer compares with others of its budget",
                stacklevel=2,
            )

    def check_checkpoint(self, checkpoint: dict[str, Any], where: str = "the checkpoint") -> None:
        """Refuse weights of another architecture in one line.

        Raises:
            DarlitError: another pathway, pathway option or backbone shape than this module's.
        """
        theirs = checkpoint.get("hyper_parameters", {})
        their_pathway = checkpoint.get("darlit", {}).get("pathway")
        mine = {"pathway": {"name": self.pathway_name, **self.hparams["pathway"]}, "backbone": self.hparams["backbone"]}
        found = {
            "pathway": {"name": their_pathway, **theirs.get("pathway", {})},
            "backbone": theirs.get("backbone", {}),
        }
        for part, values in mine.items():
            for name, value in values.items():
                if name not in RUNTIME_FIELDS and found[part].get(name) != value:
                    raise DarlitError(
                        f"{where} holds another architecture: {part}.{name} is {found[part].get(name)!r} there and "
                        f"{value!r} here; use the config.yaml beside the checkpoint"
                    )

    def _evaluate(self, tokens: Tensor, metric: TokenLoss) -> None:
        inputs_BT, targets_BT = self.inputs_and_targets(tokens)
        metric.update(self.transformer.loss(inputs_BT, targets_BT), targets_BT)

    def _log_metric(self, metric: TokenLoss, stage: str) -> None:
        values = metric.compute()
        metric.reset()
        self.scored[stage] = Scored(int(values.pop("tokens")), float(values.pop("bytes_per_token")))
        self.log_dict({f"{stage}/{name}": value.float() for name, value in values.items()}, prog_bar=False)


class Scored(NamedTuple):
    """What the last evaluation scored, over all ranks."""

    tokens: int
    bytes_per_token: float


def _check_precision(precision: str) -> None:
    """Reject or warn about a precision in which training goes wrong silently.

    Raises:
        DarlitError: a float16 precision.
    """
    if precision in REJECTED:
        raise DarlitError(
            f"trainer.precision={precision} is not allowed, {REJECTED[precision]}; set bf16-mixed or 32-true"
        )
    if precision in WARNED:
        rank_zero_warn(f"trainer.precision={precision}: {WARNED[precision]}")


def _as_config(config_class: type[ConfigT], value: Any) -> ConfigT:
    """A config dataclass, also from the plain dictionary that a checkpoint holds."""
    return config_class(**value) if isinstance(value, dict) else value
