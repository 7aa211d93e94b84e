"""Headers that are Ray Serve's own and that no client may send."""

INTERNAL_HEADERS = (
    "^(x-request-(timeout-seconds|disconnect-disabled)|serve[-_]multiplexed[-_]model[-_]id"
    "|x[-_]session[-_]id|x-serve-router-.*)$"
)
"""Regular expression over a name in lower case. They switch off Serve's deadline and its watch for
clients that leave, choose a replica, or claim to come from its router; and Serve decodes them as
UTF-8 before anybody can refuse them.

Source: serve/_private/constants.py and http_util.py of Ray 2.60.
"""
