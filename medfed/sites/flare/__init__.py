"""NVIDIA FLARE, measured with 2.9; nothing else of medfed knows it.

:mod:`~medfed.sites.flare.components` is what runs at the server and at each site, over the Collab
API; :mod:`~medfed.sites.flare.job` writes a job; :mod:`~medfed.sites.flare.console` hands it in and
looks after it; :mod:`~medfed.sites.flare.console` makes the kits. All but ``job`` need the extra,
``pip install "medfed[sites]"``.
"""
