"""fit, validate, test and predict: LightningCLI on experiment files with ``base:`` chains.

What goes in: experiment files (merged, first to last), then options, which always win. What two places need is
linked: set by hand, a linked value is refused instead of being overridden in silence.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import ArgumentError, set_dumper, set_loader
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from darlit import run
from darlit.atomic import errors_name
from darlit.backbone import BackboneConfig
from darlit.callbacks.checkpoints import MovableCheckpoint
from darlit.callbacks.expert_load import ExpertLoad
from darlit.callbacks.memory_estimate import MemoryEstimate
from darlit.callbacks.meters import Meters
from darlit.callbacks.non_finite import NonFiniteGuard
from darlit.callbacks.pathway_health import PathwayHealth
from darlit.callbacks.pathway_pictures import PathwayPictures
from darlit.callbacks.predictions import PredictionFile
from darlit.callbacks.preemption import Preemption
from darlit.callbacks.progress import BudgetProgress
from darlit.callbacks.run_record import RunRecord
from darlit.catalog import cell_files, cell_name
from darlit.checkpoint_io import AtomicCheckpointIO, find, read_checkpoint
from darlit.data.datamodule import TokenDataModule, check_length
from darlit.data.vocabulary import take_vocabulary
from darlit.errors import DarlitError, nearest
from darlit.experiment import inner, load_parts, merge, shortened, shortening
from darlit.modules import Budget, LanguageModule
from darlit.modules.loading import check_data  # imports the arms: the parser then knows their short names
from darlit.modules.sharding import ShardedStrategy
from darlit.run import Cell, RunFolder
from darlit.run.continuing import check_continued, continued_identity
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
        names = [name for name in self._option_string_actions if name.startswith("--")]
        raise DarlitError(_one_line(message, names)) from ex


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
        parser.add_argument(
            "--cell", type=str, default="run", help="The cell to train, SIZE_ARM; with --config, a name for it."
        )
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
            compute_fn=lambda runs_dir, cell, seed: str(RunFolder.of(runs_dir, cell, int(seed)).path),
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
        kwargs.setdefault("logger", self._get(self.config_init, "trainer").get("logger"))
        if kwargs["logger"] in (None, True) and self.subcommand == "fit":
            kwargs["logger"] = _tensorboard(self.folder)
        if self.subcommand != "fit":
            kwargs["logger"] = kwargs["logger"] or False
        given = self._get(self.config_init, "trainer").get("callbacks") or []
        kwargs["callbacks"] = [*self._callbacks(), *given]
        kwargs["plugins"] = [*_plugins(), *(self._get(self.config_init, "trainer").get("plugins") or [])]
        with torch.device("cpu"):
            try:
                return super().instantiate_trainer(**kwargs)
            except (TypeError, ValueError) as error:  # Lightning's words on accelerator, devices, strategy, ...
                cause = _root_cause(error)
                raise DarlitError(f"trainer: {' '.join(str(cause).split())}") from error

    def _callbacks(self) -> list[Any]:
        where: dict[str, Any] = {
            "dirpath": self.folder.checkpoints,
            "enable_version_counter": False,
            "save_on_train_epoch_end": False,
        }
        # Two of them: with save_last, one alone would keep the last state only as often as it finds a better one.
        best = MovableCheckpoint(filename="best", monitor="val/loss", **where)
        last = MovableCheckpoint(filename="last", monitor=None, **where)
        # Order matters: others read the meters; the record is complete before a checkpoint holds it.
        meters = self.record.meters
        return [
            meters,
            self._get(self.config_init, "memory_estimate"),
            self.record.health,
            ExpertLoad(meters),
            self._get(self.config_init, "pictures"),
            self._get(self.config_init, "non_finite"),
            BudgetProgress(meters, self.budget),
            self.record,
            best,
            last,
            Preemption(meters),
        ]

    def _parse_ckpt_path(self) -> None:
        """The experiment decides what is built; a checkpoint only has to agree (see `_checkpoint`)."""

    def _option(self, name: str) -> Any:
        return self._get(self.config, name)

    def before_instantiate_classes(self) -> None:
        """Loggers that would write into the current folder write into the folder of the run.

        The vocabulary is that of the data where the experiment leaves it open; config.yaml then has the number.
        """
        take_vocabulary(self.config[self.subcommand])
        loggers = self._option("trainer").logger
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            options = getattr(logger, "init_args", None)
            if options is not None and options.get("save_dir", "") in (None, "."):
                options["save_dir"] = str(self.folder.path)

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self._option("trainer").default_root_dir))

    @cached_property
    def record(self) -> RunRecord:
        meters = self._get(self.config_init, "throughput")
        return RunRecord(
            Cell(self._option("cell")), self._option("seed_everything"), self.budget, meters, PathwayHealth()
        )

    @cached_property
    def budget(self) -> Budget:
        found: Budget = self._get(self.config_init, "budget")
        return found

    def resolved(self) -> dict[str, Any]:
        """The configuration with every default, as plain values; of a run whose folder is new."""
        plain = load(self._parser(self.verb).dump(self.config[self.verb], skip_unset=False))
        return {**plain, "overwrite": False, "ckpt_path": None}

    def _checkpoint(self) -> Path | None:
        """The checkpoint that ckpt_path asks for, ``last`` and ``best`` being those of the run folder."""
        asked = self._option("ckpt_path")
        named = self.folder.checkpoint(asked) if asked in ("last", "best") else asked and Path(asked)
        if not named:
            return None
        path = find(named)
        if path is None:
            if asked == "last" and self.subcommand == "fit":
                rank_zero_info(f"{self.folder.checkpoints} holds no last.ckpt yet: starting from the beginning")
                return None
            raise DarlitError(f"ckpt_path={asked}: {named} does not exist; give a checkpoint, last or best")
        sharded = _is_sharded(self._option("trainer").strategy)
        if self.subcommand == "fit" and path.is_dir() != sharded:
            raise DarlitError(
                f"{path} was saved by a run {'with' if path.is_dir() else 'without'} the sharded strategy, this one is "
                f"{'with' if sharded else 'without'} it: optimiser states do not fit; continue it with "
                f"configs/trainer/{'fsdp.yaml' if path.is_dir() else 'gpu.yaml or cpu.yaml'}"
            )
        return path

    def fit(self, **kwargs: Any) -> None:
        lead = self.trainer.is_global_zero
        with run.hold(self.folder) if lead else nullcontext():
            overwrite, in_place = self._option("overwrite"), self._continues_in_place()
            if self.folder.has_results and not overwrite and not in_place:
                raise DarlitError(
                    f"{self.folder.path} holds an earlier run; continue it with --ckpt_path last, start over with "
                    "--overwrite true, or choose another --seed_everything, --cell or --runs_dir"
                )
            if overwrite and in_place and self._option("ckpt_path") != "last":
                raise DarlitError("--overwrite true deletes what --ckpt_path asks for; leave one of the two out")
            identity = self._identity() if lead else {}
            if lead and self.folder.has_results and not overwrite:
                check_continued(self.folder.recorded(), identity, str(self.folder.path))
            if self.folder.is_done and not overwrite:
                if lead:
                    print(f"{self.folder.path} is done already; see its summary.json")
                return
            path = None if overwrite and in_place else self._checkpoint()
            self.budget.apply(self.trainer, self.datamodule.batch_size, self.datamodule.sequence_length)
            if lead and path is not None:
                checkpoint = read_checkpoint(path)
                identity = continued_identity(checkpoint, identity, str(path), in_place)
                self.model.check_checkpoint(checkpoint, where=str(path))
            if lead:
                if overwrite:
                    self.folder.clear()
                config = dump(self.resolved())
                self.folder.start(config, identity, self.trainer.world_size)
            self.record.identity = identity
            rank_zero_info(self._headline())
            if isinstance(self.trainer.logger, TensorBoardLogger) and any(
                self.folder.path.glob("events.out.tfevents.*")
            ):
                # What a killed attempt logged after its last checkpoint, if it had one, is trained, and logged, again.
                step = 0 if path is None else read_checkpoint(path)["global_step"]
                self.trainer.logger = _tensorboard(self.folder, purge_step=step + 1)
            with errors_name(self.folder.path):
                self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True)

    def _continues_in_place(self) -> bool:
        """Whether ckpt_path asks for a checkpoint of the run folder itself."""
        asked = self._option("ckpt_path")
        if not asked or asked in ("last", "best"):
            return bool(asked)
        return self.folder.path.resolve() in Path(asked).resolve().parents

    def _identity(self) -> dict[str, Any]:
        self.datamodule.prepare_data()
        return run.identity_of(self.resolved(), self.datamodule.identity(), self.trainer.world_size)

    def validate(self, **kwargs: Any) -> None:
        self._evaluate("validate")

    def test(self, **kwargs: Any) -> None:
        self._evaluate("test")

    def predict(self, **kwargs: Any) -> None:
        """Write the loss of every target token beside the run, ``predictions.pt``: float32 ``[sequences, T]``."""
        self.trainer.callbacks.append(PredictionFile(self.folder.path / "predictions.pt"))  # type: ignore[attr-defined]
        self._evaluate("predict", return_predictions=False)

    def _evaluate(self, verb: str, **options: Any) -> None:
        path = self._checkpoint()
        if path is None:
            raise DarlitError(f"{verb} needs weights; add --ckpt_path best, last, or a checkpoint file")
        checkpoint = read_checkpoint(path)
        self.model.check_checkpoint(checkpoint, where=str(path))
        if self.trainer.is_global_zero:
            self.datamodule.prepare_data()
            check_data(checkpoint.get("identity", {}), self.datamodule.identity(), str(path))
        run_verb = getattr(self.trainer, verb)
        run_verb(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True, **options)

    def _headline(self) -> str:
        total = sum(parameter.numel() for parameter in self.model.transformer.parameters())
        pathway = sum(parameter.numel() for parameter in self.model.transformer.pathway.parameters())
        return (
            f"{self._option('cell')}: {total:,} parameters, {pathway:,} of them the pathway's; "
            f"{self.budget.steps:,} steps of {self.budget.batch_tokens:,} tokens; {self.folder.path}"
        )


def _tensorboard(folder: RunFolder, purge_step: int | None = None) -> TensorBoardLogger:
    return TensorBoardLogger(folder.path, name="", version="", default_hp_metric=False, purge_step=purge_step)


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
        model = [f"--model.{part}" for part in ("backbone", "optimizer", "pathway")]
        shape = [f"--model.backbone.{name}" for name in BackboneConfig.__dataclass_fields__]
        return f"no option {found[1]}; {nearest(found[1], [*options, *model, *shape])}"
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
    config: dict[str, Any] = {}
    if not {"-h", "--help"} & set(others):
        if not files and "class_path" not in inner(given, "model") and "cell" in given:
            files = [str(file) for file in cell_files(given["cell"])]
        name = {"cell": cell_name([Path(file) for file in files])} if files else {}
        config = merge(name, merge(load_parts(files), given))
        if "model" not in config:
            raise DarlitError(f"{verb} needs a model; add --cell small_dar_full, or --config FILE")
        config = typed(config)
        if line := shortening():
            config = shortened(config, files[-1] if files else verb)
            rank_zero_only(print)(line)
    _quieten()
    parsed = _arguments(verb, config, others)
    sys.argv = [sys.argv[0], *arguments]  # what Lightning starts the other processes of this machine with
    DarlitCLI(verb, args=parsed, **_SETTINGS)
    return 0


def resolve(config: Mapping[str, Any], options: Sequence[str] = ()) -> dict[str, Any]:
    """What ``darlit fit`` would train with an experiment and options: every value as it takes it, nothing made.

    Raises:
        DarlitError: the configuration is not allowed.
    """
    _quieten()
    given, others = read_options(options)
    arguments = _arguments("fit", typed(merge(dict(config), given)), others)
    resolver = _resolver()
    try:
        resolver.parse_arguments(resolver.parser, arguments)
    except ArgumentError as error:
        raise DarlitError(" ".join(str(error).split())[:400]) from error
    return resolver.resolved()


class _Resolver(DarlitCLI):
    """Reads configurations and makes nothing of them."""

    def _set_seed(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


@cache
def _resolver() -> _Resolver:
    settings = {**_SETTINGS, "parser_kwargs": {"exit_on_error": False}}
    return _Resolver("fit", args=["fit", "--model", "ResidualLM"], **settings)


def _arguments(verb: str, config: dict[str, Any], options: list[str]) -> list[str]:
    return [verb, *(["--config", dump(config)] if config else []), *options]


_SETTINGS: dict[str, Any] = {
    "parser_class": ExactParser,
    "subclass_mode_model": True,
    "trainer_defaults": TRAINER_DEFAULTS,
    "seed_everything_default": 0,
    "save_config_callback": None,
    "auto_configure_optimizers": False,
    "load_from_checkpoint_support": False,
}


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
