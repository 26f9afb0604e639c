"""NVIDIA FLARE, tested with 2.9; no other code of medfed depends on it.

:mod:`~medfed.sites.flare.components` runs at the server and at each site, over the Collab API;
:mod:`~medfed.sites.flare.job` writes a job; :mod:`~medfed.sites.flare.console` submits and watches
it; :mod:`~medfed.sites.flare.console` makes the kits. All but ``job`` need the extra, ``pip install
"medfed[sites]"``.
"""
