"""Experimental: local steps on a GPU; this code has never run on one.

Other code uses only ``steps.py``, and a run on a CPU does not import it.
"""
