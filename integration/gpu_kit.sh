#!/usr/bin/env bash
# Bundle vLLM 0.32.0 for a Hopper GPU host that reaches no package index.
#
#   integration/gpu_kit.sh OUT [BYTES]      parts of at most BYTES (default: 48000000) go to OUT: kit.part.00, ...,
#                                           cutlass.part.00, ... and deepseek.part.00
#
# The host is to have Python 3.12 on x86-64, a driver for CUDA 13, and PyTorch for CUDA 13 of any version with its CUDA
# libraries and transformers 5. Move the parts there, and then:
#
#   cat kit.part.* | xz -d -T0 | tar -x -C SITE && bash integration/gpu_vllm.sh SITE ...
#
# In it are vLLM, the packages that it imports, PyTorch 2.13, Triton, torchvision and NCCL. Left out are FlashAttention 2
# (Hopper has 3), FlashInfer, what serves AMD's GPUs, profilers, and the code of GPUs that are no Hopper. Kimi-Linear
# needs CUTLASS's DSL as well, and DeepSeek-V4 that and DeepGEMM, FlashMLA and TileLang, which compile kernels by nvcc:
# their parts go to SITE in the same way. Without them other models start sooner, as vLLM then compiles fewer kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?where the parts go}
bytes=${2:-48000000}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site

platforms=(--platform any)
for minor in $(seq 5 39); do platforms=(--platform "manylinux_2_${minor}_x86_64" "${platforms[@]}"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
target=(--python-version 3.12 --implementation cp --only-binary=:all: --no-deps "${platforms[@]}")
python3 -m pip install -qqq --no-compile "${target[@]}" --target "$site" -r integration/gpu_kit_0.32.0.txt
python3 -m pip download -qqq "${target[@]}" --abi cp312 --abi abi3 --abi none -d "$work" \
    vllm==0.32.0 torch==2.13.0 triton==3.7.1 torchvision==0.28.0 nvidia-nccl-cu13==2.29.7
for wheel in "$work"/{vllm,torch,triton,torchvision}-*.whl; do
    # Exit status 11: a pattern fits nothing, as each of them is for one wheel.
    unzip -q -o "$wheel" -d "$site" -x 'vllm/vllm_flash_attn/_vllm_fa2_C*' vllm/vllm-rs 'vllm/third_party/deep_gemm/*' \
        'vllm/third_party/fmha_sm100/*' 'vllm/_qutlass*' 'vllm/_flashmla*' 'vllm/_flashkda*' 'vllm/_deepselect*' \
        'vllm/entrypoints/serve/instrumentator/static/*' 'torch/include/*' 'torch/test/*' '*.a' \
        triton/backends/nvidia/bin/ptxas-blackwell 'triton/backends/amd/lib/*' 'triton/profiler/*' \
        'triton/backends/nvidia/lib/cupti/*' triton/_C/libproton.so 'triton/plugins/*' 'triton/instrumentation/*' \
        2> /dev/null || [ $? -eq 11 ]
done
strip --strip-unneeded "$site/triton/_C/libtriton.so"  # half of it is for debuggers
mkdir "$site/nccl"
unzip -q -j "$work"/nvidia_nccl*.whl '*/libnccl.so.2' -d "$site/nccl"
find "$site" -name '*.so*' -type f -size +1M -print0 | xargs -0 python3 -m integration.one_architecture 90
dsl=$work/dsl
python3 -m pip install -qqq --no-compile "${target[@]}" --target "$dsl" nvidia-cutlass-dsl==4.8.0 \
    nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.0 quack-kernels==0.6.5 cuda-bindings==13.5.0 cuda-pathfinder==1.9.1 \
    protobuf==7.36.2
unzip -q "$work"/vllm-*.whl 'vllm/_flashkda*' -d "$dsl"
v4=$work/v4
python3 -m pip install -qqq --no-compile "${target[@]}" --target "$v4" tilelang==0.1.12 z3-solver==4.15.4.0 \
    torch-c-dlpack-ext==0.1.5
unzip -q "$work"/vllm-*.whl 'vllm/third_party/deep_gemm/*' 'vllm/_flashmla*' 'vllm/_deepselect*' -d "$v4"
rm -r "$v4/tilelang/3rdparty/composable_kernel" "$v4/bin"  # of AMD's GPUs, and Z3's command line
ln -sf libz3.so.4.15 "$v4/z3/lib/libz3.so"
find "$v4" -name '*.so*' -type f -size +1M -exec strip --strip-unneeded {} +
find "$v4/vllm" -name '*.so*' -type f -size +1M -print0 | xargs -0 python3 -m integration.one_architecture 90
rm -f "$out"/{kit,cutlass,deepseek}.part.*
tar -C "$site" -cf - . | xz -T0 -4 | split -b "$bytes" -d - "$out/kit.part."
tar -C "$dsl" -cf - . | xz -T0 -4 | split -b "$bytes" -d - "$out/cutlass.part."
tar -C "$v4" -cf - . | xz -T0 -4 | split -b "$bytes" -d - "$out/deepseek.part."
ls -l "$out"
