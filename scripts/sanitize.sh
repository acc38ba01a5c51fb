#!/usr/bin/env bash
# The native module under sanitizers. Needs gcc and the .venv that `make test` makes.
#
#     scripts/sanitize.sh [frames to damage, 20000 if not said]     AddressSanitizer and UBSan, then ThreadSanitizer
#     scripts/sanitize.sh memory [frames]                           the first two alone: tests of the native code, and
#                                                                   damaged frames on every instruction set
#     scripts/sanitize.sh threads                                   the last alone: kernels on several threads, and
#                                                                   the aggregator beside its workers
#     scripts/sanitize.sh aggregator                                of these, the aggregator alone, which needs no .venv
set -euo pipefail
cd "$(dirname "$0")/.."
which=both
case "${1:-}" in memory | threads | aggregator) which=$1 && shift ;; esac
frames=${1:-20000}
bin=$PWD/.venv/bin
compiler=${CXX:-g++}

# build_with SANITIZER: the package with such a module in place of the usual one, in build/sanitize-SANITIZER/pkg
build_with() {
  build=$PWD/build/sanitize-$1
  "$bin/cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_CXX_COMPILER="$compiler" \
    -DPython_EXECUTABLE="$bin/python" -DGRADWIRE_SANITIZE="$1" >/dev/null
  "$bin/ninja" -C "$build" --quiet
  rm -rf "$build/pkg"
  mkdir "$build/pkg"
  cp -r src/gradwire "$build/pkg/"
  rm -f "$build"/pkg/gradwire/_native*.so
  cp "$build"/_native*.so "$build/pkg/gradwire/"
  # An editable install finds its own copy before PYTHONPATH is asked: not here.
  echo 'import sys; sys.meta_path = [f for f in sys.meta_path if "Redirect" not in type(f).__name__]' >"$build/pkg/sitecustomize.py"
}

# sanitized LIBRARY ARGUMENTS: python with that sanitizer's library, and libstdc++, or the sanitizer finds no __cxa_throw
# to call when the module throws. Python itself never frees everything, so leaks are not looked for.
sanitized() {
  local library=$1
  shift
  LD_PRELOAD="$("$compiler" -print-file-name="$library.so") $("$compiler" -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    TSAN_OPTIONS="halt_on_error=1 exitcode=66 ignore_noninstrumented_modules=1" \
    PYTHONPATH="$build/pkg" PYTHONDONTWRITEBYTECODE=1 "$bin/python" "$@"
}

check_module() {
  sanitized "$1" -c 'import sys; from gradwire import _native; assert _native.__file__.startswith(sys.argv[1]), _native.__file__' "$build"
}

memory() {
  build_with ON
  check_module libasan
  # capture=sys: pytest would otherwise keep what the sanitizer says to itself, and die with it.
  sanitized libasan -m pytest -p no:cacheprovider --capture=sys tests/kernels/test_native.py tests/compress/test_positions.py tests/kernels/test_grid.py tests/convert/test_sparse.py \
    tests/convert/test_levels.py tests/kernels/test_rows.py tests/kernels/test_structure_kernels.py tests/kernels/test_stream_kernels.py \
    tests/convert/test_sketch.py tests/aggregator/test_aggregator.py tests/aggregator/test_aggregator_faults.py
  # The peak memory says little here: freed memory is kept for a while to see that nobody uses it.
  sanitized libasan tests/fuzz_decode.py --frames "$frames" --max-growth-mb 4000
  for name in $(sanitized libasan -c 'from gradwire import kernels; print(*kernels.instruction_sets())'); do
    echo "── $name"
    sanitized libasan -c 'import runpy, sys; from gradwire.kernels import cpu; cpu.use(sys.argv.pop(1))
sys.path.insert(0, "tests"); runpy.run_path("tests/fuzz_decode.py", run_name="__main__")' \
      "$name" --frames "$frames" --repair-checksum --max-growth-mb 4000
  done
}

# Only the module itself is instrumented: what torch's threads do among themselves is not looked at
# (ignore_noninstrumented_modules), since the sanitizer would not see how they wait for each other. The module's threads
# start by pthread_create and meet at a mutex, which it sees. Forks are left to the other tests: it does not follow
# threads into a child.
threads() {
  build_with thread
  check_module libtsan
  sanitized libtsan -m pytest -p no:cacheprovider --capture=sys --quick tests/kernels/test_threads.py tests/kernels/test_rows.py -k "not fork"
}

# Engine and workers as threads of one program: from Python they are processes, of which each has one thread in here.
aggregator() {
  local sources=(tests/native_tsan/aggregator_driver.cpp native/{aggregator,aggregator_client,datagrams,socket_addresses}.cpp)
  mkdir -p build
  "$compiler" -std=c++17 -O1 -g -fsanitize=thread -pthread -Inative -Isrc/gradwire/aggregator/packet "${sources[@]}" -o build/aggregator_driver
  TSAN_OPTIONS="halt_on_error=1 exitcode=66" build/aggregator_driver
}

case "$which" in both | memory) memory ;; esac
case "$which" in both | threads) threads ;; esac
case "$which" in both | threads | aggregator) aggregator ;; esac
echo "nothing found"
