"""Clients with tables that agree in this process, from their training rows alone."""

from medfed.datamodules.base import converse_here
from medfed.datamodules.one_site import Claims
from medfed.datamodules.tables.agreement import client_side, server_side


def agree(settings, train):
    halves = {client: client_side(settings, rows) for client, rows in train.items()}
    return converse_here(server_side(settings, Claims([*train])), halves)
