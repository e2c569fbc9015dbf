# CPU:           docker build -t sable .
# NVIDIA GPUs:   docker build -t sable --build-arg EXTRAS=cuda12,jaxmarl .      and run it with --gpus all
# Train here:    docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" sable train rware/tiny-2ag
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG EXTRAS=
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY results/ledger.jsonl results/
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[${EXTRAS}]}" && rm -rf build
# Caches of any user; what is trained goes to the folder that is mounted here.
ENV HOME=/tmp NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["sable"]
CMD ["--help"]
