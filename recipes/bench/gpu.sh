#!/usr/bin/env bash
# Everything that needs a GPU, in at most a quarter of an hour, each part in at most LIMIT seconds; results under $OUT
# (default: gpu-results).
#   bash recipes/bench/gpu.sh                  all parts
#   bash recipes/bench/gpu.sh tests quickstart some of them
# tests: those marked gpu. bench: RoPE, flex, merge, a training step, perplexity, reading and decoding; events and peaks.
# dry: dry runs, and the same trainings measured. quickstart: on the GPU.
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
for part in "${@:-tests bench dry quickstart}"; do
    for name in $part; do
        seconds=150
        case $name in
            tests) seconds=240 command=(
                pytest -v -p no:cacheprovider -p tests.gpu.told -o addopts="" -m gpu -n "${PROCESSES:-4}" --durations 10
                tests/gpu tests/kernels tests/compat
            ) ;;
            bench) seconds=320 command=(recipes.bench.run gpu --out "$OUT/bench") ;;
            dry) command=(recipes.bench.dry_beside --out "$OUT/bench") ;;
            quickstart) command=(hf_posswap quickstart --out "$OUT/quickstart" --device cuda) ;;
            *) echo "$name: there are tests, bench, dry and quickstart." >&2; exit 2 ;;
        esac
        timeout "${LIMIT:-$seconds}" python3 -m "${command[@]}" 2>&1 | tee "$OUT/$name.txt" || status=1
    done
done
rm -rf "$OUT/cache" "$OUT"/quickstart/{base,control,rope,alibi,nll}
exit $status
