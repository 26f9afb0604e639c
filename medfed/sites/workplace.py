"""A site as a configuration describes it: its own data, the agreed model and method."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from medfed.common.errors import DataError
from medfed.common.tensors import Tensors, digest
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.one_site import OwnData, setup_alone
from medfed.federation.algorithm import ClientInfo
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.split import float_entries
from medfed.models.task import TaskModule
from medfed.run.assembly import say_data, unread_data
from medfed.run.experiment import read_start, task_from, trainer_of
from medfed.run.federating import federate
from medfed.run.start import Start
from medfed.sites.agreement import Agreed, fingerprints
from medfed.sites.own_file import SiteFile
from medfed.sites.wire import Facts, Greeting

FACTS = (
    *("in_channels", "out_channels", "spatial_dims", "regions", "exclusive", "millimetres"),
    *("patch_size", "outcome_scale"),
)
"""Keys of the configuration that the data decide, and that the coordinator takes from the sites."""


class SiteModule(FederatedModule):
    """A federation of which one client is here."""

    @property
    def owned(self) -> list[str]:
        """That client."""
        return list(self.federation.clients)


class ConfiguredSite:
    """Implements :class:`medfed.sites.site.Workplace` from a configuration.

    Args:
        config: The composed configuration, whose own keys (data, device, folders) are the site's.
        name: The client that this site is.
        sites: All sites, in order, where the data are this one's alone; None where the data of all
            are here, as in a rehearsal, and the agreed partition deals them out.
    """

    def __init__(self, config: DictConfig, name: str, sites: Sequence[str] | None = None) -> None:
        self.config: DictConfig = config.copy()
        self.name = name
        self.sites = sites
        self._greeting: Greeting | None = None
        self._facts: Facts | None = None
        self._start = Start()
        self._data: FederatedDataModule | None = None
        self._task: TaskModule | None = None
        self._initial: Tensors = {}
        self._agreeing: Generator[bytes, bytes, None] = _nothing()
        self._told: list[bytes | None] = []
        self._answers: list[bytes] = []

    @classmethod
    def of(cls, agreed: Agreed, own: SiteFile) -> ConfiguredSite:
        """Makes a site of what all have agreed on and its own file.

        Raises:
            MedfedError: If they do not go together.
        """
        return cls(own.config(agreed), own.site, None if agreed.cut else agreed.sites)

    @property
    def data(self) -> FederatedDataModule:
        """The data, once they are read."""
        assert self._data is not None
        return self._data

    @property
    def task(self) -> TaskModule:
        """The task, once all have agreed."""
        assert self._task is not None
        return self._task

    def greeting(self) -> Greeting:
        """See :meth:`medfed.sites.site.Workplace.greeting`."""
        if self._greeting is None:
            agreed = fingerprints(self.config)
            self._start = read_start(self.config)
            data = unread_data(self.config)
            if self.sites is not None:
                data.partition = OwnData(data.partition, self.name, self.sites)
            self._agreeing = setup_alone(data, self.name)
            self._told = [next(self._agreeing, None)]
            self._data, self._greeting = data, Greeting(agreed, data.facts())
            self._settle()
        return self._greeting

    def agree(self, number: int, answer: bytes) -> bytes | None:
        """See :meth:`medfed.sites.site.Workplace.agree`.

        Raises:
            DataError: If the coordinator answers otherwise than it did before.
        """
        self.greeting()
        if number and self._answers[number - 1 : number] not in ([], [answer]):
            raise DataError(
                "The coordinator says something else about the columns of all sites than before; "
                "start the site again."
            )
        if number == len(self._told) and number:
            self._answers.append(answer)
            try:
                self._told.append(self._agreeing.send(answer))
            except StopIteration:
                self._told.append(None)
            self._settle()
        if number >= len(self._told):
            raise DataError("The coordinator has left out an answer; start it again.")
        return self._told[number]

    def _settle(self) -> None:
        """Builds the model, once the data are read."""
        if self._told[-1] is not None:
            return
        config = self.config
        say_data(self.data)
        self._task, _, _ = task_from(config, self.data, self._start)
        entries = float_entries(self._task.network)
        self._initial = {n: t.detach().clone() for n, t in entries.items()}
        samples = self.data.clients[self.name].num_samples
        self._facts = Facts(samples, digest(self._initial), facts_of(config, self.data))

    @property
    def exchanged(self) -> tuple[list[bytes], list[bytes]]:
        """What was told of the data, and what was answered."""
        return [told for told in self._told if told is not None], list(self._answers)

    def facts(self) -> Facts:
        """See :meth:`medfed.sites.site.Workplace.facts`."""
        assert self._facts is not None
        return self._facts

    def join(self, everyone: Sequence[ClientInfo]) -> FederatedModule:
        """Returns the federation as it is here, on the site's device and at its first state."""
        task, config = self.task, self.config
        with torch.no_grad():
            for name, tensor in float_entries(task.network).items():
                tensor.copy_(self._initial[name])
        module = SiteModule(task, *federate(config, self.data, task, everyone))
        # Precision and device are those of a Trainer, which carries out nothing here.
        quiet: DictConfig = config.copy()
        quiet.progress = False
        quiet.logger = OmegaConf.create({"_target_": "medfed.run.loggers.no_logger"})
        trainer = trainer_of(quiet, [])
        trainer.strategy.connect(module)
        module.trainer = trainer
        module.setup("fit")
        module.to(trainer.strategy.root_device)
        module.on_fit_start()
        return module


def facts_of(config: DictConfig, data: FederatedDataModule) -> dict[str, Any]:
    """Returns what all sites must have alike of their data, and the coordinator builds with.

    Args:
        config: The configuration, facts of the data filled in.
        data: The site's.
    """
    (client,) = data.clients.values()
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {key: plain.get(key) for key in FACTS} | {
        "personal": plain["model"].get("personal"),
        "shape": list(client.train_inputs(1).shape[1:]),
        "channels": list(data.channel_names),
        "labels": list(data.class_names),
    }


def _nothing() -> Generator[bytes, bytes, None]:
    yield from ()
