"""What holds of networks that others wrote, as a table: MONAI's, and oddities made by hand.

    python benchmarks/trust/networks_of_others.py [--only NAME ...]

Each network is trained in federations of three small hospitals. Checked are, bit for bit except in
the first column:

- local = plain PyTorch: local training is a loop of plain PyTorch, up to the order of sums; no
  check of networks that draw random numbers;
- alone = beside others: a hospital has the same model and loss, whoever trains beside it;
- one rank = two: the states of all clients and of the server are those of one process;
- saved = evaluated: a model that is read from a file has the loss that the federation measures;
- resumed = straight: states that were written and read go on as if nothing had happened.

A cell is ok, WRONG, or the number of a sentence of refusal below the table. The exit status is the
number of wrong cells. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from monai.networks import nets  # noqa: E402
from torch import nn  # noqa: E402

from tests.odd_networks import CHECKS, ODDITIES, Case, verdict  # noqa: E402

DRAWS = {"AutoencoderKL", "Classifier", "Critic", "EfficientNet", "FullyConnectedNet"}
DRAWS |= {"VarAutoEncoder"}
FLAT, DEEP = (1, 32, 32), (1, 16, 16, 16)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


def _of_monai() -> dict[str, Case]:
    """MONAI's networks, at sizes for one core."""
    two, kernels = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, [3, 3, 3]
    strides = [1, 2, 2]
    few = {"channels": (4, 8, 8), "strides": (2, 2)}
    makers: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "UNet": (lambda: nets.UNet(**two, **few, norm="batch"), FLAT),
        "BasicUNet": (lambda: nets.BasicUNet(**two, features=(4, 4, 8, 8, 8, 4)), FLAT),
        "BasicUNetPlusPlus": (
            lambda: nets.BasicUNetPlusPlus(
                **two, features=(4, 4, 8, 8, 8, 4), deep_supervision=True
            ),
            FLAT,
        ),
        "AttentionUnet": (lambda: nets.AttentionUnet(**two, **few), FLAT),
        "DynUNet": (
            lambda: nets.DynUNet(
                **two,
                kernel_size=kernels,
                strides=strides,
                upsample_kernel_size=strides[1:],
                filters=[4, 8, 8],
            ),
            FLAT,
        ),
        "DynUNet, deep supervision": (
            lambda: nets.DynUNet(
                **two,
                kernel_size=[*kernels, 3],
                strides=[*strides, 2],
                upsample_kernel_size=[2, 2, 2],
                filters=[4, 8, 8, 8],
                deep_supervision=True,
                deep_supr_num=2,
            ),
            FLAT,
        ),
        "SegResNet": (lambda: nets.SegResNet(**two, init_filters=8, dropout_prob=0.1), FLAT),
        "SegResNetVAE": (
            lambda: nets.SegResNetVAE(
                input_image_size=FLAT[1:],
                spatial_dims=2,
                init_filters=4,
                norm=("GROUP", {"num_groups": 2}),
            ),
            FLAT,
        ),
        "SegResNetDS": (
            lambda: nets.SegResNetDS(
                spatial_dims=2, init_filters=8, blocks_down=(1, 1, 1), dsdepth=2, norm="batch"
            ),
            FLAT,
        ),
        "UNETR": (
            lambda: nets.UNETR(
                1, 2, FLAT[1:], 4, hidden_size=12, mlp_dim=16, num_heads=2, spatial_dims=2
            ),
            FLAT,
        ),
        "SwinUNETR": (
            lambda: nets.SwinUNETR(
                1, 2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), spatial_dims=2
            ),
            (1, 64, 64),
        ),
        "HighResNet": (lambda: nets.HighResNet(2, 1, 2), (1, 16, 16)),
        "DiNTS": (
            lambda: nets.DiNTS(
                nets.TopologyInstance(
                    num_blocks=2,
                    num_depths=2,
                    channel_mul=0.1,
                    spatial_dims=2,
                    arch_code=[np.ones((2, 4)), np.ones((2, 4))],
                ),
                1,
                2,
                spatial_dims=2,
            ),
            FLAT,
        ),
        "DenseNet": (
            lambda: nets.DenseNet(2, 1, 2, init_features=4, growth_rate=4, block_config=(1, 1)),
            FLAT,
        ),
        "ResNet": (
            lambda: nets.ResNet(
                "basic", [1, 1, 1, 1], [4, 4, 8, 8], 2, 1, num_classes=2, conv1_t_size=3
            ),
            FLAT,
        ),
        "EfficientNet": (
            lambda: nets.EfficientNetBN(
                "efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1, num_classes=2
            ),
            FLAT,
        ),
        "ViT": (
            lambda: nets.ViT(
                1,
                FLAT[1:],
                8,
                hidden_size=12,
                mlp_dim=16,
                num_layers=2,
                num_heads=2,
                classification=True,
                spatial_dims=2,
                save_attn=True,
            ),
            FLAT,
        ),
        "ViTAutoEnc": (
            lambda: nets.ViTAutoEnc(
                1,
                FLAT[1:],
                4,
                hidden_size=12,
                mlp_dim=16,
                num_layers=2,
                num_heads=2,
                spatial_dims=2,
            ),
            FLAT,
        ),
        "AutoEncoder": (lambda: nets.AutoEncoder(2, 1, 2, (4, 8), (2, 2)), FLAT),
        "VarAutoEncoder": (
            lambda: nets.VarAutoEncoder(2, FLAT, 2, 4, (4, 8), (2, 2)),
            FLAT,
        ),
        "Classifier": (lambda: nets.Classifier(FLAT, 2, (4, 8), (2, 2)), FLAT),
        "Critic": (lambda: nets.Critic(FLAT, (4, 8), (2, 2)), FLAT),
        "FullyConnectedNet": (lambda: nets.FullyConnectedNet(4, 2, (8, 8), dropout=0.2), (4,)),
        "RegUNet": (
            lambda: nets.RegUNet(2, 1, 4, 2, out_channels=2, extract_levels=(0, 2)),
            FLAT,
        ),
        "Quicknat": (
            lambda: nets.Quicknat(num_classes=2, num_channels=1, num_filters=4),
            (1, 32, 32),
        ),
        "MedNeXt": (
            lambda: nets.MedNeXt(
                spatial_dims=2,
                init_filters=4,
                in_channels=1,
                out_channels=2,
                blocks_down=(1, 1, 1, 1),
                blocks_up=(1, 1, 1, 1),
            ),
            FLAT,
        ),
        "VQVAE": (
            lambda: nets.VQVAE(
                2,
                1,
                1,
                channels=(8, 8),
                num_res_layers=1,
                num_res_channels=(8, 8),
                num_embeddings=8,
                embedding_dim=4,
                downsample_parameters=((2, 4, 1, 1),) * 2,
                upsample_parameters=((2, 4, 1, 1, 0),) * 2,
            ),
            FLAT,
        ),
        "AutoencoderKL": (
            lambda: nets.AutoencoderKL(
                2,
                channels=(4, 4),
                attention_levels=(False, False),
                num_res_blocks=1,
                norm_num_groups=2,
                latent_channels=2,
            ),
            FLAT,
        ),
        "PatchDiscriminator": (
            lambda: nets.PatchDiscriminator(2, 4, 1, num_layers_d=2),
            FLAT,
        ),
        "UNet of volumes": (
            lambda: nets.UNet(
                spatial_dims=3, in_channels=1, out_channels=2, **few, norm="batch", dropout=0.1
            ),
            DEEP,
        ),
    }
    return {
        name: Case(_seeded(make), shape, name in DRAWS) for name, (make, shape) in makers.items()
    }


