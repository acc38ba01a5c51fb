#!/usr/bin/env bash
# The native module under AddressSanitizer and UBSan: tests/kernels/test_native.py, and damaged frames on every instruction set.
# Needs gcc and the .venv that `make test` makes.
#
#     scripts/sanitize.sh [frames to damage, 20000 if not said]
set -euo pipefail
cd "$(dirname "$0")/.."
frames=${1:-20000}
bin=$PWD/.venv/bin build=$PWD/build/sanitize
compiler=${CXX:-g++}

"$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_CXX_COMPILER="$compiler" \
  -DPython_EXECUTABLE="$bin/python" -DGRADWIRE_SANITIZE=ON >/dev/null
"$bin/ninja" -C "$build" --quiet

# The package with that module in place of the usual one.
rm -rf "$build/pkg"
mkdir "$build/pkg"
cp -r src/gradwire "$build/pkg/"
rm -f "$build"/pkg/gradwire/_native*.so
cp "$build"/_native*.so "$build/pkg/gradwire/"
# An editable install finds its own copy before PYTHONPATH is asked: not here.
echo 'import sys; sys.meta_path = [f for f in sys.meta_path if "Redirect" not in type(f).__name__]' >"$build/pkg/sitecustomize.py"

sanitized() {
  # libstdc++ too, or the sanitizer finds no __cxa_throw to call when the module throws. Python itself never frees
  # everything, so leaks are not looked for.
  LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    PYTHONPATH="$build/pkg" PYTHONDONTWRITEBYTECODE=1 "$bin/python" "$@"
}

sanitized -c 'import sys; from gradwire import _native; assert _native.__file__.startswith(sys.argv[1]), _native.__file__' "$build"
# capture=sys: pytest would otherwise keep what the sanitizer says to itself, and die with it.
sanitized -m pytest -p no:cacheprovider --capture=sys tests/kernels/test_native.py tests/compress/test_positions.py tests/kernels/test_grid.py tests/convert/test_sparse.py \
  tests/convert/test_levels.py tests/kernels/test_rows.py tests/convert/test_sketch.py tests/aggregator/test_aggregator.py tests/aggregator/test_aggregator_faults.py
if [ -e tests/fuzz_decode.py ]; then
  # The peak memory says little here: freed memory is kept for a while to see that nobody uses it.
  sanitized tests/fuzz_decode.py --frames "$frames" --max-growth-mb 4000
  for name in $(sanitized -c 'from gradwire import kernels; print(*kernels.instruction_sets())'); do
    echo "── $name"
    sanitized -c 'import runpy, sys; from gradwire.kernels import cpu; cpu.use(sys.argv.pop(1))
sys.path.insert(0, "tests"); runpy.run_path("tests/fuzz_decode.py", run_name="__main__")' \
      "$name" --frames "$frames" --repair-checksum --max-growth-mb 4000
  done
fi
echo "nothing found"
