"""The weights that a run starts from: those of a file that fit its network, and adapters.

Entries that the file lacks, or has in another shape, keep their random start from the seed. The run
folder keeps a copy of the start, so that to resume or reopen the run needs no other file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.console import say, wide_console
from medfed.common.seeding import torch_rng
from medfed.common.tensors import Tensors, first_non_finite, layout_of
from medfed.common.untrusted import read_json, read_tensors, reading
from medfed.config.compose import build, part_of
from medfed.config.description import RunDescription, describe
from medfed.config.sections import select
from medfed.datamodules.base import FederatedDataModule
from medfed.federation.lightning.collect import rank
from medfed.federation.split import float_entries, match
from medfed.federation.wire.ledger import Entry
from medfed.federation.wire.packet import dense_bytes
from medfed.models.networks.adapters import PATTERN, Adapters, attach
from medfed.models.networks.canonical import Canonical
from medfed.models.task import TaskModule
from medfed.records.folder import RunFolder, save_tensors
from medfed.run.trial import next_to_outputs
from medfed.standalone.errors import CheckpointError, ConfigError, few
from medfed.standalone.files import filled, write_json


@dataclass(frozen=True)
class Weights:
    """What a source of weights holds."""

    tensors: Mapping[str, Tensor]  # the source's tensors by name
    kind: str  # the kind of source, in words
    files: Mapping[str, str]  # SHA-256 of each file that was read, by its path
    # Keys of the configuration that trained the source, and their values.
    adopted: Mapping[str, Any] = field(default_factory=dict)
    # The names of its ``channels`` and ``labels``, in order, if it has them.
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def other_names(self, here: Mapping[str, Sequence[str]]) -> list[str]:
        """Says whether its channels or labels differ from those of the data.

        Example:
            >>> there = Weights({}, "", {}, names={"channels": ["T1", "T2"]})
            >>> there.other_names({"channels": ["T1", "T2"]}), there.other_names({"channels": "T"})
            ([], ['It was trained on the channels T1, T2; these data have T.'])
        """
        return [
            f"It was trained on the {what} {', '.join(there)}; "
            f"these data have {', '.join(here[what])}."
            for what, there in self.names.items()
            if what in here and list(there) != list(here[what])
        ]


# Of DataParallel, torch.compile, Lightning modules and medfed; up to three of them, fewest first.
_PREFIXES = [
    prefixes
    for count in range(4)
    for prefixes in product(("module.", "_orig_mod.", "model.", "network.", "net."), repeat=count)
]
_LISTED = 4  # names in a sentence


@dataclass(frozen=True)
class Account:
    """What became of every entry of a network and of its source."""

    sizes: Mapping[str, int]  # elements of each entry of the network
    matched: Sequence[str]  # entries that start from the source
    missing: Sequence[str]  # entries that the source lacks; they keep their random start
    # Entries with another shape in the source: that shape and the network's. They keep their random
    # start.
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    left: Sequence[str]  # entries outside of ``init.part``; they keep their random start.
    unexpected: Sequence[str]  # names of the source that the network lacks
    stripped: Sequence[str] = ()  # prefixes that were removed from the source's names
    # Number of canonical instances that got noise, and the noise's relative size.
    spread: tuple[int, float] = (0, 0.0)

    def share(self, names: Iterable[str]) -> float:
        """Returns the share of all elements that some entries hold."""
        return sum(self.sizes[n] for n in names) / max(1, sum(self.sizes.values()))

    def lines(self) -> list[str]:
        """Returns the account as sentences, without those that would only say that all is well."""
        text = filled(Path(__file__).parent / "templates" / "start.txt", of=self, few=few)
        return text.strip().split("\n")

    def record(self) -> dict[str, Any]:
        """Returns the content of ``start.json``."""
        groups = {"matched": self.matched, "missing": self.missing, "left": self.left}
        return {
            "said": self.lines(),
            **{key: list(names) for key, names in groups.items()},
            "shapes": {n: [list(s) for s in both] for n, both in self.shapes.items()},
            "unexpected": list(self.unexpected),
            "stripped": list(self.stripped),
            "shares": {k: self.share(n) for k, n in (*groups.items(), ("shapes", self.shapes))},
        }


def fit(
    network: nn.Module,
    weights: Weights,
    *,
    part: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    spread: float = 0.0,
    seed: int = 0,
) -> Account:
    """Copies the weights that fit into a network, in place; `part` and `rename` as in ``init``.

    Weights of an ordinary network go to every instance of a canonical one. Equal instances would
    stay equal for ever, so all but the first also get Gaussian noise: ``spread`` times the root
    mean square of the entry.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> there = {"module.0.weight": torch.ones(3, 2), "module.1.weight": torch.ones(9, 3)}
        >>> account = fit(network, Weights(there, "a state dict", {}))
        >>> account.matched, account.missing, account.shapes
        (['0.weight'], ['0.bias', '1.bias'], {'1.weight': ((9, 3), (1, 3))})
    """
    entries = float_entries(network)
    ordinary = network.ordinary if isinstance(network, Canonical) else str
    plain = {n: name for n in entries if (name := ordinary(n)) is not None}
    tensors = renamed(weights.tensors, rename or {})
    # The source has canonical models, too, or it is an ordinary network.
    choices = product(({n: n for n in entries}, plain), _PREFIXES)
    wanted, stripped = max(choices, key=lambda choice: len(_sources(tensors, *choice)))
    source = _sources(tensors, wanted, stripped)
    allowed = set(entries if part is None else part)
    matched, missing, left = [], [], []
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    instances: set[int] = set()
    for name, entry in entries.items():
        if name not in source:
            if name in plain:  # memberships of canonical models have another start
                missing.append(name)
        elif name not in allowed:
            left.append(name)
        elif (there := tensors[source[name]]).shape != entry.shape:
            shapes[name] = (tuple(there.shape), tuple(entry.shape))
        else:
            value = usable(name, there, entry)
            copied = wanted[name] != name and name.startswith("canonical.")
            which = int(name.split(".")[1]) if copied else 0
            if which and spread and isinstance(entry, nn.Parameter):
                instances.add(which)
                noise = torch.randn(entry.shape, generator=torch_rng(seed, "init.spread", name))
                value = value + spread * value.square().mean().sqrt() * noise.to(value)
            with torch.no_grad():
                entry.copy_(value)
            matched.append(name)
    known, used = {*network.state_dict(), *plain.values()}, {*source.values()}
    bare = {n: reduce(str.removeprefix, stripped, n) for n in tensors}
    unexpected = [n for n, name in bare.items() if n not in used and name not in known]
    sizes = {n: t.numel() for n, t in entries.items() if n in plain}
    account = matched, missing, shapes, left, unexpected
    return Account(sizes, *account, stripped, (len(instances), spread))


def usable(name: str, there: Tensor, entry: Tensor) -> Tensor:
    """Returns a tensor of a source in the type of an entry, after checking it.

    Example:
        >>> usable("w", torch.ones(1, dtype=torch.int64), torch.zeros(1))
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.CheckpointError: init.weights holds w as int64, which are no \
weights; save the state_dict of a trained network.
    """
    kind = str(there.dtype).removeprefix("torch.")
    if there.layout != torch.strided or there.device.type == "meta" or there.is_quantized:
        kind = f"{kind} ({there.layout}, {there.device})"
    elif there.is_floating_point():
        value = there.detach().to(entry.device, entry.dtype)
        if first_non_finite({name: value}) is not None:
            raise CheckpointError(
                f"init.weights holds NaN or infinity in {name}: that training failed, or the file "
                "is damaged; choose another."
            )
        return value
    raise CheckpointError(
        f"init.weights holds {name} as {kind}, which are no weights; save the state_dict of a "
        "trained network."
    )


def renamed(tensors: Mapping[str, Tensor], rename: Mapping[str, str]) -> Tensors:
    """Returns tensors with new prefixes; of several old ones the longest that matches is used.

    Example:
        >>> list(renamed({"a.w": torch.ones(1), "b": torch.ones(1)}, {"a.": "body."}))
        ['body.w', 'b']
    """
    for old in rename:
        if not any(n.startswith(old) for n in tensors):
            there = few(list(tensors), _LISTED)
            raise ConfigError(f"init.rename: no name starts with {old!r}; there are {there}.")
    order = sorted(rename, key=len, reverse=True)

    def new(name: str) -> str:
        old = next((o for o in order if name.startswith(o)), None)
        return name if old is None else f"{rename[old]}{name.removeprefix(old)}"

    return {new(name): tensor for name, tensor in tensors.items()}


def _sources(
    tensors: Iterable[str], wanted: Mapping[str, str], stripped: Iterable[str]
) -> dict[str, str]:
    """The tensor of each entry by the entry's name in the source, whose prefixes are removed."""
    names = {reduce(str.removeprefix, stripped, name): name for name in tensors}
    return {entry: names[name] for entry, name in wanted.items() if name in names}


