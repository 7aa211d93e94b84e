# One file, two flavours; the Python of BASE decides, as ttnn has wheels for 3.10 and 3.12 alone:
#   docker build -t ttserve:0.1.0 .                                                  CPU, simulated meshes
#   docker build -t ttserve:0.1.0-tt --build-arg BASE=python:3.12-slim-bookworm .    Tenstorrent boards
# BASE is a tag, which may name another image later. For a reproducible build add the digest from your
# registry: BASE=python:3.11-slim-bookworm@sha256:<64 digits>. Debian's packages are still the newest
# of their release.
# Every Python package is installed by its hash (requirements/*.txt, `make lock`), from wheels only.
# TORCH_INDEX names an index of torch's CPU wheels, which make the image smaller by the CUDA libraries.
# Its files differ from PyPI's: TORCH_SHA256 is the hash, from that index, of the wheel for the
# image's Python and processor.
# PIP_CERT names a mounted file of certificates, for a package mirror behind a private authority.
ARG BASE=python:3.11-slim-bookworm

# KubeRay's commands and probes call bash and wget. A base without Python gets Debian's. User 1000 owns
# HAProxy's folder, because Serve's files and the admin socket are private; every container gets a new one.
# KubeRay starts Ray with `bash -c`, which reads BASH_ENV, or from a login shell, which reads profile.d.
# `ttserve serve` sets its umask itself.
FROM ${BASE} AS base
RUN apt-get update && apt-get install -y --no-install-recommends bash wget ca-certificates \
        $(python3 -c 'import venv, ensurepip' 2> /dev/null || echo python3 python3-venv) \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ttserve && useradd --uid 1000 --gid 1000 --home-dir /tmp/home --no-create-home ttserve \
    && install -d -o 1000 -g 1000 -m 700 /run/ttserve \
    && printf 'umask 077\nexport PATH=/opt/ttserve/bin:$PATH\n' > /etc/profile.d/ttserve.sh
WORKDIR /src

# Only the requirements: other changes of pyproject.toml must not install the packages again.
FROM base AS names
COPY pyproject.toml ./
RUN python3 -m venv /venv && /venv/bin/python -c 'from pip._vendor import tomli; \
print(*tomli.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > requirements.txt

# The base's own pip installs only the pip and setuptools of the hashed list. These install the rest, with
# hashed constraints rather than requirements: packages that this torch does not need are not installed.
FROM base AS installed
ARG PIP_CERT
ARG TORCH_INDEX
ARG TORCH_SHA256
COPY requirements/build.txt requirements/runtime.txt ./
COPY --from=names /src/requirements.txt ./
RUN python3 -m venv /opt/ttserve && export PATH=/opt/ttserve/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: PIP_REQUIRE_HASHES=1 \
    && pip install --requirement build.txt \
    && if [ -n "$TORCH_INDEX" ]; then \
        echo "$(grep '^torch==' requirements.txt) --hash=sha256:${TORCH_SHA256:?is the hash of the wheel that TORCH_INDEX has}" > torch.txt \
        && pip install --no-deps --index-url "$TORCH_INDEX" --requirement torch.txt; fi \
    && pip install --constraint runtime.txt --requirement requirements.txt

# Compiles the kernels of CPU engines, or fails; the image itself needs no compiler.
FROM installed AS compiler
ENV TTSERVE_REQUIRE_KERNELS=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev

FROM compiler AS code
COPY pyproject.toml build_backend.py LICENSE README.md ./
COPY cluster cluster
COPY configs configs
COPY kv_transfer kv_transfer
COPY replicas replicas
RUN /opt/ttserve/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation --root /code .

# A change of the code is a layer of a few megabytes over that of the dependencies.
FROM installed
COPY --from=code /code /
VOLUME /run/ttserve
# Mostly the variables of `ttserve environment`, which does not run before `ray start` in pods.
ENV PATH=/opt/ttserve/bin:$PATH \
    HOME=/tmp/home \
    BASH_ENV=/etc/profile.d/ttserve.sh \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    SPT_NOENV=1 \
    TTSERVE_REQUIRE_KERNELS=1 \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.edge.client_guard:proxy_middlewares \
    RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/ttserve/bin/ttserve-haproxy \
    RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=3600 \
    RAY_SERVE_HAPROXY_RETRY_ON="conn-failure empty-response" \
    RAY_worker_niceness=0 \
    RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=/run/ttserve/haproxy.cfg \
    RAY_SERVE_HAPROXY_SOCKET_PATH=/run/ttserve/admin.sock \
    RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH=/run/ttserve/m.sock \
    RAY_SERVE_HAPROXY_SERVER_STATE_BASE=/run/ttserve \
    RAY_SERVE_HAPROXY_SERVER_STATE_FILE=/run/ttserve/state
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ttserve" \
      org.opencontainers.image.description="LLM serving from pools of prefill and decode replicas on Tenstorrent hardware" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["ttserve", "serve"]
