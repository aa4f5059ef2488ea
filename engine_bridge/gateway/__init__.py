"""The door in front of several engines: admission, routing, streaming, accounts.

`server` puts the parts together. What may be admitted is decided by
`trimtab.engine_bridge.admission`, which the door inside one engine uses, too.
"""
