"""A real Kubernetes on one Debian 12 machine, as root, without Docker and without a registry.

    python -m e2e.cluster build          # Debian packages, Kubernetes from source, the images; cached, so once
    python -m e2e.cluster up             # a cluster in some seconds; prints its kubeconfig
    python -m e2e.cluster status
    python -m e2e.cluster build-images   # after a change of source; prints the references of the images
    python -m e2e.cluster load TAR       # any other image, into a running cluster
    python -m e2e.cluster down

`--name` tells several clusters on one host apart. In Python: `e2e.cluster.cluster.Cluster`, and for tests that need no
node and no root `e2e.cluster.controlplane.ControlPlane`.

Where to look: `toolchain` builds the programs, `buildah` and `images` the images, `store` keeps them unpacked;
`sandbox` makes the namespaces that a cluster lives and dies in; `flags` and `node` say how each daemon runs; `cluster`
and `controlplane` put it together. All that is built is under ~/.cache/tkcc (TKCC_CACHE), under keys made of what went
in.

What it is not: there is one node, no cluster DNS, and a network that accepts NetworkPolicy objects but enforces none.
On a host with cgroup version 2 alone it is untested.
"""
