"""What a bundle needs to mix several instances of a part of a network."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class CanonicalMixture(nn.Module):
    """A network of which a part exists several times; a membership vector mixes what they say.

    `places` names the layers of that part, [""] the whole network. Probabilities are mixed (of
    classes with softmax, of regions with sigmoid) and returned as their logarithms or logits;
    with the identity outputs are mixed as they are.
    """

    membership: Tensor

    def __init__(
        self, network: nn.Module, places: Sequence[str], count: int, activation: str
    ) -> None:
        super().__init__()
        if list(places) == [""]:
            network, places = nn.Sequential(OrderedDict(network=network)), ["network"]
        self.common, self.activation = network, activation
        self.register_buffer("membership", torch.full((count,), 1 / count))
        part = {name.replace(".", "_"): network.get_submodule(name) for name in places}
        self.canonical = nn.ModuleList(nn.ModuleDict(copy.deepcopy(part)) for _ in range(count))
        for layer in self.canonical.modules():
            if getattr(layer, "inplace", False) is True:
                layer.inplace = False  # type: ignore[assignment]  # all instances read its input
        paths: dict[int, list[str]] = {}  # a network may hold a layer in several places
        for path, layer in network.named_modules(remove_duplicate=False):
            paths.setdefault(id(layer), []).append(path)
        everywhere = [paths[id(network.get_submodule(name))] for name in places]
        self._slots = [[self._slot(network, path) for path in names] for names in everywhere]
        self._fill([None] * len(places))
        self._fixed = self._outside(network, [path for names in everywhere for path in names])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mixture: log-probabilities, logits or outcomes."""
        # The common part is computed once for all instances.
        for layer in self._fixed:
            layer.__dict__["forward"] = self._remembering(layer.forward)
        try:
            outputs = torch.stack([self._output(part, x) for part in self.canonical])
        finally:
            for layer in self._fixed:
                del layer.__dict__["forward"]
        return self._mix(outputs)

    def _output(self, part: nn.Module, x: Tensor) -> Tensor:
        self._fill(list(part.children()))
        try:
            answer = self.common(x)
            while not isinstance(answer, Tensor):  # of several answers the logits, or the first
                if isinstance(answer, dict):
                    names = [n for n in ("out", "logits") if n in answer]
                    answer = answer[[*names, *answer][0]]
                else:
                    answer = answer[0]
        finally:
            self._fill([None] * len(self._slots))
        return answer

    def _fill(self, layers: Sequence[nn.Module | None]) -> None:
        for slots, layer in zip(self._slots, layers, strict=True):
            for children, leaf in slots:
                children[leaf] = layer

    @staticmethod
    def _slot(network: nn.Module, path: str) -> tuple[dict[str, Any], str]:
        """Where a layer is kept: its parent's children, and its name among them."""
        parent, _, leaf = path.rpartition(".")
        return network.get_submodule(parent)._modules, leaf

    def _mix(self, outputs: Tensor) -> Tensor:
        """Mixes outputs (K, B, ...)."""
        if self.activation == "identity":
            mixture: Tensor = torch.tensordot(self.membership, outputs, dims=1)
            return mixture
        logs = self.membership.log().reshape(-1, *[1] * (outputs.ndim - 1))
        if self.activation == "softmax":
            return (outputs.log_softmax(2) + logs).logsumexp(0)
        # -softplus(-x) is log sigmoid(x), and finite in ONNX Runtime, too.
        inside, outside = logs - softplus(-outputs), logs - softplus(outputs)
        return inside.logsumexp(0) - outside.logsumexp(0)

    @staticmethod
    def _outside(network: nn.Module, places: Sequence[str]) -> list[nn.Module]:
        """The largest layers that hold none of the places."""

        def holds(name: str) -> bool:
            return not name or any(p.startswith(f"{name}.") for p in places)

        layers = network.named_modules(remove_duplicate=False)
        outside = [m for n, m in layers if not holds(n) and holds(n.rpartition(".")[0])]
        return list({id(layer): layer for layer in outside}.values())

    @staticmethod
    def _remembering(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that computes once what it is asked again."""
        answers: list[tuple[tuple[Tensor, ...], Tensor]] = []

        def forward(*inputs: Tensor) -> Tensor:
            for known, output in answers:
                if all(a is b for a, b in zip(known, inputs, strict=True)):
                    return output
            answers.append((inputs, compute(*inputs)))
            return answers[-1][1]

        return forward