TASK = "model._target_"
FACTS = ("${in_channels}", "${out_channels}", "${spatial_dims}")  # the data decide them


@dataclass(frozen=True)
class StartRecord:
    """The entries of ``start.json`` that are read again."""

    files: dict[str, str]  # hashes of the files that the run started from
    adopted: dict[str, Any]  # values by key that the run took from them


@dataclass(frozen=True)
class Start:
    """The start of a run; random weights by default."""

    # What the source holds; ``None`` if ``init`` names none or the run folder has them.
    weights: Weights | None = None
    # The folder of a run that is resumed or reopened, which holds its start.
    folder: Path | None = None

    @classmethod
    def read(cls, config: RunDescription) -> tuple[Start, RunDescription]:
        """Reads the file or folder in ``init.weights``, before any data."""
        init = config.init
        if init["weights"] is None:
            return cls(), config
        if config.resume is not None:
            folder = Path(config.resume)
            adopted = read_json(RunFolder(folder).start_json, StartRecord).adopted
            return cls(folder=folder), adopt(config, adopted)[0]
        # See medfed.delivery.start.pretrained.Pretrained.
        weights: Weights = build(init).read()
        config, sentences = adopt(config, weights.adopted)
        if sentences and rank() == 0:
            say(wide_console(), f"From {init.weights}, by init.adopt: {'; '.join(sentences)}.")
        return cls(weights), config

    def begin(
        self,
        config: RunDescription,
        task: TaskModule,
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> Account | None:
        """Copies the weights into the network of a task, and logs which of them fit."""
        if self.folder is not None:
            restore(task.network, self.folder)
        if self.weights is None:
            return None
        source, name = config.init, config.init.weights
        part = _part(config, task, source.part)
        how = {"rename": source.rename, "spread": source.spread, "seed": config.seed}
        account = fit(task.network, self.weights, part=part, **how)
        lines = account.lines()
        if not account.matched:
            both = (account.sizes, self.weights.tensors)
            here, there = (few([*names], _LISTED) for names in both)
            raise CheckpointError(
                f"init.weights={name} has no entry that fits: the network has {here}, the file "
                f"{there}; choose the file's network, or set init.rename and init.part."
            )
        if source.strict and (len(lines) > 1 + bool(account.stripped) + bool(account.spread[0])):
            raise CheckpointError(
                f"init.weights={name} does not fit completely, as init.strict=true requires: "
                f"{' '.join(lines[1:])}"
            )
        if rank() == 0:
            lines += self.weights.other_names(names or {})
            say(wide_console(), f"Starts from {name}, {self.weights.kind}. {lines[0]}", *lines[1:])
        return account

    def write(self, folder: Path, entries: Tensors, account: Account | None) -> None:
        """Writes the start of a run into its folder: all entries of its network."""
        if self.weights is None or account is None:
            return
        run, about = RunFolder(folder), vars(self.weights)
        save_tensors(run.start_safetensors, entries)
        about = {key: about[key] for key in ("kind", "files", "adopted")}
        write_json(run.start_json, {**about, **account.record()})


def adopt(config: RunDescription, adopted: Mapping[str, Any]) -> tuple[RunDescription, list[str]]:
    """Sets keys to the values that trained a source; keys that the data lack are left out."""
    for key, value in adopted.items():
        known = key in (TASK, "model.network") or key.startswith("data.")
        texts = value.values() if key == "model.network" and isinstance(value, Mapping) else [value]
        if not known or any("${" in repr(text) and text not in FACTS for text in texts):
            raise CheckpointError(
                f"The source of init.weights holds {key}={value!r:.60}, which medfed does not "
                "adopt; copy the run again, or set init.adopt=[]."
            )
    task = adopted.get(TASK)
    if task is not None and task != config.model["_target_"]:
        raise ConfigError(
            f"init.weights is a model of {task.rpartition('.')[2]}, but model= chooses "
            f"{config.model['_target_'].rpartition('.')[2]}; choose a model of the same task."
        )
    sentences, changed = [], {}
    for key, value in adopted.items():
        if key != TASK and select(config.values, key, value) != value:
            short = value.get("_target_") if isinstance(value, Mapping) else value
            sentences.append(f"{key}={short}")
            changed[key] = value
    if changed:
        config = describe(config.replacing(changed), config.overrides)  # checks the values
    return config, sentences


def add_adapters(config: RunDescription, task: TaskModule, data: FederatedDataModule) -> None:
    """Adds adapters to the network of a task, if the run has them, and logs which weights train."""
    if config.adapters is None:
        return
    adapters: Adapters = build(config.adapters)
    if adapters.part == "personal":
        if part_of(config, "algorithm").personal != "task":
            raise ConfigError(
                "adapters.part=personal is for methods that keep the model's personal part, "
                "such as fedper, fedrep and pfednet; set algorithm.personal=task, or "
                "adapters.part=shared."
            )
        task.personal = (PATTERN,)
    if adapters.train is None and (layers := next_to_outputs(task, data)):
        adapters = replace(adapters, train=layers)
    adapted = attach(task.network, adapters, config.seed)
    if rank() == 0:
        lines = [f"Adapters of rank {adapters.rank}: {adapted}"]
        if config.init.weights is None:
            lines.append("The frozen weights stay random, because init.weights is not set.")
        say(wide_console(), *lines)


def base_entries(config: RunDescription, task: TaskModule, clients: Sequence[str]) -> list[Entry]:
    """Counts the bytes of frozen weights that clients receive; random ones follow from the seed."""
    if config.adapters is None or config.init.weights is None or config.adapters.base == "known":
        return []
    entries = float_entries(task.network)
    frozen: Any = task.network.frozen_entries
    size = dense_bytes(layout_of({n: t for n, t in entries.items() if n in frozen}))
    return [Entry(0, "base", client, "down", "base", size, size) for client in clients]


def restore(network: nn.Module, folder: Path) -> None:
    """Restores the start of a run from its folder; the source need not exist any more."""
    path = RunFolder(folder).start_safetensors
    tensors, entries = read_tensors(path), float_entries(network)
    with reading(path):
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in entries.items()}:
            raise ValueError("its entries are not those of the run's network")
        with torch.no_grad():
            for name, entry in entries.items():
                entry.copy_(tensors[name])


def _part(
    config: RunDescription, task: TaskModule, part: str | Sequence[str]
) -> Sequence[str] | None:
    """The entries that ``init.part`` matches."""
    if part == "all":
        return None
    if part in ("shared", "personal"):
        network = copy.deepcopy(task.network)
        split = part_of(config, "algorithm").split(network, task.personal, config.buffers)
        if float_entries(network).keys() != float_entries(task.network).keys():
            raise ConfigError(
                f"init.part={part}: single entries of tensors are personal, and weights are read "
                "tensor by tensor; set init.part=all."
            )
        names: Sequence[str] = split.shared if part == "shared" else split.personal
        if not names:
            raise ConfigError(f"init.part={part}: this method has no {part} part.")
        return names
    patterns = [part] if isinstance(part, str) else part
    try:
        return match(patterns, float_entries(task.network))
    except ConfigError as error:
        raise ConfigError(f"init.part: {error}") from error
