"""QuPeD: quantised personal models and a shared one learn from each other's outputs.

Ozkara, Singh, Data, Diggavi: QuPeD: Quantized personalization via distillation with applications to
federated learning, NeurIPS 2021, Algorithm 1; QuPeL's successor. With a = lambda_p:

    F_i = (1 - a) [f_i(x_i) + f_i(Q_{c_i}(x_i))] + lambda R(x_i, c_i)
          + a [KD(x_i, w) + KD(Q_{c_i}(x_i), w)]
    KD(x, w) = T^2 mean over cases of KL(softmax(outputs of w / T) | softmax(outputs of x))

| symbol | here |
|---|---|
| w | ``server["shared"]``, a whole network |
| x_i, c_i | ``state["model"]``, ``state["centers"]`` |
| lambda_p in [0, 1], eta_3, T | ``proximity``, ``global_lr``, ``temperature`` |
| lambda, eta_1, eta_2, P, tau | as in :mod:`medfed.personalize.qupel` |

A local step moves x, c and w in this order, on one batch, each at the newest values of the others;
w learns from the outputs of x and of Q_c(x) alone, and never sees a label. Networks of several
``widths`` need only equal outputs; widths as in :mod:`medfed.personalize.heterofl`.

Deviations:
- As in ``qupel``: the proximal map of centres is exact, and with the hard quantiser parameters that
  are not quantised follow the terms of x alone. Without quantiser (``bits=32``) the terms of Q_c(x)
  are left out, of which the paper then has a second copy.
- Outputs of a model that others learn from are those in evaluation mode, with x's statistics.
- Segmentation: KL per voxel; several labels per case: of two classes per label. Continuous
  outcomes: half the squared difference, the KL of normal distributions.
- The network of w is that of x; narrower networks are not quantised.
"""

from __future__ import annotations

from functools import partial

from torch.nn.functional import logsigmoid

from medfed.functional.quantize import quantize
from medfed.method import *
from medfed.personalize.heterofl import Shapes, alone, check_widths, leading, narrow
from medfed.personalize.quantized_base import FIT, FULL
from medfed.personalize.qupel import QuPeL, Tie


@dataclass(frozen=True)
class QuPeD(QuPeL):
    """Quantised personal models, distilled to and from a shared one.

    Attributes:
        proximity: lambda_p in [0, 1]: 0 is ``quantized``, 1 uses no labels.
        global_lr: eta_3 >= 0, the step size of w.
        temperature: T > 0 of the teacher.
        widths: Shares of the channels of the clients' networks, in their order, again from the
            first after the last.
        shapes: The shapes of a client's entries for each of ``widths``, found in the network.
    """

    proximity: Annotated[float, within("[0, 1]"), Range(0.1, 0.9, log=False)] = 0.5
    global_lr: Annotated[float, check_not_negative] = 0.1
    temperature: Annotated[float, check_positive] = 1.0
    widths: Annotated[Sequence[float], check_widths] = (1.0,)
    shapes: Sequence[Shapes] = ()
    card: ClassVar[Card] = Card(
        "Ozkara et al. 2021", "quantised model", "a quantised model", passes=3,
        extra_passes="four forward passes a step; without quantiser 2 and three",
        client={"model": 1}, privacy_exposure="outputs",
        note="the shared model sees outputs of personal ones, no labels; hospitals may have "
        "networks of other widths",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.widths) < 1 and {self.bits, *(self.client_bits or {}).values()} != {FULL}:
            use = "are for networks that are not quantised"
            raise ConfigError(f"algorithm.widths below 1 {use}; set algorithm.bits=32.")

    def adapted(self, split: ParameterSplit, network: nn.Module) -> Self:
        """Finds the parameters to quantise, and the shapes of each width."""
        shapes = [leading(network, r) for r in self.widths if min(self.widths) < 1]
        return replace(super().adapted(split, network), shapes=shapes)

    def scalars_of(self, server: State, client: str) -> dict[str, float]:
        """The bits of a client, and the place of its width."""
        place = list(server["bits"]).index(client) if client in server["bits"] else 0
        more = {"width": float(place % len(self.widths))} if self.shapes else {}
        return super().scalars_of(server, client) | more

    def tie(self, w: Tensors, message: Message) -> Distillation:
        """Returns what distils between the client's model and its copy of w."""
        rate = self.global_lr if message.phase == FIT else 0.0  # a newcomer learns from w alone
        width = message.scalars.get("width")
        restore = None if width is None else narrow(self.shapes[int(width)])
        return Distillation(w, self, rate, restore)

    def train_tied(self, client: Client, message: Message, tie: Tie) -> None:
        """Takes the local steps, from entries that the client's network has."""
        if (width := message.scalars.get("width")) is not None:
            shapes, model = self.shapes[int(width)], client.state["model"]
            has = {n: alone(model[n], shapes[n]) for n in client.split.parameters("all")}
            client.state["model"] = {**model, **has}
        super().train_tied(client, message, tie)

    def onboard(self, client: Client, message: Message) -> Tensors:
        """The client's model starts from w, and learns from the outputs of w, which stays."""
        client.state["model"] = self.onboarding_start(client, message)
        w = select(message.parts["shared"], client.split.parameters("shared"))
        opening = Message("onboard", scalars=self.scalars(0))
        self.train_tied(client, opening, self.tie(w, opening))
        return self.personal_model(client, message)


