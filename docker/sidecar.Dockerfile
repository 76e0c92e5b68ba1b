# The sidecar with its engine. Context: the project's root.
#   docker build -f docker/sidecar.Dockerfile --build-arg ENGINE=cuda -t duplex-sidecar:0.1.0-cuda .
#   docker build -f docker/sidecar.Dockerfile --build-arg ENGINE=cpu  -t duplex-sidecar:0.1.0-cpu .
# The libraries of CUDA come with the lock file's wheels; the node brings the driver.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS project
ARG UV_VERSION=0.13.9
ARG HATCHLING_VERSION=1.28.0
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    UV_COMPILE_BYTECODE=1 \
    UV_NO_CACHE=1 \
    UV_PYTHON_DOWNLOADS=never
RUN python -m pip install --no-cache-dir --disable-pip-version-check --target /opt/uv "uv==${UV_VERSION}"
WORKDIR /build
COPY pyproject.toml README.md ./
COPY crds crds
COPY operator operator
COPY sidecar sidecar
# As if it lay in the environment of the last stage, whose path its program names.
RUN echo "hatchling==${HATCHLING_VERSION}" > build-constraints.txt \
    && /opt/uv/bin/uv venv /opt/duplex \
    && /opt/uv/bin/uv pip install --python /opt/duplex/bin/python --prefix /project --no-deps \
       --build-constraints build-constraints.txt .

FROM ${BASE}
# The engine compiles small kernels when it starts: a C++ compiler, and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc libc6-dev libgomp1 libnuma1 python3-dev \
    && rm -rf /var/lib/apt/lists/*
# Of a build alone, and not in the image's environment.
ARG UV_VERSION=0.13.9
ARG SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
ARG UV_NO_CACHE=1
ARG UV_PROJECT_ENVIRONMENT=/opt/duplex
ARG UV_PYTHON_DOWNLOADS=never
COPY pyproject.toml uv.lock /opt/duplex-lock/
# In layers: torch and what else both engines need, the engine, and last what changes with each
# release of this project, a few MB. Each is made where it stays: a copy of another stage's folder
# would be one layer of everything, and be on the disk several times meanwhile. For the same reason
# uv comes and goes within a step.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --target /tmp/uv "uv==${UV_VERSION}" \
    && /tmp/uv/bin/uv sync --project /opt/duplex-lock --frozen --no-dev --no-install-project \
    && rm -rf /tmp/uv
ARG ENGINE=cuda
RUN python -m pip install --no-cache-dir --disable-pip-version-check --target /tmp/uv "uv==${UV_VERSION}" \
    && UV_COMPILE_BYTECODE=1 /tmp/uv/bin/uv sync --project /opt/duplex-lock --frozen --no-dev \
       --extra "${ENGINE}" --no-install-project \
    && rm -rf /tmp/uv
COPY --from=project /project /opt/duplex
# The name is for libraries that ask who runs them: the user may be any number, known to nobody.
# Everything that is written goes below the last two; a pool's pods mount volumes there.
ENV PATH=/opt/duplex/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=duplex \
    HOME=/tmp \
    DUPLEX_CACHE_DIR=/var/cache/duplex
RUN install -d -o 65532 -g 65532 /var/cache/duplex
USER 65532:65532
WORKDIR /tmp
EXPOSE 8765 8766
ENTRYPOINT []
CMD ["duplex", "serve", "--from-environment"]
