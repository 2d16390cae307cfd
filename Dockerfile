# docker build -t echelon .
# docker build -t echelon:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 --build-arg TORCH=default .
#
# BASE: any image with Python 3.11 or newer, or with an apt that has it. A GPU needs no more than the driver of the host:
# PyTorch brings CUDA's libraries. TORCH: cpu, or default, which is PyTorch with CUDA.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH=cpu

RUN command -v python3 >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/echelon
ENV PATH=/opt/echelon/bin:$PATH
RUN if [ "$TORCH" = cpu ]; then pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu; fi

COPY pyproject.toml README.md LICENSE /tmp/echelon/
COPY src /tmp/echelon/src
COPY benchmarks/RESULTS.md /tmp/echelon/benchmarks/RESULTS.md
RUN pip install --no-cache-dir /tmp/echelon && rm -rf /tmp/echelon

# Runs are written to /work/runs: mount a volume there. Any user will do.
RUN mkdir -p /work/runs && chmod 1777 /work /work/runs
WORKDIR /work
ENTRYPOINT ["echelon"]
CMD ["--help"]