class Distillation(Tie):
    """The client's copy of w; it and the client's model learn from each other's outputs."""

    def __init__(self, w: Tensors, of: QuPeD, rate: float, restore: AfterStep | None) -> None:
        super().__init__(w, of.proximity, rate)
        self.temperature, self.restore = of.temperature, restore
        self.how = {"batch_penalty": self._learn} if of.proximity else {}

    def gradients(self, grad_at: GradientAt) -> GradientAt:
        """Returns what gives the gradients of (1 - a) f + a KD at a quantised model."""
        return partial(grad_at, term=self._learn) if self.strength else grad_at

    def _learn(self, batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
        """What makes the loss f into (1 - a) f + a KD."""
        known = divergence(batch, forward(live), forward(self.w), self.temperature)
        return self.strength * (known - forward.loss)

    def follow(self, weights: Mapping[str, Tensor], grad_at: GradientAt, centers: Tensors) -> None:
        """Takes w <- w - eta_3 a grad_w [KD(x, w) + KD(Q_c(x), w)], in place."""
        if self.restore is not None:
            self.restore(weights, grad_at)
        if not self.strength * self.rate:
            return
        students = [{n: t.detach().clone() for n, t in weights.items()}]
        if centers:
            near = {n: quantize(students[0][n], c) for n, c in centers.items()}
            students.append({**students[0], **near})

        def teach(batch: Batch, live: Mapping[str, Tensor], forward: Forward) -> Tensor:
            outputs, far = forward(live), self.temperature
            known = [divergence(batch, forward(x), outputs, far) for x in students]
            return self.strength * torch.stack(known).sum() - forward.loss

        gradient = grad_at({**students[0], **self.w}, term=teach)
        for name, tensor in self.w.items():
            tensor.sub_(gradient[name], alpha=self.rate)


def divergence(batch: Batch, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Returns the mean KL divergence of a student's outputs from a softened teacher's.

    Example:
        >>> batch, even = {"label": torch.tensor([0])}, torch.zeros(1, 2)
        >>> round(float(divergence(batch, even, torch.tensor([[0.0, 2.0]]), 1.0)), 4)
        0.3278
        >>> float(divergence({"label": torch.tensor([3.0])}, torch.ones(1, 1), even[:, :1], 1.0))
        0.5
    """
    label = batch["label"]
    if label.ndim == 1 and label.is_floating_point():
        return (student - teacher).square().mean() / 2
    if label.ndim == 1 or (label.ndim > 2 and student.shape[1] == label.shape[1] + 1):
        known, learned = (teacher / temperature).log_softmax(1), student.log_softmax(1)
    elif student.shape == label.shape:  # two classes per channel
        soft = teacher / temperature
        known, learned = (torch.stack([logsigmoid(z), logsigmoid(-z)], 1) for z in (soft, student))
    else:
        raise ConfigError(
            "algorithm=quped is for classification, segmentation, findings and continuous "
            "outcomes; choose algorithm=qupel."
        )
    return temperature**2 * (known.exp() * (known - learned)).sum(1).mean()