def cases() -> dict[str, Case]:
    """All networks by name."""
    return {**{name: Case(make) for name, make in ODDITIES.items()}, **_of_monai()}


def table(rows: dict[str, dict[str, str]]) -> str:
    """Returns the verdicts in Markdown, with the sentences of refusals below."""
    sentences = dict.fromkeys(v for row in rows.values() for v in row.values() if ": " in v)
    numbers = {sentence: str(number) for number, sentence in enumerate(sentences, 1)}
    lines = [f"| network | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    for name, row in rows.items():
        cells = (
            f"{v.split()[0].rstrip(':')} ({numbers[v]})" if v in numbers else v
            for v in row.values()
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [
        f"{number}. {sentence.removeprefix('refused: ')}" for sentence, number in numbers.items()
    ]
    return "\n".join([*lines, "", *notes])


def main() -> int:
    """Prints the table; returns how many cells are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these networks alone")
    parser.add_argument("--out", type=Path, help="a JSON file of the verdicts")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, str]] = {}
    for name, case in cases().items():
        if asked.only is None or name in asked.only:
            print(name, file=sys.stderr, flush=True)
            rows[name] = {check: verdict(check, case) for check in CHECKS}
    print(table(rows))
    if asked.out is not None:
        asked.out.write_text(json.dumps(rows, indent=1))
    cells = [cell for row in rows.values() for cell in row.values()]
    return sum(cell != "ok" and not cell.startswith("refused") for cell in cells)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
