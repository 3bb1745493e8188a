"""fit, validate, test and predict: LightningCLI on experiment files with ``base:`` chains.

What goes in: experiment files (merged, first to last), then options, which always win. What two places need is
linked: set by hand, a linked value is refused instead of being overridden in silence.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import set_dumper, set_loader
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from darlit import modules
from darlit.atomic import errors_name
from darlit.callbacks.expert_load import ExpertLoad
from darlit.callbacks.memory_estimate import MemoryEstimate
from darlit.callbacks.meters import Meters
from darlit.callbacks.non_finite import NonFiniteGuard
from darlit.callbacks.pathway_health import PathwayHealth
from darlit.callbacks.pathway_pictures import PathwayPictures
from darlit.callbacks.predictions import PredictionFile
from darlit.callbacks.preemption import Preemption
from darlit.callbacks.progress import BudgetProgress
from darlit.callbacks.run_record import Cell, RunRecord
from darlit.checkpoint_io import AtomicCheckpointIO, find
from darlit.data.datamodule import TokenDataModule, check_length
from darlit.errors import DarlitError, nearest
from darlit.experiment import load_experiments, merge
from darlit.modules import Budget, LanguageModule
from darlit.modules.loading import read_checkpoint
from darlit.modules.sharding import ShardedStrategy
from darlit.settings import TRAINER_DEFAULTS, read_options, typed
from darlit.values import dump, load

set_loader("darlit", load, exceptions=(yaml.YAMLError,))
set_dumper("darlit", dump)


class ExactParser(LightningArgumentParser):
    """Takes options by their full names only, YAML as every verb does, and raises one-line errors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "parser_mode": "darlit", **options})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a DarlitError, with the nearest valid name for an option that is not known."""
        if not self.exit_on_error:
            super().error(message, ex)
        raise DarlitError(_one_line(message, list(self._option_string_actions))) from ex


class DarlitCLI(LightningCLI):
    """LightningCLI with a budget, a run folder per cell and seed, and the callbacks that every run has.

    Args:
        verb: the one subcommand to build a parser for.
        options: see LightningCLI.
    """

    def __init__(self, verb: str, **options: Any) -> None:
        self.verb = verb
        super().__init__(LanguageModule, TokenDataModule, **options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.verb: LightningCLI.subcommands()[self.verb]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--cell", type=str, default="run", help="Name of the run; default: the experiment's.")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Where run folders go.")
        parser.add_argument(
            "--overwrite", type=bool, default=False, help="Delete an earlier run of this cell and seed."
        )
        parser.add_argument("--budget", type=Budget, default=Budget(), help="What the run may spend.")
        parser.add_class_arguments(MemoryEstimate, "memory_estimate")
        parser.add_class_arguments(NonFiniteGuard, "non_finite")
        parser.add_class_arguments(PathwayPictures, "pictures")
        parser.add_class_arguments(Meters, "throughput")
        parser.link_arguments(
            ("budget.tokens", "budget.batch_tokens"),
            "trainer.max_steps",
            compute_fn=lambda tokens, batch: tokens // batch,
        )
        parser.link_arguments(
            ("runs_dir", "cell", "seed_everything"),
            "trainer.default_root_dir",
            compute_fn=lambda runs_dir, cell, seed: str(Path(runs_dir) / cell / f"seed_{int(seed)}"),
        )
        parser.link_arguments("data.sequence_length", "model.init_args.backbone.sequence_length")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def instantiate_classes(self) -> None:
        data = self._option("data")
        check_length(data.folder, data.tokenizer, data.holdout, data.sequence_length)
        # A model that will be sharded is made without values: no process has room for all of them.
        place = torch.device("meta") if _is_sharded(self._option("trainer").strategy) else nullcontext()
        try:
            with place:
                super().instantiate_classes()
        except ValueError as error:
            raise _root_cause(error) from error
        except MisconfigurationException as error:
            reason = " ".join(str(error).split()).rstrip(".!")
            raise DarlitError(
                f"this trainer cannot be had here ({reason}); for a CPU add "
                "--trainer.accelerator cpu --trainer.devices 1 --trainer.precision 32-true --trainer.strategy auto"
            ) from error

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        folder = Path(self._option("trainer").default_root_dir)
        kwargs.setdefault("logger", self._get(self.config_init, "trainer").get("logger"))
        if kwargs["logger"] in (None, True) and self.subcommand == "fit":
            kwargs["logger"] = _tensorboard(folder)
        if self.subcommand != "fit":
            kwargs["logger"] = kwargs["logger"] or False
            self.save_config_callback = None
        given = self._get(self.config_init, "trainer").get("callbacks") or []
        kwargs["callbacks"] = [*self._callbacks(folder), *given]
        kwargs["plugins"] = [*_plugins(), *(self._get(self.config_init, "trainer").get("plugins") or [])]
        with torch.device("cpu"):
            try:
                return super().instantiate_trainer(**kwargs)
            except (TypeError, ValueError) as error:  # Lightning's words on accelerator, devices, strategy, ...
                cause = _root_cause(error)
                raise DarlitError(f"trainer: {' '.join(str(cause).split())}") from error

    def _callbacks(self, folder: Path) -> list[Any]:
        cell = Cell(self._option("cell"), int(self._option("seed_everything")))
        where: dict[str, Any] = {
            "dirpath": folder / "checkpoints",
            "enable_version_counter": False,
            "save_on_train_epoch_end": False,
        }
        # Two of them: with save_last, one alone would keep the last state only as often as it finds a better one.
        best = ModelCheckpoint(filename="best", monitor="val/loss", **where)
        last = ModelCheckpoint(filename="last", monitor=None, **where)
        budget, meters = self._get(self.config_init, "budget"), self._get(self.config_init, "throughput")
        health = PathwayHealth()
        # Order matters: others read the meters; the record is complete before a checkpoint holds it.
        return [
            meters,
            self._get(self.config_init, "memory_estimate"),
            health,
            ExpertLoad(meters),
            self._get(self.config_init, "pictures"),
            self._get(self.config_init, "non_finite"),
            BudgetProgress(meters, budget),
            RunRecord(cell, budget, meters, health),
            best,
            last,
            Preemption(meters),
        ]

    def _parse_ckpt_path(self) -> None:
        """The experiment decides what is built; a checkpoint only has to agree (see `_checkpoint`)."""

    def _option(self, name: str) -> Any:
        return self._get(self.config, name)

    def _checkpoint(self) -> Path | None:
        """The checkpoint that ckpt_path asks for, ``last`` and ``best`` being those of the run folder."""
        asked = self._option("ckpt_path")
        folder = Path(self._option("trainer").default_root_dir) / "checkpoints"
        named = folder / f"{asked}.ckpt" if asked in ("last", "best") else asked and Path(asked)
        if not named:
            return None
        path = find(named)
        if path is None:
            if asked == "last" and self.subcommand == "fit":
                rank_zero_info(f"{folder} holds no last.ckpt yet: starting from the beginning")
                return None
            raise DarlitError(f"ckpt_path={asked}: {named} does not exist; give a checkpoint, last or best")
        sharded = _is_sharded(self._option("trainer").strategy)
        if self.subcommand == "fit" and path.is_dir() != sharded:
            raise DarlitError(
                f"{path} was saved by a run {'with' if path.is_dir() else 'without'} the sharded strategy, this one is "
                f"{'with' if sharded else 'without'} it: optimiser states do not fit; continue it with "
                f"configs/trainer/{'fsdp.yaml' if path.is_dir() else 'gpu.yaml or cpu.yaml'}"
            )
        checkpoint = read_checkpoint(path)
        self.model.check_checkpoint(checkpoint, where=str(path))
        if self.subcommand == "fit" and asked == "last":
            self._check_budget(checkpoint, path)
        return path

    def _check_budget(self, checkpoint: dict[str, Any], path: Path) -> None:
        """A resumed run keeps its budget and schedule, else its summary would claim a budget that it did not have.

        Whoever wants another one from these weights on gives the checkpoint's path and is warned.
        """
        budget = self._get(self.config_init, "budget")
        now = {
            "budget.tokens": budget.tokens,
            "budget.batch_tokens": budget.batch_tokens,
            **{f"optimizer.{name}": value for name, value in self.model.hparams["optimizer"].items()},
        }
        then = {
            **{f"budget.{name}": value for name, value in checkpoint.get("budget", {}).items()},
            **{f"optimizer.{name}": value for name, value in checkpoint["hyper_parameters"]["optimizer"].items()},
        }
        for name, value in now.items():
            if then.get(name) != value:
                raise DarlitError(
                    f"{path} was trained with {name}={then.get(name)!r}, now it is {value!r}; a resumed run keeps its "
                    "budget and schedule: set it back, or start over with another --cell or --overwrite true"
                )

    def fit(self, **kwargs: Any) -> None:
        folder = Path(self._option("trainer").default_root_dir)
        if not self._claim(folder):
            return
        budget = self._get(self.config_init, "budget")
        budget.apply(self.trainer, self.datamodule.batch_size, self.datamodule.sequence_length)
        path = self._checkpoint()
        rank_zero_info(self._headline(folder))
        if isinstance(self.trainer.logger, TensorBoardLogger) and any(folder.glob("events.out.tfevents.*")):
            # What a killed attempt logged after its last checkpoint, if it had one, is trained, and logged, again.
            step = 0 if path is None else read_checkpoint(path)["global_step"]
            self.trainer.logger = _tensorboard(folder, purge_step=step + 1)
        with errors_name(folder):
            self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True)

    def validate(self, **kwargs: Any) -> None:
        self._evaluate("validate")

    def test(self, **kwargs: Any) -> None:
        self._evaluate("test")

    def predict(self, **kwargs: Any) -> None:
        """Write the loss of every target token beside the run, ``predictions.pt``: float32 ``[sequences, T]``."""
        folder = Path(self._option("trainer").default_root_dir)
        self.trainer.callbacks.append(PredictionFile(folder / "predictions.pt"))  # type: ignore[attr-defined]
        self._evaluate("predict", return_predictions=False)

    def _evaluate(self, verb: str, **options: Any) -> None:
        path = self._checkpoint()
        if path is None:
            raise DarlitError(f"{verb} needs weights; add --ckpt_path best, last, or a checkpoint file")
        run = getattr(self.trainer, verb)
        run(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True, **options)

    def _claim(self, folder: Path) -> bool:
        """Make sure that no earlier run is lost; False when there is nothing left to do. All ranks come to the same."""
        earlier = (folder / "checkpoints").exists() or (folder / "summary.json").exists()
        if earlier and self._option("overwrite"):
            if self.trainer.is_global_zero:
                shutil.rmtree(folder)
        elif (folder / "summary.json").exists() and self._option("ckpt_path") == "last":
            if self.trainer.is_global_zero:
                print(f"{folder} is done already; see its summary.json")
            return False
        elif earlier and not self._option("ckpt_path"):
            raise DarlitError(
                f"{folder} holds an earlier run; continue it with --ckpt_path last, start over with --overwrite true, "
                "or choose another --seed_everything, --cell or --runs_dir"
            )
        return True

    def _headline(self, folder: Path) -> str:
        total = sum(parameter.numel() for parameter in self.model.transformer.parameters())
        pathway = sum(parameter.numel() for parameter in self.model.transformer.pathway.parameters())
        budget = self._get(self.config_init, "budget")
        return (
            f"{self._option('cell')}: {total:,} parameters, {pathway:,} of them the pathway's; "
            f"{budget.steps:,} steps of {budget.batch_tokens:,} tokens; {folder}"
        )


def _tensorboard(folder: Path, purge_step: int | None = None) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="", version="", default_hp_metric=False, purge_step=purge_step)


def _plugins() -> list[Any]:
    """Checkpoints in one piece; under Slurm its ranks, without Lightning's own handler, which saves amid a step."""
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return [AtomicCheckpointIO(), *slurm]


