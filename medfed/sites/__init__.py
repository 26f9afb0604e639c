"""The same experiment across real hospitals: a coordinator, and a site at each of them.

Other packages import only :mod:`medfed.sites.actions`.
The two ends exchange bytes: requests and replies (:mod:`medfed.sites.wire`).
:mod:`medfed.sites.site` answers at a hospital, :mod:`medfed.sites.coordinator` sends requests, and
:mod:`medfed.sites.run` makes both from a configuration.
"""
