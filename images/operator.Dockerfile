# The operator: kopf and tkcc. No torch, no compiler.
#   docker build -f images/operator.Dockerfile -t tkcc/operator .
# BASE: any image with Python >= 3.11 and its venv module.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS requirements
COPY images/requirements.py pyproject.toml /
RUN python3 /requirements.py /pyproject.toml operator > /requirements.txt

FROM ${BASE}
COPY --from=requirements /requirements.txt /requirements.txt
# tkcc.pth, not PYTHONPATH: a pod may set that for itself. pip has done its work and goes.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check -r /requirements.txt \
 && echo /app > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tkcc.pth" \
 && /opt/venv/bin/pip uninstall --yes --quiet setuptools pip \
 && echo 'tkcc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
# The last layer, and the only one that a changed source makes anew. Compiled here: a pod's root is read-only.
COPY operator /app/operator
COPY tkcc /app/tkcc
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /app
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["kopf", "run", "/app/operator/main.py"]
