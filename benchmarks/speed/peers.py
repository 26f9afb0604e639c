"""What a client costs in a round, in medfed and in its peers: CPU time, and memory at the peak.

Sides, all of them FedAvg with the same networks, batches and plain SGD:

bare    the gradient steps and nothing else
lean    one network, the server's weights in, the same steps, one weighted sum
plain   the loop of research code, as PFLlib has it: a model, an optimizer and a DataLoader a client
medfed  ``medfed.federate``
pfl     pfl-research's simulation (``pip install pfl``)
flower  Flower's simulation (``pip install "flwr[simulation]"``), whose clients are workers of Ray

Every side runs in a process of its own. The last two need an environment with PyTorch and MONAI,
whose Python is given; without it their row says how to install them. Each side prints the CPU time
of its rounds, of which the first two are left out. Flower's work is done by many processes, found
in /proc (Linux), so its time is the difference between a run of few and one of more rounds; of the
perceptron it is taken three times, of the others once. Times are those of a client in a round,
medians with quartiles, and multiples of the bare loop's. Memory is the peak of all processes of a
side above that of the bare loop. After the networks comes the perceptron with ``--many`` clients,
of which a tenth takes part in each round. A line on stderr says what runs, and the CPU time so far.

    python benchmarks/speed/peers.py                        # about six minutes of CPU time
    python benchmarks/speed/peers.py --pfl /PLACE/bin/python --flower /PLACE/bin/python
    python benchmarks/speed/peers.py --nets perceptron --clients 1000 --share 0.1
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

NETS = ("perceptron", "small_cnn", "unet_2d", "densenet", "resnet_3d")
COMMON = """
import json, resource, sys, time, warnings, torch
warnings.simplefilter("ignore")
from torch import nn
from torch.nn.functional import cross_entropy
torch.set_num_threads(1)
PICKED = max(1, round(SHARE * CLIENTS))
SHAPES = {"perceptron": (30,), "small_cnn": (1, 28, 28), "unet_2d": (4, 64, 64),
          "densenet": (1, 32, 32), "resnet_3d": (1, 32, 32, 32)}
BATCH = {"unet_2d": 4, "resnet_3d": 2}.get(NET, 16)
STEPS = 4
def network():
    torch.manual_seed(0)
    if NET == "perceptron":
        return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    if NET == "small_cnn":
        layers, width = [], 1
        for wider in (16, 32, 64):
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            width = wider
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 2))
    from monai.networks.nets import DenseNet, UNet, resnet10
    if NET == "unet_2d":
        unet = UNet(2, 4, 2, channels=[8, 16, 32, 64], strides=[2, 2, 2], num_res_units=1)
        return nn.Sequential(unet, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if NET == "densenet":
        return DenseNet(2, 1, 2, init_features=16, growth_rate=8, block_config=(4, 4, 4))
    return resnet10(spatial_dims=3, n_input_channels=1, num_classes=2, widen_factor=0.25)
def data(seed):
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(STEPS * BATCH, *SHAPES[NET], generator=random)
    return images, torch.randint(2, (STEPS * BATCH,), generator=random)
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
def steps(model, optimizer, images, labels):
    for rows in torch.randperm(len(images)).split(BATCH):
        optimizer.zero_grad()
        cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
def picked(number):
    random = torch.Generator().manual_seed(number)
    return torch.randperm(CLIENTS, generator=random)[:PICKED].tolist()
marks = []
def mark(*_):
    marks.append(time.process_time())
def tell():
    times = [b - a for a, b in zip(marks[2:], marks[3:])]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print("TOLD", json.dumps([times, peak]), flush=True)
"""
BARE = """
model, sets = network(), [data(k) for k in range(CLIENTS)]
optimizer = sgd(model)
for number in range(ROUNDS + 3):
    mark()
    for client in picked(number):
        steps(model, optimizer, *sets[client])
tell()
"""
LEAN = """
model, sets = network(), [data(k) for k in range(CLIENTS)]
optimizer = sgd(model)
live = [t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()]
server, total = [t.detach().clone() for t in live], [torch.zeros_like(t) for t in live]
for number in range(ROUNDS + 3):
    mark()
    for client in picked(number):
        with torch.no_grad():
            torch._foreach_copy_(live, server)
        steps(model, optimizer, *sets[client])
        with torch.no_grad():
            torch._foreach_add_(total, live, alpha=1 / PICKED)
    torch._foreach_copy_(server, total)
    torch._foreach_zero_(total)
tell()
"""
PLAIN = """
import copy
from torch.utils.data import DataLoader
server, clients = network(), []
for k in range(CLIENTS):
    model = copy.deepcopy(server)
    clients.append((model, sgd(model), list(zip(*data(k)))))
for number in range(ROUNDS + 3):
    mark()
    cohort = [clients[client] for client in picked(number)]
    for model, optimizer, samples in cohort:
        for new, old in zip(server.parameters(), model.parameters()):
            old.data = new.data.clone()
        model.train()
        for image, label in DataLoader(samples, BATCH, shuffle=True):
            loss = cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for mean in server.parameters():
        mean.data.zero_()
    for model, _, _ in cohort:
        for mean, part in zip(server.parameters(), model.parameters()):
            mean.data += part.data.clone() / PICKED
tell()
"""
MEDFED = """
import medfed
from medfed.federation.federation import Cohort
from torch.utils.data import TensorDataset
hospitals = [
    medfed.Hospital(str(k), TensorDataset(*data(k)), batch_size=BATCH) for k in range(CLIENTS)
]
def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])
medfed.federate(
    "fedavg", network(), loss, hospitals, rounds=ROUNDS + 3, lr=0.01, steps=STEPS,
    cohort=Cohort(fraction=SHARE), after_round=mark,
)
tell()
"""
PFL = """
import numpy as np
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import set_framework_module
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel
set_framework_module(pytorch_ops)
model = network()
def loss(images, labels, eval=False):
    return cross_entropy(model(images), labels)
