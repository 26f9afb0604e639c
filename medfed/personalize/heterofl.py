"""HeteroFL: hospitals with less computing power train the leading channels of the common network.

Diao, Ding, Tarokh: HeteroFL: Computation and communication efficient federated learning for
heterogeneous clients, ICLR 2021, Algorithm 1:

    client i of width r has the leading ceil(r d) of the d channels of each hidden layer
    w[e] <- w[e] + sum_i p_i (w_i - w)[e] / sum_i p_i over the clients that have entry e

| symbol | here |
|---|---|
| w (the paper's W_g) | ``server["shared"]`` |
| r | ``widths``, given out to the clients in their order, again from the first after the last |
| p_i | ``weighting``; the paper's are 1/N |

Only a client's entries travel. In its network all others are 0, in training and after: as weights
into and out of a missing channel they have no effect. The channels of inputs and of outputs are
whole at every width, and so are hidden layers with as many channels, and parameters of other layers
than linear ones, convolutions and normalisation. A personal part is as wide as the rest. A client
that joins later gets the whole network.

Deviations: no scaling of the activations by 1/r and no masked cross-entropy. Where a network
concatenates channels, as a U-Net does, its leading channels are those after the concatenation. In
group normalisation missing channels count as zeros.
"""

from __future__ import annotations

import math

from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from medfed.federation.aggregation import pooled_variances
from medfed.federation.split import NORMALIZATION, float_entries
from medfed.method import *
from medfed.personalize.fedavg import FedAvg, displacement

Shapes = Mapping[str, tuple[int, ...]]


def check_widths(key: str, widths: Sequence[float]) -> None:
    """Checks the shares of channels of the clients' networks."""
    if not widths or not all(0 < r <= 1 for r in widths):
        shares = "shares of the channels in (0, 1], such as [1,0.5]"
        raise ConfigError(f"{key}={list(widths)} must be {shares}.")


@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """FedAvg over networks of several widths.

    Attributes:
        widths: r in (0, 1] of the clients, in their order; 1 alone is FedAvg.
        shapes: The shapes of a client's entries for each of ``widths``, found in the network.
    """

    widths: Annotated[Sequence[float], check_widths] = (1.0, 0.5)
    shapes: Sequence[Shapes] = ()
    supports_missing_channels: ClassVar[bool] = False
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = gradients_only(
        "Diao et al. 2021", at_most=True,
        note="hospitals of little computing power train a narrower network",
    )  # fmt: skip

    def adapted(self, split: ParameterSplit, network: nn.Module) -> HeteroFL:
        return replace(self, shapes=tuple(leading(network, r) for r in self.widths))

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends each client its entries; averages every entry over those that have it."""
        replies = yield {c: replace(self.broadcast(server, c), phase="fit") for c in cohort}
        weights = dict(zip(replies, self.weights(server, replies), strict=True))
        means = {}
        for name, tensor in server["shared"].items():
            total, share = torch.zeros_like(tensor), torch.zeros_like(tensor)
            for client, reply in replies.items():
                update = reply.parts["shared"][name]
                corner(total, update.shape).add_(update, alpha=weights[client])
                corner(share, update.shape).add_(weights[client])
            means[name] = torch.where(share > 0, total / share, 0)
        return {**server, "shared": add(server["shared"], pooled_variances(means, None))}

    def broadcast(self, server: State, client: str) -> Message:
        """The client's entries of the shared part, and the place of its width."""
        told = self.width_of(server, client)
        shapes = self.shapes[int(told["width"])]
        parts = {n: corner(t, shapes[n]).clone() for n, t in server["shared"].items()}
        return Message("deliver", {"shared": parts}, told)

    def width_of(self, server: State, client: str) -> dict[str, float]:
        """Tells a client the place of its width."""
        return {"width": float(list(server["num_samples"]).index(client) % len(self.widths))}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the client's entries; all others stay 0."""
        shapes = self.shapes[int(message.scalars["width"])]
        end = client.train(self.personal_model(client, message), after_step=narrow(shapes))
        shared, client.state["personal"] = client.split.split(end)
        shared = {n: corner(t, shapes[n]).clone() for n, t in shared.items()}
        return displacement(shared, message.parts["shared"])

    def personal_model(self, client: Client, message: Message) -> Tensors:
        shapes = self.shapes[int(message.scalars["width"])]
        model = dict(client.state["personal"])
        for name, tensor in message.parts["shared"].items():
            model[name] = torch.zeros_like(client.weights[name])
            corner(model[name], tensor.shape).copy_(tensor)
        # Statistics of missing channels have no effect, as these channels have no weight.
        narrowed = client.split.parameters("all")
        return {**model, **{n: alone(model[n], shapes[n]) for n in narrowed if n in model}}


def corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a view of the leading entries.

    Example:
        >>> corner(torch.arange(6.0).view(2, 3), (1, 2))
        tensor([[0., 1.]])
    """
    return tensor[tuple(slice(length) for length in shape)]


def alone(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a tensor whose entries other than the leading ones are 0.

    Example:
        >>> alone(torch.ones(3), (2,))
        tensor([1., 1., 0.])
    """
    entries = torch.zeros_like(tensor)
    corner(entries, shape).copy_(corner(tensor, shape))
    return entries


def narrow(shapes: Shapes) -> AfterStep:
    """Returns an ``after_step`` that puts missing entries back to 0."""

    def restore(weights: Mapping[str, Tensor], _: GradientAt) -> None:
        for name, tensor in weights.items():
            if tensor.shape != shapes[name]:
                tensor.copy_(alone(tensor, shapes[name]))

    return restore


def leading(network: nn.Module, width: float) -> Shapes:
    """Returns the shapes of the leading entries of every layer.

    Example:
        >>> leading(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 2)), 0.5)
        {'0.weight': (2, 3), '0.bias': (2,), '1.weight': (3, 2), '1.bias': (3,), \
'2.weight': (2, 3), '2.bias': (2,)}
    """
    shapes = {n: tuple(t.shape) for n, t in float_entries(network).items()}
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | _ConvNd)]
    if not layers:
        raise ConfigError("HeteroFL finds no linear or convolutional layer in this network.")
    inputs, outputs = _ends(layers[0])[0], _ends(layers[-1])[1]
    for prefix, module in network.named_modules():
        if isinstance(module, nn.Linear | _ConvNd):
            reads, gives = _ends(module)
            across = reads if reads == inputs else math.ceil(width * reads)
            along = gives if gives == outputs else math.ceil(width * gives)
            pair = (across, along) if isinstance(module, _ConvTransposeNd) else (along, across)
            if getattr(module, "groups", 1) > 1:  # each group keeps all that it has
                pair = (pair[0], module.weight.shape[1])
            axes = {"weight": (*pair, *module.weight.shape[2:]), "bias": (along,)}
        elif isinstance(module, NORMALIZATION):
            tensors = {**module._parameters, **module._buffers}
            counts = {n: t.shape for n, t in tensors.items() if t is not None and t.ndim == 1}
            axes = {n: (math.ceil(width * shape[0]),) for n, shape in counts.items()}
        else:
            continue
        names = {n: f"{prefix}.{n}".lstrip(".") for n in axes}
        shapes |= {names[n]: shape for n, shape in axes.items() if names[n] in shapes}
    return shapes


def _ends(layer: nn.Module) -> tuple[int, int]:
    """How many channels a layer reads and gives."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    assert isinstance(layer, _ConvNd)
    return layer.in_channels, layer.out_channels
