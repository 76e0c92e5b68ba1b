# Operator and gateway: one small image, neither torch nor an engine. Context: the project's root.
#   docker build -f docker/control.Dockerfile -t duplex-control:0.1.0 .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG UV_VERSION=0.13.9
ARG HATCHLING_VERSION=1.28.0
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PROJECT_ENVIRONMENT=/opt/duplex \
    UV_PYTHON_DOWNLOADS=never
RUN python -m pip install --no-cache-dir --disable-pip-version-check --target /opt/uv "uv==${UV_VERSION}"
WORKDIR /build
COPY pyproject.toml uv.lock README.md ./
# The lock file says what, with hashes; this layer stays until it changes.
RUN /opt/uv/bin/uv sync --frozen --only-group control --no-install-project
COPY crds crds
COPY operator operator
COPY sidecar sidecar
RUN echo "hatchling==${HATCHLING_VERSION}" > build-constraints.txt \
    && /opt/uv/bin/uv pip install --python /opt/duplex/bin/python --no-deps \
       --build-constraints build-constraints.txt .

FROM ${BASE}
COPY --from=build /opt/duplex /opt/duplex
# The name is for libraries that ask who runs them: the user may be any number, known to nobody.
ENV PATH=/opt/duplex/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=duplex
USER 65532:65532
WORKDIR /tmp
# The chart says which: duplex_operator or duplex_gateway.
ENTRYPOINT []
CMD ["python", "-m", "duplex_operator"]
