# The engine: serving pods and tier engines. torch, and g++ because Inductor compiles what it generates.
#   docker build -f images/engine.Dockerfile -t tkcc/engine .
# BASE: an image with Python >= 3.11 and its venv module.
# TORCH: where torch comes from.
#   pip      it is in the image (several GB with its CUDA libraries).
#   mounted  it is in a directory of the node: the site-packages of a virtual environment of the same Python (3.11 on
#            Debian 12's), which has torch and all that torch needs. The chart's value settings.torchHostPath names it,
#            and pods mount it read-only at /opt/torch. tkcc.pth adds that to the end of sys.path, so what the image
#            has itself comes first.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Python's headers too, which Inductor includes, where the base has none (Debian's does not, the official image does).
RUN apt-get update \
 && packages=g++ \
 && if [ ! -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then \
      packages="${packages} libpython3-dev"; \
    fi \
 && apt-get install -y --no-install-recommends ${packages} \
 && rm -rf /var/lib/apt/lists/*

# Packages as locked, without torch and what only torch needs where it is mounted.
# tkcc.pth, not PYTHONPATH: a pod may set that for itself. Compiled here: a pod's root is read-only.
ARG TORCH=pip
COPY requirements/engine.txt /requirements/
RUN case "${TORCH}" in \
      pip) without='^$' ;; \
      mounted) without='^(torch|triton|nvidia-.*|cuda-.*|sympy|mpmath|networkx|setuptools)==' ;; \
      *) echo "TORCH=${TORCH}: use pip or mounted" >&2; exit 1 ;; \
    esac \
 && grep -Ev "${without}" /requirements/engine.txt > /requirements/wanted.txt \
 && python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-compile --no-deps -r /requirements/wanted.txt \
 && printf '/app\n/opt/torch\n' > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tkcc.pth" \
 && /opt/venv/bin/python -m compileall -q -j 0 /opt/venv/lib \
 && mkdir /opt/torch \
 && printf '#!/bin/sh\nexec /opt/venv/bin/python -m tkcc "$@"\n' > /opt/venv/bin/tkcc && chmod 755 /opt/venv/bin/tkcc \
 && echo 'tkcc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd

# USER: torch names its caches after it, and a pod's uid need not be in /etc/passwd.
# SAFEPATH: nothing is imported from the working directory.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp USER=tkcc PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# The last layers, and the only ones that a changed source makes anew.
COPY tkcc /app/tkcc
RUN python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /app
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["tkcc"]