def _is_sharded(strategy: Any) -> bool:
    """Whether this value of ``trainer.strategy``, parsed but not made, is the sharded one."""
    name = str(getattr(strategy, "class_path", None) or strategy)
    return name.rpartition(".")[2] == ShardedStrategy.__name__


def _root_cause(error: BaseException) -> BaseException:
    """The DarlitError that another error was raised because of, or that error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DarlitError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def split_configs(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate ``--config`` files from all other arguments."""
    files, others = [], []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("--config", "-c"):
            files.append(value if equals else next(rest, ""))
        else:
            others.append(argument)
    return files, others


_WORDS = {
    "a <class 'list'>": "a list",
    "<class 'int'>": "whole number",
    "<class 'float'>": "number",
    "<class 'bool'>": "true or false",
}


def _one_line(message: str, options: list[str]) -> str:
    """The cause in a message of jsonargparse, which lists every alternative of a type."""
    if found := re.search(r"unrecognized arguments: (-[^ =]*)", message, re.IGNORECASE):
        return f"no option {found[1]}; {nearest(found[1], [name for name in options if name.startswith('--')])}"
    # Nested: the key that is meant, and the reason, come last.
    *_, key, reasons = re.split(r'(?:Parser key "([^"]+)":)', message) if "Parser key" in message else ("", message)
    value = re.search(r"(?:Given|Got) value: (.*)", reasons)
    lines = [line.strip(" -.:") for line in reasons.splitlines()]
    wrong = [line for line in lines if re.match("Expected|Problem", line) and "path but" not in line]
    reason = next((line for line in wrong if "NoneType" not in line), " ".join(reasons.split())[:300])
    for kind, word in _WORDS.items():
        reason = reason.replace(kind, word)
    reason = re.sub(r"\. Got value: .*", "", reason)
    shown = f"={value[1]} is not allowed" if value and len(value[1]) <= 60 else ""
    return f"{key}{shown}: {reason}" if key else reason


