# The engine: serving pods and tier engines. torch, and g++ because Inductor compiles what it generates.
#   docker build -f images/engine.Dockerfile -t tkcc/engine .
# BASE: any image with Python >= 3.11 and its venv module.
# TORCH: where torch comes from.
#   pip      it is in the image (several GB with its CUDA libraries)
#   mounted  it is in a directory of the node, mounted at /opt/torch: the site-packages of a virtual environment of the same
#            Python (3.11 with Debian 12's), with torch, triton and all that they need. The chart's value
#            settings.torchHostPath names that directory. What the image has itself comes first on sys.path, because
#            /opt/torch is added behind it, by tkcc.pth.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS requirements
ARG TORCH=pip
COPY images/requirements.py pyproject.toml /
RUN case "${TORCH}" in \
      pip) without="" ;; \
      mounted) without="torch,triton" ;; \
      *) echo "TORCH=${TORCH}: use pip or mounted" >&2; exit 1 ;; \
    esac; \
    python3 /requirements.py /pyproject.toml engine --without "${without}" > /requirements.txt

FROM ${BASE}
# Python's headers too, where the base has none (Debian's python3; the official image has them): Inductor includes them.
RUN apt-get update \
 && headers="$(python3 -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))')" \
 && packages="g++" && if [ "${headers}" = False ]; then packages="${packages} libpython3-dev"; fi \
 && apt-get install -y --no-install-recommends ${packages} \
 && rm -rf /var/lib/apt/lists/*
COPY --from=requirements /requirements.txt /requirements.txt
# tkcc.pth, not PYTHONPATH: a pod may set that for itself. pip has done its work and goes.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check -r /requirements.txt \
 && printf '/app\n/opt/torch\n' > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tkcc.pth" \
 && /opt/venv/bin/pip uninstall --yes --quiet pip \
 && mkdir /opt/torch \
 && printf '#!/bin/sh\nexec /opt/venv/bin/python -m tkcc "$@"\n' > /opt/venv/bin/tkcc && chmod 755 /opt/venv/bin/tkcc \
 && echo 'tkcc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd
# USER: torch names its caches after it, and a pod's uid need not be in /etc/passwd. SAFEPATH: never import from the
# working directory.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp USER=tkcc PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# The last layer, and the only one that a changed source makes anew. Compiled here: a pod's root is read-only.
COPY tkcc /app/tkcc
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["tkcc"]
