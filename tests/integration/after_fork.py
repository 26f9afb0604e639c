"""What a process of a pool has before its first run, and what libraries' threads compute in it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from medfed.common.processes import worker_pool


def state() -> dict[str, object]:
    """What is there before a process computes; its parent is the server that forked it."""
    loaded = "medfed.run.cell" in sys.modules
    import torch

    threads = Path(f"/proc/{os.getppid()}/task")
    return {
        "loaded": loaded,
        "threads of the server": len([*threads.iterdir()]) if threads.exists() else None,
        "folder": tempfile.gettempdir(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
    }


def sums() -> list[float]:
    """What several threads of several libraries compute."""
    import numpy as np
    import torch
    from scipy import ndimage

    torch.set_num_threads(2)
    volume = torch.ones(1, 1, 24, 24, 24, requires_grad=True)
    torch.nn.functional.conv3d(volume, torch.ones(1, 1, 3, 3, 3)).sum().backward()
    matrix = np.ones((512, 512))
    product = torch.ones(512, 512) @ torch.ones(512, 512)
    with ThreadPoolExecutor(2) as pool:
        shifted = pool.submit(ndimage.shift, matrix, 1, order=0).result()
    assert volume.grad is not None
    return [float(each.sum()) for each in (matrix @ matrix, product, volume.grad, shifted)]


if __name__ == "__main__":
    with worker_pool(1, TMPDIR=sys.argv[1]) as pool:
        print(json.dumps([pool.submit(each).result(300) for each in (state, sums)]))
