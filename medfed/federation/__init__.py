"""Federated rounds: messages, channels, clients, runtimes. Knows no model and no algorithm."""
