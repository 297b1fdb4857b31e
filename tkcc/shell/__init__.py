"""The operator's hands: reads the cluster and the pods, carries out the core's actions, writes status.

Every decision is `tkcc.control`'s. Here are the clock, the sockets, the retries and the order of things.
"""
