"""Several ranks, each with its own clients: Lightning's DDP without DDP's model wrapping."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy


class ClientSharding(DDPStrategy):
    """Launches ranks as DDP does but synchronises no gradient.

    DDP would mix the gradients of the clients that ranks train at the same time; here ranks
    exchange only encoded replies, when a phase closes.
    """

    strategy_name = "client_sharding"

    def configure_ddp(self) -> None:
        """Leaves the model as it is."""
