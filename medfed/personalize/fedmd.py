"""FedMD: hospitals exchange outputs on common inputs instead of weights, so networks may differ.

Li, Wang: FedMD: Heterogenous federated learning via model distillation, 2019, Algorithm 1:

    f_i(w) = task loss + gamma mean_j h(f_w(x_j) - z_j)
    z_j <- sum_i p_i f_{w_i}(x_j) over the clients of the last round

| symbol | here |
|---|---|
| x_j, the public inputs | ``inputs`` standard normal ones, drawn by ``seed`` |
| z_j, the consensus | ``server["outputs"]`` |
| gamma | ``strength`` |
| h | Huber's function, d^2 / 2 up to 1 and the line of its slope beyond |
| p_i | ``weighting``; the paper's are 1/N |

Deviations:
- The paper leaves the distance open. Squares alone made a U-Net diverge; h has a bounded slope.
- The paper first fits z_j and then the client's data; here each step does both.
- A client sends the outputs that it had before its last step, which spares a pass.
- The network is in evaluation mode for x_j. Normal inputs resemble standardised tables, and hardly
  images.
- The networks differ in width, as in HeteroFL.
"""

from __future__ import annotations

from torch.nn.functional import smooth_l1_loss

from medfed.method import *
from medfed.personalize.fedavg import KeepsModel
from medfed.personalize.heterofl import HeteroFL, alone, narrow


@dataclass(frozen=True)
class FedMD(KeepsModel, HeteroFL):
    """Local training with a term that draws outputs on common inputs to the others'.

    Attributes:
        strength: gamma >= 0; 0 is local training.
        inputs: How many common inputs there are.
        seed: Of the inputs.
    """

    widths: Sequence[float] = (1.0,)
    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 1.0
    inputs: Annotated[int, check_count] = 32
    seed: int = 0
    parts_sent: ClassVar[tuple[str, ...]] = ("outputs",)
    card: ClassVar[Card] = Card(
        "Li, Wang 2019", "similar clients", "everything", {"outputs": "inputs"},
        {"outputs": "inputs"}, extra_passes="a pass of the common inputs a step",
        server={"outputs": "inputs"}, client={"model": 1},
        note="outputs travel instead of weights; the common inputs are noise, which suits tables",
        privacy_exposure="outputs",
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """There is no consensus yet; every client starts from the same weights."""
        return {"outputs": {}, "num_samples": client_sizes(clients)}, {"model": weights}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends the consensus, and averages the outputs that come back."""
        parts = {"outputs": server["outputs"]} if server["outputs"] else {}
        replies = yield {c: Message("fit", parts, self.width_of(server, c)) for c in cohort}
        return {**server, "outputs": self.mean(server, replies, "outputs")}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the client's own model on its data and towards the consensus."""
        shapes, aim = self.shapes[int(message.scalars["width"])], message.parts.get("outputs")
        answers: Tensors = {}

        def distil(batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
            shape = self.inputs, *batch["image"].shape[1:]
            x = torch.randn(shape, generator=torch_rng(self.seed, "common inputs"))
            z = forward.at(x.to(batch["image"]))
            if not isinstance(z, Tensor):
                raise ConfigError("FedMD needs a network of one output; choose another algorithm.")
            answers["outputs"] = z.detach().clone()
            return self.strength * smooth_l1_loss(z, aim["outputs"]) if aim else 0 * z.sum()

        model = client.state["model"]
        start = {**model, **{n: alone(model[n], s) for n, s in shapes.items() if n in model}}
        client.state["model"] = client.train(start, batch_penalty=distil, after_step=narrow(shapes))
        return Message("fit", {"outputs": answers})