def main(arguments: list[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict``; returns the exit status."""
    verb, *rest = arguments
    files, options = split_configs(rest)
    given, others = read_options(options)
    config = merge({"cell": Path(files[-1]).stem} if files else {}, merge(load_experiments(files), given))
    if not {"-h", "--help"} & set(others):
        if "model" not in config:
            raise DarlitError(f"{verb} needs a model; add --config FILE, such as experiments/tiny_dar_full.yaml")
        config = typed(config)
    modules.variants()
    _quieten()
    merged = ["--config", dump(config)] if config else []
    sys.argv = [sys.argv[0], *arguments]  # what Lightning starts the other processes of this machine with
    DarlitCLI(
        verb,
        parser_class=ExactParser,
        subclass_mode_model=True,
        trainer_defaults=TRAINER_DEFAULTS,
        seed_everything_default=0,
        save_config_callback=SaveConfigCallback,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=[verb, *merged, *others],
    )
    return 0


def _quieten() -> None:
    """Silence what is true of every run here and helps nobody; warnings that matter stay."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage() and "litmodels" not in record.getMessage()
    )
    for message in (
        ".*args parameter is intended.*",
        ".*`srun` command is available.*",
        ".*does not have many workers.*",
        ".*LeafSpec.*deprecated.*",
        ".*returned a view tensor.*",  # FSDP2 of experts, whose output no pathway changes in place
        ".*recommended to use .*sync_dist=True.*",  # what is logged on every rank has been reduced, or is rank 0's
    ):
        warnings.filterwarnings("ignore", message=message)
