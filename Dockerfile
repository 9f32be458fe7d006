# gpumesh in a container: the coordinator, or a worker. See docs/containers.md; compose.yaml starts both.
#
#   docker build -t gpumesh .
#   docker build -t gpumesh --build-arg EXTRAS=sysinfo,gpu .      with torch, for workers with GPUs

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY gpumesh ./gpumesh
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRAS=sysinfo
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/gpumesh-*.whl)[${EXTRAS}]" && rm -r /wheels

# Tasks run as this user, which owns nothing but its state.
RUN useradd --uid 10001 --create-home --home-dir /home/mesh mesh && mkdir /state && chown mesh:mesh /state
USER mesh
WORKDIR /home/mesh
ENV XDG_STATE_HOME=/state XDG_DATA_HOME=/state/data XDG_CONFIG_HOME=/state/config XDG_CACHE_HOME=/state/cache PYTHONUNBUFFERED=1
VOLUME /state
EXPOSE 8000
STOPSIGNAL SIGTERM

# Of the coordinator; a worker has no port, and compose.yaml switches this off there.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]

ENTRYPOINT ["gpumesh"]
CMD ["serve", "--token-file", "/run/secrets/mesh_token", "--no-discovery", "--no-self-worker"]
