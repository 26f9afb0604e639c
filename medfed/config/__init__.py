"""Composes configurations with Hydra and checks them; each error is one sentence."""
