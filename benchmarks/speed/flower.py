"""A federated round of Flower's simulation beside medfed's: CPU time, in multiples of its steps.

Flower (``pip install "flwr[simulation]"``) needs an environment of its own, whose Python is an
argument. Both sides run FedAvg in processes of their own, once with few and once with more rounds;
the difference of the CPU times of all their processes, divided by that of the rounds, is the cost
of a round without starting up. Flower's simulation runs clients in Ray's workers, so the processes
are found in /proc (Linux). Beside it the same gradient steps in a bare loop, and, of both, wall
time per round.

    python benchmarks/speed/flower.py /path/to/flower/bin/python
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

CLIENTS, STEPS, BATCH = 5, 4, 16
SIZES = f"CLIENTS, STEPS, BATCH = {CLIENTS}, {STEPS}, {BATCH}"
COMMON = """
import sys, time, torch
from torch import nn
torch.set_num_threads(1)
shape = (30,) if NET == "perceptron" else (1, 28, 28)
def network():
    torch.manual_seed(0)
    if NET == "perceptron":
        return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    layers, width = [], 1
    for wider in (16, 32, 64):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        width = wider
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 2))
def data(seed):
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(STEPS * BATCH, *shape, generator=random)
    return images, torch.randint(2, (STEPS * BATCH,), generator=random)
def steps(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(0, STEPS * BATCH, BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[at:at + BATCH]), labels[at:at + BATCH]).backward()
        optimizer.step()
"""
BARE = """
model, sets = network(), [data(k) for k in range(CLIENTS)]
for images, labels in sets:
    steps(model, images, labels)
begin = time.process_time()
for _ in range(ROUNDS):
    for images, labels in sets:
        steps(model, images, labels)
print("BARE", (time.process_time() - begin) / ROUNDS)
"""
MEDFED = """
import medfed
from torch.utils.data import TensorDataset
hospitals = [
    medfed.Hospital(str(k), TensorDataset(*data(k)), batch_size=BATCH) for k in range(CLIENTS)
]
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])
begin = time.time()
medfed.federate("fedavg", network(), loss, hospitals, rounds=ROUNDS, lr=0.01, steps=STEPS)
print("WALL", time.time() - begin)
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
    steps(model, *data(int(context.node_config["partition-id"])))
    counts = MetricRecord({"num-examples": STEPS * BATCH})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counts})
    return Message(content=content, reply_to=message)
@server.main()
def main(grid, context):
    begin = time.time()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    arrays = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS)
    print("WALL", time.time() - begin, flush=True)
run_simulation(server_app=server, client_app=client, num_supernodes=CLIENTS,
               backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
"""


def processes() -> dict[tuple[int, str], tuple[int, float]]:
    """Returns of each process, by number and start time, its parent and its CPU seconds."""
    present = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks = int(fields[11]) + int(fields[12])
        present[int(path.parent.name), fields[19]] = (
            int(fields[1]),
            ticks / os.sysconf("SC_CLK_TCK"),
        )
    return present


def run(python: str, net: str, rounds: int, script: str) -> tuple[float, float]:
    """Runs a script; returns CPU seconds of all its processes, and the number that it prints."""
    source = f"NET, ROUNDS = {net!r}, {rounds}\n{SIZES}\n{COMMON}\n{script}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [python, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    family: dict[tuple[int, str], float] = {}
    while program.poll() is None:
        present = processes()
        numbers = {program.pid} | {number for number, _ in family}
        grown = True
        while grown:  # Ray's workers are grandchildren
            grown = False
            for (number, start), (parent, seconds) in present.items():
                if number in numbers or parent in numbers:
                    grown |= number not in numbers
                    numbers.add(number)
                    family[number, start] = seconds
        time.sleep(0.05)
    output = program.stdout.read() if program.stdout else ""
    printed = [line for line in output.splitlines() if line.startswith(("BARE ", "WALL "))]
    if program.returncode or not printed:
        raise SystemExit(f"{python} did not come to an end (status {program.returncode}).")
    return sum(family.values()), float(printed[-1].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="the Python of an environment with flwr[simulation]")
    parser.add_argument("--rounds", type=int, nargs=2, default=[2, 12], help="for both sides")
    parser.add_argument("--nets", nargs="+", default=["perceptron", "cnn"])
    given = parser.parse_args()
    few, many = given.rounds
    print(
        f"{CLIENTS} clients, {STEPS} steps of {BATCH}: a round's CPU time in bare loops, wall in s"
    )
    for net in given.nets:
        _, bare = run(sys.executable, net, 20, BARE)
        cells = []
        for python, script, factor in ((sys.executable, MEDFED, 10), (given.python, FLOWER, 1)):
            low, high = (run(python, net, factor * rounds, script) for rounds in (few, many))
            rounds = factor * (many - few)
            cpu, wall = ((b - a) / rounds for a, b in zip(low, high, strict=True))
            cells.append(f"{cpu / bare:.2f} ({wall:.3f} s)")
        print(f"{net}: bare {1000 * bare:.1f} ms, medfed {cells[0]}, flower {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
