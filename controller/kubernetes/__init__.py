"""The four requests the controller makes of a Kubernetes API server.

Written on aiohttp, not on a client library: of those for asyncio, kubernetes_asyncio is 49 MB of generated models,
kr8s brings ten dependencies, lightkube brings models of every API and a fork of httpx; and each would still leave
resuming a watch, bookmarks and 410 to its caller, or hide them.
"""
