# One image a flavour; both run as user 1000 on a read-only root without any capability.
#   docker build -t ttserve:0.1.0 .                                                  CPU, simulated meshes
#   docker build -t ttserve:0.1.0-tt --build-arg BASE=python:3.12-slim-bookworm .    Tenstorrent boards
# The Python of BASE decides: with 3.10 or 3.12 the ttnn wheel is installed, with 3.11 there is none.
# A base without Python gets Debian's. TORCH_INDEX names an index of CPU wheels of torch, which makes
# the image smaller by the CUDA libraries.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG PIP_CERT
ARG TORCH_INDEX
RUN command -v python3 && python3 -c 'import venv, ensurepip' || \
    { apt-get update && apt-get install -y --no-install-recommends python3 python3-venv; }
RUN python3 -m venv /opt/ttserve
ENV PATH=/opt/ttserve/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# The dependencies first: a change of the code alone leaves their layer as it is.
COPY pyproject.toml constraints.txt ./
RUN python3 - <<'SCRIPT' > requirements.txt
from pip._vendor import tomli
print(*tomli.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
SCRIPT
RUN if [ -n "$TORCH_INDEX" ]; then pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch; fi \
    && pip install --constraint constraints.txt --requirement requirements.txt
COPY LICENSE README.md ./
COPY cluster cluster
COPY configs configs
COPY kv_transfer kv_transfer
COPY replicas replicas
RUN pip install --no-deps . && python3 -m compileall -q /opt/ttserve/lib || true

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ttserve" \
      org.opencontainers.image.description="LLM serving from pools of prefill and decode replicas on Tenstorrent hardware" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# bash and wget are what KubeRay's commands and probes call.
RUN apt-get update && apt-get install -y --no-install-recommends bash wget ca-certificates \
        $(command -v python3 > /dev/null || echo python3) \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ttserve && useradd --uid 1000 --gid 1000 --home-dir /tmp/home --no-create-home ttserve
COPY --from=build /opt/ttserve /opt/ttserve
# A login shell sets its own PATH.
RUN echo 'export PATH=/opt/ttserve/bin:$PATH' > /etc/profile.d/ttserve.sh
ENV PATH=/opt/ttserve/bin:$PATH \
    HOME=/tmp/home \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/ttserve/bin/ttserve-haproxy
USER 1000:1000
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["ttserve", "serve"]
