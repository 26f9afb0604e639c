"""Protects patients by noise: what a run may be, how much noise each client needs, and the record.

Everything that depends on a client's patients and leaves it must pass through noisy gradients, or
be named as exact; a run with anything else is refused with the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from msgspec import to_builtins

from medfed.common.console import Table, say, short, wide_console
from medfed.common.floors import Statistic
from medfed.config.compose import part_of
from medfed.config.description import ClientKeys, ExampleKeys, RunDescription
from medfed.datamodules.client_data import ClientData
from medfed.federation.aggregation import Aggregation
from medfed.federation.algorithm import Cohort
from medfed.federation.card import UNPROTECTED
from medfed.federation.engine import private
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.functional.privacy import epsilon, noise_for
from medfed.models.task import TaskModule, l2_penalty
from medfed.standalone.errors import ConfigError

ALTERNATIVES = "choose algorithm=fedavg, ditto, fedper, ppfl or qupel"


@dataclass(frozen=True)
class Protection:
    """The noise of one client, and what it amounts to."""

    rate: float  # the chance of each patient or row to enter a draw
    draws: int  # draws that the whole run takes
    uses: int  # the most gradients of one draw
    # Standard deviation of the noise of a gradient, in multiples of the clipping bound.
    noise: float
    delta: float  # of the guarantee

    @classmethod
    def of(cls, keys: ExampleKeys, rate: float, draws: int, uses: int) -> Protection:
        """Chooses the least noise that keeps epsilon after all draws."""
        # Several gradients of one draw with separate noise are as one with less noise.
        noise = math.sqrt(uses) * noise_for(rate, draws, keys.epsilon, keys.delta)
        return cls(rate, draws, uses, noise, keys.delta)

    @property
    def noise_of_draw(self) -> float:
        """The noise of a single gradient of a draw that reveals as much as all of its gradients."""
        return self.noise / math.sqrt(self.uses)

    def epsilon(self, gradients: int | None = None) -> float:
        """Returns epsilon after a number of gradients; by default after all.

        Example:
            >>> Protection(rate=0.1, draws=200, uses=1, noise=3.24, delta=1e-5).epsilon(100)
            1.3...
        """
        draws = self.draws if gradients is None else math.ceil(gradients / self.uses)
        return epsilon(self.rate, self.noise_of_draw, draws, self.delta)


def protect(
    config: RunDescription,
    clients: Mapping[str, ClientData],
    task: TaskModule,
    federation: Federation,
    local: LocalTrainer,
    statistics: Sequence[Statistic],
    across: bool,
) -> None:
    """Makes the gradients of all clients of this process noisy."""
    keys = config.privacy.example
    assert keys is not None
    method, name = federation.algorithm, type(federation.algorithm).__name__
    # A class outside the file of its card may override any function of the card's class.
    declared = next(kind for kind in type(method).__mro__ if "card" in vars(kind))
    of_method = declared.__module__ == type(method).__module__
    exposure = method.card.privacy_exposure if of_method else None
    weighted = config.model.get("class_weights") is not None
    mixes = local.model.normalises and config.buffers != "frozen"
    cancel = "class weights cancel in the loss of one patient, and balanced ones are counts"
    unfrozen = f"set {_norm_key(config)}, or buffers=frozen"
    half = str(config.trainer.precision).startswith("16")
    _refuse(  # what would leave a client without noise
        "example",
        (exposure != "gradients", f"{name} {UNPROTECTED.get(exposure)}", ALTERNATIVES),
        *((True, f"{s.what} ({s.key}) would be sent without noise", s.remedy) for s in statistics),
        (weighted, cancel, "set model.class_weights=null"),
        (mixes, "BatchNorm mixes the patients of a batch", unfrozen),
        (config.local.budget == "paper", "each part may take all steps", "set local.budget=equal"),
        (config.local.compile, "draws differ in size", "set local.compile=false"),
        (half, "single gradients overflow in float16", "set trainer.precision=32-true"),
    )
    planned = protections(config, clients, federation)
    noises = {name: one.noise for name, one in planned.items()}
    privacy = private.ExamplePrivacy(keys.clip, noises, keys.unit, keys.chunk, system=across)
    penalty = (lambda: l2_penalty(task.network, task.l2)) if task.l2 else None
    noisy = private.PrivateGradients(task.network, task.data_loss, privacy, penalty)
    local.gradients.private = noisy


def hide_clients(keys: ClientKeys, seed: int, federation: Federation, across: bool) -> None:
    """Makes the replies of all clients of this process noisy."""
    method, up = federation.algorithm, federation.channel.links["up"]
    name = type(method).__name__
    unequal = "clients weigh unequally"
    parts = {*method.parts_sent}
    fits = parts and parts == {*method.parts_averaged} and not method.trains_centrally
    _refuse(
        "client",
        (not fits, f"{name} sends more than what is averaged over clients", "set algorithm=fedavg"),
        (method.weighting != "uniform", unequal, "set algorithm.weighting=uniform"),
        (method.mask_aware, unequal, "set algorithm.mask_aware=false"),
        (type(method.aggregation) is not Aggregation, "it bounds sums", "set aggregation=mean"),
        (up.feedback, "errors carry over to later rounds", "set channel.up.feedback=false"),
        (up.shift is not None, "shifts carry over to later rounds", "set channel.up.shift=null"),
    )
    federation.noise = private.ClientPrivacy(keys.clip, keys.sigma, None if across else seed)
    federation.trainer.normalization = "kept"


def client_epsilon(config: RunDescription, federation: Federation) -> float:
    """Returns the epsilon of ``privacy.client`` for the client that takes part most often."""
    keys, rounds = config.privacy.client, rounds_of(federation.cohort, federation.ids, config)
    assert keys is not None
    phases = max(len(federation.algorithm.phases(n)) for n in range(config.rounds))
    return epsilon(1.0, keys.sigma, phases * max(rounds.values()), keys.delta)


MANY = 50
"""Clients, below which noise for whole clients is usually too much."""


def print_hidden(config: RunDescription, federation: Federation) -> None:
    """Prints the epsilon of whole clients before training."""
    count, keys = len(federation.ids), config.privacy.client
    assert keys is not None
    few = f"; for {count} clients this is seldom useful, and for at least {MANY} it may be"
    masks = "" if federation.channel.sums else " (not from the server: set channel.secure=masks)"
    say(
        wide_console(),
        f"Noise hides each client as a whole in the sums over clients{masks}: epsilon is "
        f"{client_epsilon(config, federation):.3g} at delta {keys.delta:g}{few * (count < MANY)}. "
        "Personal parts, which stay with their clients, get no such noise.",
    )


def protections(
    config: RunDescription, clients: Mapping[str, ClientData], federation: Federation
) -> dict[str, Protection]:
    """Returns the noise of each client of this process."""
    keys, method = config.privacy.example, federation.algorithm
    if keys is None:
        return {}
    rounds = rounds_of(federation.cohort, federation.ids, config)
    planned = {}
    for name, data in clients.items():
        if name not in rounds:  # a hospital that joins later, for which nothing is planned
            continue
        count = int(data.units(keys.unit).max()) + 1
        if keys.delta * count >= 1:
            raise ConfigError(
                f"privacy.example.delta={keys.delta:g} does not protect the {count} "
                f"{keys.unit}s of {name}; set it below {1 / count:.2g}, 1 divided by their number."
            )
        budget = part_of(config, "local")
        epoch = math.ceil(data.num_samples / data.batch_size)
        steps = budget.of(data.num_samples, data.batch_size)
        draws = method.max_batches_drawn(steps, epoch) * budget.accumulate * rounds[name]
        rate = private.rate_of(data)
        planned[name] = Protection.of(keys, rate, draws, method.gradients_per_batch)
    return planned


def rounds_of(cohort: Cohort, ids: Sequence[str], config: RunDescription) -> dict[str, int]:
    """Returns in how many rounds each client takes part."""
    rounds = (cohort.of(ids, config.seed, number) for number in range(config.rounds))
    return {**dict.fromkeys(ids, 0), **Counter(chain.from_iterable(rounds))}


def _norm_key(config: RunDescription) -> str:
    network = config.model.network
    if "norm" in network:
        return "model.network.norm=instance"
    if "norm_name" in network:
        return "model.network.norm_name=instance"
    return "a network without it, such as model=unet model.network.norm=instance"


def _refuse(key: str, *reasons: tuple[object, str, str]) -> None:
    """Raises the first of some reasons that holds: whether it does, the reason, the remedy."""
    for wrong, reason, way in reasons:
        if wrong:
            raise ConfigError(f"privacy.{key} cannot protect this run: {reason}; {way}.")


def print_protections(config: RunDescription, planned: Mapping[str, Protection]) -> None:
    """Prints the noise of each client before training, and what stays exact."""
    keys = config.privacy.example
    assert keys is not None
    table = Table(title=f"Noise that protects each {keys.unit} (clipped at {keys.clip:g})")
    for column in ("client", "drawn per step", "draws", "noise", "epsilon", "delta"):
        table.add_column(column, justify="left" if column == "client" else "right")
    for name, one in planned.items():
        figures = (f"{100 * one.rate:.3g} %", f"{one.draws:,}", f"{one.noise:.3g}")
        table.add_row(short(name), *figures, f"{one.epsilon():.3g}", f"{one.delta:g}")
    console = wide_console()
    console.print(table)
    say(console, NOT_PRIVATE, f"Exact in spite of the noise: {'; '.join(exact(config))}.")


NOT_PRIVATE = (
    "This is a simulation: its noise follows from the seed, so its models are not private. Across "
    "hospitals each site draws noise that nobody can repeat."
)


def exact(config: RunDescription) -> list[str]:
    """Returns in words what leaves clients without noise, and how to send less of it."""
    every = config.evaluation.every
    when = "once, after the last round" if every == config.rounds else f"every {every} rounds"
    parts = ["the numbers of patients and samples", "training losses"]
    parts.append(f"validation metrics, {when}, and the round that they select (evaluation.every)")
    parts.append("test metrics of the selected round")
    if config.data.get("scaling", "range") != "range":
        parts.append("the scaling of columns or channels and the filling of missing values")
    return parts


def record(
    config: RunDescription,
    federation: Federation,
    planned: Mapping[str, Protection],
    gradients: Mapping[str, int],
) -> dict[str, object]:
    """Returns the content of ``privacy.json``."""
    noise, made = federation.noise, federation.trainer.gradients.private
    is_private = not (noise and noise.seed is not None) and not (made and not made.privacy.system)
    content: dict[str, object] = {"private": is_private, "exact": exact(config)}
    if (keys := config.privacy.example) is not None:
        taken = ((name, one, gradients[name]) for name, one in planned.items())
        clients = {c: {**asdict(p), "gradients": n, "epsilon": p.epsilon(n)} for c, p, n in taken}
        content["example"] = {"clip": keys.clip, "unit": keys.unit, "clients": clients}
    if (whole := config.privacy.client) is not None:
        content["client"] = {**to_builtins(whole), "epsilon": client_epsilon(config, federation)}
    return content
