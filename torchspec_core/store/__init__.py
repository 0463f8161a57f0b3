"""Hidden states at rest and in transit.

At rest: `files` reads a folder of shards in the form of `format`. In transit, or at rest elsewhere: `protocol` says
what a store of objects can do, `address` opens one by its URL. Import from the modules: most need neither torch nor a
client of a server.
"""
