"""Makes a federation of a method, a network, a loss and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

from torch import Tensor, nn

from medfed.common.arguments import check_arguments, check_kind
from medfed.federation import inputs
from medfed.federation.algorithm import Algorithm, ClientInfo, Cohort
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch, ClientData
from medfed.federation.contributions import check_contributions
from medfed.federation.duties import check_start
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.missing_channels import entries_reading
from medfed.federation.optimizers import OptimizerFactory, SchedulerFactory
from medfed.federation.split import BufferPolicy, Normalization, ParameterSplit
from medfed.federation.wire.channel import Channel
from medfed.standalone.checks import check_count
from medfed.standalone.errors import ConfigError


def assemble(
    algorithm: Algorithm,
    network: nn.Module,
    loss: Callable[[Batch], Tensor],
    clients: Iterable[ClientData],
    *,
    personal: str | Sequence[str] = (),
    buffers: BufferPolicy = "averaged",
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None = None,
    rounds: Annotated[int, check_count] = 1,
    budget: LocalBudget | None = None,
    channel: Callable[[Algorithm], Channel] | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    measure: Callable[[Iterable[Batch]], float] | None = None,
    everyone: Sequence[ClientInfo] | None = None,
    shape: Sequence[int] | None = None,
    normalization: Normalization = "reestimated",
    compares: bool = False,
) -> tuple[Federation, LocalTrainer]:
    """Makes a federation: split, training loop, initial states, clients.

    `everyone`: all clients of the federation, if not all are in this process. `compares`: whether
    each client's update is compared with the others'.
    """
    inputs.check_network(network)
    clients = inputs.check_clients(clients)
    check_kind("algorithm", algorithm, Algorithm, " such as Ditto()")
    sgd = " such as partial(torch.optim.SGD, lr=0.1)"
    check_kind("optimizer", optimizer, OptimizerFactory, sgd)
    check_arguments(assemble, {n: v for n, v in locals().items() if n != "sgd"})
    inputs.check_labels(algorithm, clients)
    split = algorithm.split(network, personal, buffers)
    check_kind(f"What {algorithm.title}.split returns", split, ParameterSplit)
    algorithm = algorithm.adapted(split, network)
    check_kind("What adapted returns", algorithm, Algorithm)
    inputs.check_optimizer(optimizer, scheduler, rounds, network)
    checked = inputs.CheckedLoss(loss, network)
    local = LocalTrainer(
        network, checked, split, optimizer, scheduler, rounds, budget, seed, measure
    )
    local.model.other.add_loss(loss)
    weights = local.model.initial()
    if everyone is None:
        if not clients:
            raise ConfigError("There is no client; give at least one.")
        everyone = [ClientInfo(c.id, c.num_samples) for c in clients]
    server, state = check_start(algorithm, algorithm.init(weights, split, everyone))
    if algorithm.mask_aware:
        shape = shape or clients[0].train_inputs(1).shape[1:]
        server = {**server, "reads": entries_reading(network, shape)}
    local_clients = {c.id: LocalClient(c, local, weights, state) for c in clients}
    sent = Channel() if channel is None else channel(algorithm)
    if not split.parameters("shared"):
        inputs.check_averages(algorithm, sent)
    if local.budget.optimizer_state == "averaged":
        inputs.check_averages_moments(algorithm, sent)
    cohort = cohort or Cohort()
    cohort.of([c.id for c in everyone], seed, 0)  # an unknown client is named here
    made = Federation(algorithm, server, local_clients, everyone, local, sent, cohort, seed)
    if compares:
        check_contributions(algorithm, sent, split)
    made.compares, local.normalization = compares, normalization
    return made, local
