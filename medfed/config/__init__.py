"""Configuration: composed by Hydra, checked before anything runs, explained in one sentence."""
