"""Checkpoints of a run folder that stay right when the folder is moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from darlit.checkpoint_io import find


class MovableCheckpoint(ModelCheckpoint):
    """Lightning's, which forgets the best score where the folder has another path than when it was saved.

    Only names within the folder count here. A folder without the best checkpoint, such as that of a run which
    continues another one, starts without a best score.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = self._here(state_dict["best_model_path"])
        if best and find(Path(best)) is None:
            return
        super().load_state_dict(
            {
                **state_dict,
                "dirpath": self.dirpath,
                "best_model_path": best,
                "kth_best_model_path": self._here(state_dict["kth_best_model_path"]),
                "last_model_path": self._here(state_dict["last_model_path"]),
                "best_k_models": {self._here(path): score for path, score in state_dict["best_k_models"].items()},
            }
        )

    def _here(self, path: str) -> str:
        return str(Path(self.dirpath or "") / Path(path).name) if path else path
