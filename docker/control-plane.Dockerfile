# Controller, gateway, emulated engines and every command but vLLM: no torch, no CUDA.
#   docker build -f docker/control-plane.Dockerfile -t pd-shadow:0.1.0 .
# Without a container engine: python tools/try_images.py carries out its steps in a scratch folder.
# For releases pin the base by digest too: --build-arg PYTHON_DIGEST=sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# sha256:…, for a base that cannot change under its tag.
ARG PYTHON_DIGEST=""

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
WORKDIR /src
COPY requirements/light.txt requirements/light.txt
COPY pyproject.toml README.md LICENSE ./
COPY transfer transfer
COPY controller controller
COPY pd_shadow pd_shadow
# Pins; only what the product needs is installed.
RUN python -m venv /opt/pd-shadow \
    && /opt/pd-shadow/bin/pip install --no-cache-dir --constraint requirements/light.txt '.[emulated,otel]' \
    && /opt/pd-shadow/bin/pip uninstall --yes pip

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pd-shadow" \
      org.opencontainers.image.description="PD-Shadow: controller, gateway, emulated engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11.14-slim-bookworm" \
      dev.pdshadow.sbom="/usr/share/pd-shadow/packages.txt"
RUN groupadd --gid 10001 pd-shadow \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin pd-shadow
COPY --from=build /opt/pd-shadow /opt/pd-shadow
# Name and version of all that is installed, for scanners that do not read site-packages.
RUN mkdir -p /usr/share/pd-shadow \
    && python -c "import importlib.metadata as m; print('\n'.join(sorted(f'{d.name}=={d.version}' for d in m.distributions(path=['/opt/pd-shadow/lib/python3.11/site-packages']))))" \
       > /usr/share/pd-shadow/packages.txt
ENV PATH=/opt/pd-shadow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["pd-shadow"]
CMD ["--help"]
