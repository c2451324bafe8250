"""Lightning data module whose training loader draws Poisson batches. Requires the package ``lightning``."""

from __future__ import annotations

from typing import Any

import torch

from dpengine.errors import MissingDependencyError
from dpengine.integrations.lightning_checks import lightning_class

from .data_loader import DPDataLoader


class DPLightningDataModule(lightning_class("LightningDataModule")):  # type: ignore[misc]
    """Wraps another data module and makes its training loader private.

    Args:
        datamodule: The data module, to which all methods delegate.
        generator: Source of reproducible batches, for tests.

    Raises:
        MissingDependencyError: If neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None):
        if type(self).__mro__[1] is object:
            raise MissingDependencyError(
                "DPLightningDataModule needs a package that is not installed.", fix="pip install lightning"
            )
        super().__init__()
        self.datamodule = datamodule
        self.generator = generator

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        self.datamodule.setup(stage)

    def train_dataloader(self) -> DPDataLoader:
        """Returns the private form of the data module's loader."""
        return DPDataLoader.from_data_loader(
            self.datamodule.train_dataloader(), distributed=False, generator=self.generator
        )

    def val_dataloader(self) -> Any:
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)
