"""The same experiment across real hospitals: a coordinator, and a site at each of them.

Other packages import only :mod:`medfed.sites.actions`. The two ends exchange bytes; the transport
is NVIDIA FLARE (``flare``), or any that has the two methods of :mod:`medfed.sites.wire`.

===============  ================================================================================
file             question
===============  ================================================================================
agreement        What have all sites agreed on, and what does a site's file add?
wire             What can be asked and answered, and how is it written as bytes?
gate             What must hold before a site answers, and before the answer leaves?
policy           What does a site allow, and what has it answered and spent so far?
site             What does a site do for an admitted request?
site_folder      What does a site keep?
masks            How is a sum made of which nobody sees the parts?
check            What would leave this site, before anything does?
calls            How are all sites asked, and which replies count?
attendance       Who takes part in a round, and who is away?
coordinator      How does a round run, and which replies can no site have sent?
run              How does a whole run go, from the greeting to the results?
status           What happens now, and what went over the network?
withdrawal       How does a site leave, and what is deleted?
newcomers        How does a site join a finished run?
studying         How are statistics counted where nothing is trained?
installed        Which code is installed, and how does a hospital install the same?
deploying        How does a job of FLARE run all this, and go on after a failure?
===============  ================================================================================

A request passes wire, gate and policy before the site trains or counts on it; the gate counts once
more before the reply is sent.
"""