model.loss, model.metrics = loss, lambda *_, **__: {}
class Mark(TrainingProcessCallback):
    def after_central_iteration(self, *_, **__):
        mark()
        return False, __import__("pfl.metrics", fromlist=["Metrics"]).Metrics()
order = iter([c for number in range(ROUNDS + 9) for c in picked(number)])
users = FederatedDataset(lambda k: Dataset(raw_data=[*sets[k]]), lambda: next(order))
sets = [data(k) for k in range(CLIENTS)]
FederatedAveraging().run(
    backend=SimulatedBackend(training_data=users, val_data=users),
    model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=ROUNDS + 3, evaluation_frequency=10**9,
        train_cohort_size=PICKED, val_cohort_size=0,
    ),
    model_train_params=NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=0.01, local_batch_size=BATCH
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
    callbacks=[Mark()],
)
tell()
"""
FLOWER = """
import os
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
client, server = ClientApp(), ServerApp()
@client.train()
def train(message, context):
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps(model, sgd(model), *data(int(context.node_config["partition-id"])))
    counts = MetricRecord({"num-examples": STEPS * BATCH})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counts})
    return Message(content=content, reply_to=message)
@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=SHARE, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS)
run_simulation(server_app=server, client_app=client, num_supernodes=CLIENTS,
               backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
print("TOLD", "[[], 0]", flush=True)
"""
PACKAGES = {"pfl": "pfl[pytorch]", "flower": "flwr[simulation]"}
SIDES = {"bare": BARE, "lean": LEAN, "plain": PLAIN, "medfed": MEDFED, "pfl": PFL, "flower": FLOWER}


def processes() -> dict[tuple[int, str], tuple[int, float, float]]:
    """Returns of each process, by number and start, its parent, CPU seconds and megabytes."""
    present = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        resident = int(fields[21]) * os.sysconf("SC_PAGESIZE") / 1e6
        present[int(path.parent.name), fields[19]] = int(fields[1]), ticks, resident
    return present


def run(python: str, side: str, **sizes: object) -> tuple[list[float], float, float]:
    """Runs a side; returns its rounds' CPU times, its peak in MB, and CPU seconds of its family."""
    head = "\n".join(f"{name} = {value!r}" for name, value in sizes.items())
    program = subprocess.Popen(
        [python, "-c", f"{head}\n{COMMON}\n{SIDES[side]}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    family: dict[tuple[int, str], float] = {}
    most = 0.0
    while side == "flower" and program.poll() is None:
        present = processes()
        numbers = {program.pid} | {number for number, _ in family}
        grown, memory = True, 0.0
        while grown:  # Ray's workers are grandchildren
            grown, memory = False, 0.0
            for (number, start), (parent, seconds, resident) in present.items():
                if number in numbers or parent in numbers:
                    grown |= number not in numbers
                    numbers.add(number)
                    family[number, start] = seconds
                    memory += resident
        most = max(most, memory)
        time.sleep(0.05)
    output, errors = program.communicate()
    told = [line for line in output.splitlines() if line.startswith("TOLD ")]
    if program.returncode or not told:
        raise SystemExit(f"{side} did not come to an end:\n{errors[-2000:]}")
    times, peak = json.loads(told[-1].removeprefix("TOLD "))
    return times, peak or most, sum(family.values())


def measured(
    side: str, python: str, net: str, everyone: int, share: float, rounds: int
) -> tuple[list[float], float]:
    """Returns milliseconds of a client in a round, some times, and the peak in MB."""
    sizes = {"NET": net, "CLIENTS": everyone, "SHARE": share}
    clients = max(1, round(share * everyone))
    if side != "flower":
        times, peak, _ = run(python, side, **sizes, ROUNDS=rounds)
        return [1e3 * t / clients for t in times], peak
    few, many = 2, 12 if clients <= 10 else 4
    found, peak = [], 0.0
    for _ in range(3 if net == "perceptron" and clients <= 10 else 1):
        (_, _, low), (_, peak, high) = (run(python, side, **sizes, ROUNDS=n) for n in (few, many))
        found.append(1e3 * (high - low) / (many - few) / clients)
    return found, peak


def main() -> None:
    """Prints a row per network and side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pfl", help="the Python of an environment with pfl")
    parser.add_argument("--flower", help="the Python of an environment with flwr[simulation]")
    parser.add_argument("--nets", nargs="+", default=NETS, choices=NETS)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--share", type=float, default=1.0, help="of the clients in each round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--many", type=int, default=1000, help="clients of the last row; 0: none")
    given = parser.parse_args()
    pythons = dict.fromkeys(("bare", "lean", "plain", "medfed"), sys.executable)
    pythons |= {name: p for name in ("pfl", "flower") if (p := getattr(given, name))}
    rows = [(net, given.clients, given.share) for net in given.nets]
    rows += [("perceptron", given.many, 0.1)] if given.many else []
    for number, (net, clients, share) in enumerate(rows):
        if number == 0 or rows[number - 1][1:] != (clients, share):
            print(f"{clients} clients, a share of {share:g} in each round, 4 steps each")
            print(f"{'network':<12}{'side':<8}{'ms (quartiles)':>24}{'/ bare':>8}{'MB more':>9}")
        for side, package in PACKAGES.items():
            if side not in pythons:
                print(
                    f"{net:<12}{side:<8}not measured: make an environment with pip install torch "
                    f"monai '{package}', and name its Python by --{side}"
                )
        bare, base = 0.0, 0.0
        for side, python in pythons.items():
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = spent.ru_utime + spent.ru_stime
            where = f"{number + 1} of {len(rows)}: {net}, {clients} clients, {side}"
            print(f"{where}; {seconds:.0f} s of CPU time so far", file=sys.stderr, flush=True)
            times, peak = measured(side, python, net, clients, share, given.rounds)
            times = times if len(times) > 1 else times * 2
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
            bare, base = (middle, peak) if side == "bare" else (bare, base)
            cell = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            print(
                f"{net:<12}{side:<8}{cell:>24}{middle / bare:>8.2f}{peak - base:>9.0f}", flush=True
            )


if __name__ == "__main__":
    main()
