"""Lightning callbacks that carry out, evaluate, count and save the federated rounds."""

from medfed.federation.callbacks.checkpoint import RoundCheckpoint
from medfed.federation.callbacks.communication import CommunicationLogger
from medfed.federation.callbacks.evaluation import PersonalEvaluation
from medfed.federation.callbacks.patience import Patience
from medfed.federation.callbacks.progress import RoundProgress
from medfed.federation.callbacks.rounds import FederatedRounds

__all__ = [
    "CommunicationLogger",
    "FederatedRounds",
    "Patience",
    "PersonalEvaluation",
    "RoundCheckpoint",
    "RoundProgress",
]
