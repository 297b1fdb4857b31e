# The operator: kopf and tkcc. No torch, no compiler.
#   docker build -f images/operator.Dockerfile -t tkcc/operator .
# BASE: an image with Python >= 3.11 and its venv module.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Packages as locked. These lines are the worker's too, word for word, so that both share one layer.
# tkcc.pth, not PYTHONPATH: a pod may set that for itself. Compiled here: a pod's root is read-only.
COPY requirements/operator.txt /requirements/
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-compile --no-deps -r /requirements/operator.txt \
 && echo /app > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tkcc.pth" \
 && /opt/venv/bin/python -m compileall -q -j 0 /opt/venv/lib \
 && echo 'tkcc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd

ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
# The last layers, and the only ones that a changed source makes anew.
COPY operator /app/operator
COPY tkcc /app/tkcc
RUN python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /app
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["kopf", "run", "/app/operator/main.py"]
