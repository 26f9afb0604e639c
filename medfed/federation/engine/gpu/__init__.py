"""Experimental: local steps on a GPU; this code has never run on one.

``steps.py`` takes the training loop's steps on a GPU, ``slots.py`` trains several clients in
parallel. Other code uses only these two, and a run on a CPU imports neither.
"""
