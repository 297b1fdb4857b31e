# The recompile Job: proposers and budget. No torch, no compiler, no GPU.
#   docker build -f images/worker.Dockerfile -t tkcc/worker .
# BASE: an image with Python >= 3.11 and its venv module.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Packages as locked. These lines are the operator's too, word for word, so that both share one layer.
# tkcc.pth, not PYTHONPATH: a pod may set that for itself. Compiled here: a pod's root is read-only.
COPY requirements/operator.txt /requirements/
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-compile --no-deps -r /requirements/operator.txt \
 && echo /app > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tkcc.pth" \
 && /opt/venv/bin/python -m compileall -q -j 0 /opt/venv/lib \
 && echo 'tkcc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd

COPY requirements/agents.txt /requirements/
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps -r /requirements/agents.txt \
 && printf '#!/bin/sh\nexec /opt/venv/bin/python -m tkcc "$@"\n' > /opt/venv/bin/tkcc && chmod 755 /opt/venv/bin/tkcc

# SAFEPATH: nothing is imported from the working directory.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# The last layers, and the only ones that a changed source makes anew.
COPY tkcc /app/tkcc
RUN python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /app
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["tkcc"]
