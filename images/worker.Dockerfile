# The recompile Job: proposers, message board and budget. No torch, no compiler, no GPU.
#   docker build -f images/worker.Dockerfile -t tkcc/worker .
# BASE: any image with Python >= 3.11 and its venv module.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS requirements
COPY images/requirements.py pyproject.toml /
RUN python3 /requirements.py /pyproject.toml operator,agents --without kopf > /requirements.txt

FROM ${BASE}
COPY --from=requirements /requirements.txt /requirements.txt
# tkcc.pth, not PYTHONPATH: a pod may set that for itself. pip has done its work and goes.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check -r /requirements.txt \
 && echo /app > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tkcc.pth" \
 && /opt/venv/bin/pip uninstall --yes --quiet setuptools pip \
 && printf '#!/bin/sh\nexec /opt/venv/bin/python -m tkcc "$@"\n' > /opt/venv/bin/tkcc && chmod 755 /opt/venv/bin/tkcc \
 && echo 'tkcc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# The last layer, and the only one that a changed source makes anew. Compiled here: a pod's root is read-only.
COPY tkcc /app/tkcc
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["tkcc"]
