# titan_moe on NVIDIA GPUs: torch's CUDA wheels bring CUDA's libraries, the host brings the driver.
#
#   docker build --tag titan_moe .
#   docker run --rm --gpus all --ipc host --volume "$PWD/outputs:/runs/outputs" titan_moe
#   docker run --rm --gpus all --ipc host --volume "$PWD/outputs:/runs/outputs" \
#       --env CONFIG_FILE=configs/qwen3/30B-A3B_8gpu.toml titan_moe ./run_train.sh --training.steps 20
#
# The folder outputs must be writable for user 1000, or for the one that `--user` names. NCCL shares
# memory between processes: without `--ipc host`, set --shm-size. A run on several machines needs
# `--network host`, and NNODES, NODE_RANK and RDZV_ENDPOINT as run_train.sh says. Kubernetes:
# configs/clusters/kubernetes.yaml.
FROM python:3.12-slim-bookworm

# torch.compile and Triton build what they launch with a C compiler. Comparisons check out revisions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 trainer && install --directory --owner trainer /runs
USER 1000
WORKDIR /runs
ENV PATH=/home/trainer/venv/bin:$PATH PYTHONUNBUFFERED=1

# First what changes seldom: the dependencies, from pyproject.toml alone.
COPY --chown=trainer pyproject.toml README.md LICENSE ./
RUN python -m venv /home/trainer/venv \
    && mkdir titan_moe && touch titan_moe/__init__.py \
    && pip install --no-cache-dir --editable .

# FlashAttention-3 for H100s, with --build-arg FLASH_ATTENTION_3=yes. Its wheel for CUDA 13 is on
# torch's own index alone, and serves torch 2.9 and later.
ARG FLASH_ATTENTION_3=no
RUN test "$FLASH_ATTENTION_3" = no || pip install --no-cache-dir --no-deps \
    --index-url https://download.pytorch.org/whl/cu130 flash-attn-3==3.0.0

COPY --chown=trainer . .

CMD ["./run_train.sh"]
