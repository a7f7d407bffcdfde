# For the GPU recipes:
#   docker build -t specdraft .
#   docker run --gpus all --shm-size 16g -v "$PWD/runs:/specdraft/runs" -v "$PWD/cache:/specdraft/cache" \
#       specdraft --config_file recipes/accelerate/gpu8.yaml train/falcon.py recipes/vicuna7b.yaml
# torch's wheels bring CUDA; the host has the driver and NVIDIA's container toolkit.
FROM python:3.12.12-slim-bookworm

# A compiler for kernels that torch and DeepSpeed build when they run.
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /specdraft
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[deepspeed,lora,plots]' \
    && useradd --create-home --uid 1000 trainer \
    && mkdir -p runs cache \
    && chown -R trainer runs cache
USER 1000
ENTRYPOINT ["accelerate", "launch"]
