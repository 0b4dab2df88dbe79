#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under ten minutes, results under $OUT (default: gpu-results).
#   bash recipes/bench/gpu.sh
# 1. the gpu-marked tests  2. what only a GPU shows: RoPE, flex, merge, a training step, perplexity; events and peaks
# 3. dry runs, and the same trainings measured  4. the quickstart on the GPU
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-gpu-results}
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_POSSWAP_CACHE="$OUT/cache"
status=0
python3 - <<'PY' | tee "$OUT/environment.txt"
import sys, torch, transformers
print("python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device")
PY
timeout 150 python3 -m pytest -q -p no:cacheprovider -o addopts="" -m gpu tests/gpu tests/kernels 2>&1 | tee "$OUT/tests.txt" || status=1
timeout 130 python3 -m recipes.bench.run gpu --out "$OUT/bench" 2>&1 | tee "$OUT/bench.txt" || status=1
timeout 150 python3 -m recipes.bench.dry_beside --out "$OUT/bench" 2>&1 | tee "$OUT/dry.txt" || status=1
timeout 150 python3 -m hf_posswap quickstart --out "$OUT/quickstart" --device cuda 2>&1 | tee "$OUT/quickstart.txt" || status=1
rm -rf "$OUT/cache" "$OUT"/quickstart/{base,control,rope,alibi,nll}
exit $status
