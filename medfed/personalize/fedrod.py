"""Fed-RoD: a common head trained with a class-balanced loss, and a personal head added to it.

Chen, Chao: On bridging generic and personalized federated learning for image classification, ICLR
2022, Equations 5 to 8 (the linear variant). With phi the body, G the common and P_i the personal
head, n_iy the client's training samples of class y, and sg the stop-gradient:

    f_i = CE(G(phi(x)) + log n_iy, y)  +  CE(sg(G(phi(x))) + P_i(sg(phi(x))), y)

Only the first term trains phi and G; the second trains P_i only. The client predicts by G + P_i.

| symbol | here |
|---|---|
| phi, G | ``server["shared"]``; G is the task's head |
| P_i | ``state["head"]``, a displacement of G's parameters, 0 at the start |

A head of one layer is affine in its parameters, so G(z) + P(z) is the head with the sum of the
weights, and the gradient of the second term is the task's gradient at that head. Neither this term
nor evaluation uses log n.

Deviations:
- A head of several layers is displaced in its weights instead of its outputs.
- P_i takes plain gradient steps, a second pass each; phi and G take the optimizer's.
- log n is added if outputs are classes. In segmentation, regression and tasks of one output the
  first term is the unchanged task loss. A class that the client lacks gets -1e4: minus infinity
  would make label smoothing infinite.
- The variant with a hyper-network for P_i is left out.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg

ABSENT = -1e4


@dataclass(frozen=True)
class FedRoD(OnboardingRules, FedAvg):
    """FedAvg with a balanced loss, plus a personal head that is added to the common one."""

    needs: ClassVar[Needs | None] = "head"
    card: ClassVar[Card] = Card(
        "Chen, Chao 2022", "personal part", "a head on top of the common one", passes=2,
        client={"personal": 1, "head": 1}, tasks="all; balanced in classification",
        privacy_exposure="outputs",
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        return {"head": {n: torch.zeros_like(weights[n]) for n in split.head}}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Each step on the first term is followed by one on the second at the same weights."""
        head, rate = client.state["head"], client.learning_rate
        before = select(start, client.split.parameters("all"))

        def follow(weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
            nonlocal head, before
            gradient = grad_at({**before, **add(select(before, head), head)})
            head = add(head, select(gradient, head), -rate)
            before = {n: t.clone() for n, t in weights.items()}

        counts = client.data.label_counts
        end = client.train(start, outputs=lambda z: balanced(z, counts), after_step=follow)
        client.state["head"] = head
        return end

    def personal_model(self, client: Client, message: Message) -> Tensors:
        model, head = super().personal_model(client, message), client.state["head"]
        return {**model, **add(select(model, head), head)}

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client trains only its head, starting from the common one."""
        start = self.onboarding_start(client, message)
        body = set(client.split.parameters("all")).difference(client.split.head)
        return client.train(start, after_step=put_back(select(start, body)))


def balanced(outputs: Any, counts: Tensor) -> Any:
    """Returns class logits plus log n; other outputs do not change.

    Example:
        >>> balanced(torch.zeros(1, 2), torch.tensor([1, 0])).tolist()
        [[0.0, -10000.0]]
        >>> balanced(torch.zeros(1, 1), torch.tensor([1, 0])).tolist()
        [[0.0]]
    """
    of_classes = isinstance(outputs, Tensor) and outputs.shape[1:] == counts.shape
    if not of_classes or len(counts) == 1:
        return outputs
    known = counts.to(outputs)
    return outputs + torch.where(known > 0, known.log(), ABSENT)
