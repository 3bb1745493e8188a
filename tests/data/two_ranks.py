"""One of two gloo ranks that train, stop and resume: a program for test_datamodule, not a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

from data.test_datamodule import Recorder, run


class Sharded(Recorder):
    """The recorder with its table sharded by FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.table, mesh=self.device_mesh["data_parallel"])


def main(folder: Path, out: Path, epoch: int) -> None:
    seen: dict[str, Any] = {}
    for name in ("ddp", "fsdp2"):
        for cut in (5, epoch):
            checkpoint = out / f"{name} {cut}.ckpt"
            machine, first = train(name, folder, cut, None)
            machine.save_checkpoint(checkpoint)
            machine, second = train(name, folder, 20, str(checkpoint))
            seen[f"{name} {cut}"] = [entry[3] for entry in (*first.seen, *second.seen) if entry[0] == "train"]
    (out / f"seen{machine.global_rank}.json").write_text(json.dumps(seen))


def train(name: str, folder: Path, steps: int, checkpoint: str | None) -> Any:
    model = Recorder if name == "ddp" else Sharded
    strategy = "ddp" if name == "ddp" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    data = {"batch_size": 4, "num_workers": 1}
    return run(folder, steps, checkpoint, data=data, model=model, devices=2, strategy=strategy)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
