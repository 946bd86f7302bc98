# vLLM's official image and, beside it, NIXL and the plugin. vLLM itself stays as it is.
#   docker build -f docker/vllm.Dockerfile -t pd-shadow-vllm:0.1.0 .
# For releases pin the base by digest too: --build-arg VLLM_DIGEST=sha256:…
# The minor version must be one that pd_shadow/engine/vllm/compat.py names as tested.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
# sha256:…, for a base that cannot change under its tag.
ARG VLLM_DIGEST=""

FROM ${VLLM_IMAGE}${VLLM_DIGEST:+@${VLLM_DIGEST}}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pd-shadow-vllm" \
      org.opencontainers.image.description="vLLM with NIXL and the PD-Shadow plugin" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/vllm/vllm-openai:v0.32.0" \
      dev.pdshadow.sbom="/usr/share/pd-shadow/packages.txt"
USER 0
WORKDIR /src
COPY requirements/engine.txt requirements/engine.txt
COPY pyproject.toml README.md LICENSE ./
COPY transfer transfer
COPY controller controller
COPY pd_shadow pd_shadow
# --no-deps: nothing that vLLM was built and tested with changes its version.
RUN python3 -m pip install --no-cache-dir --no-deps --requirement requirements/engine.txt \
    && python3 -m pip install --no-cache-dir --no-deps . \
    && mkdir -p /usr/share/pd-shadow \
    && python3 -m pip list --format freeze > /usr/share/pd-shadow/packages.txt \
    && groupadd --gid 10001 pd-shadow \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pd-shadow
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["pd-shadow"]
CMD ["serve", "engine", "--help"]
