"""Experimental: local steps on a GPU, which have never run on one.

``steps.py`` takes the training loop's steps there, ``slots.py`` lets several clients train at once.
Nothing else is used from outside, and a run on a CPU imports none of it.
"""
