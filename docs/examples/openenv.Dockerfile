# Environments as a container that clients of OpenEnv use. In a checkout:
#   docker build -f docs/examples/openenv.Dockerfile -t alfworld-openenv .
#   docker run --rm -p 8000:8000 alfworld-openenv
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /source/
COPY sandboxgym /source/sandboxgym
COPY sandboxgym_pytest /source/sandboxgym_pytest
COPY bpo_ref /source/bpo_ref
RUN pip install --no-cache-dir "/source[openenv]" && rm -rf /source && useradd --create-home player
USER player
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# Python is the container's first process: `docker stop` ends it by SIGTERM, and every session with it.
ENTRYPOINT ["sandboxgym", "serve", "openenv", "--host", "0.0.0.0", "--port", "8000"]
CMD ["ALFWorld-v0"]
