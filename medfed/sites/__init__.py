"""The same experiment across real hospitals: a coordinator, and a site at each of them.

Others import :mod:`medfed.sites.actions` alone.
One method per site crosses: bytes in, bytes out (:mod:`medfed.sites.wire`). What they mean is
in :mod:`medfed.sites.wire`; :mod:`medfed.sites.site` answers at a hospital,
:mod:`medfed.sites.coordinator` asks, and :mod:`medfed.sites.run` makes both of a configuration.
"""
