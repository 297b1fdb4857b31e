"""The demo: the whole loop on a real Kubernetes, told as it happens and written up at the end.

What is said and drawn is computed from watched objects and request results by pure functions (`timeline`, `facts`,
`plot`, `page`); `driver` alone touches a cluster.
"""
