"""The one door to the cluster: typed calls over kubernetes.aio's dynamic client.

Server-side apply with one field manager per concern, status writes that carry the resourceVersion read, create-once,
bounded retries with jitter, and a time limit on every call. It decides nothing about what should be there; the
operator's shell and the recompile Job do. Watching is kopf's, in operator/main.py.
"""
