"""The tests of the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `python tests/sanitized.py`.

Builds the library with both (gcc, or $CC) beside the usual one and runs tests/kernels and tests/codes, or
what is named as for pytest. Reading or writing past the end of a tensor, and what C leaves undefined, ends the run with
a report and the line in the source. Not run are the files in which torch compiles: its compiler does not start under a
sanitizer, and calls the same functions. Linux; takes about five minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
COMPILING = tuple(f"test_{name}.py" for name in ("fused_compiled", "operators_traced"))
CHECK = "from qat.kernels.cpu import compiler; assert compiler.library() is not None"


def environment() -> dict[str, str]:
    """Python itself is not built with a sanitizer: its runtime has to be there first, and the C++ library for it."""
    compiler = os.environ.get("CC", "gcc")
    names = ("libasan.so", "libstdc++.so.6")
    asked = [[*compiler.split(), f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in asked]
    missing = [name for name, path in zip(names, found, strict=True) if not Path(path).is_absolute()]
    if missing:
        sys.exit(f"{compiler} has no {', '.join(missing)}; install its sanitizers, or name another compiler in CC")
    return {
        **os.environ,
        "CC": compiler,
        "QAT_KERNELS_CFLAGS": FLAGS,
        "LD_PRELOAD": " ".join(found),
        # Python keeps memory until it ends, and torch asks for more than there is to see whether it gets it.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }


def main(arguments: list[str]) -> int:
    patterns = ("kernels/test_kernels*.py", "kernels/test_operators*.py", "codes/test_fused*.py")
    found = sorted(path for pattern in patterns for path in (ROOT / "tests").glob(pattern))
    tests = [str(path) for path in found if path.name not in COMPILING]
    print("not run under the sanitizers:", ", ".join(COMPILING), flush=True)
    variables = environment()
    subprocess.run([sys.executable, "-c", CHECK], env=variables, cwd=ROOT, check=True)
    # What a sanitizer writes would be lost with the process if pytest captured more than Python's own output.
    options = ["-n", "0", "-p", "no:faulthandler", "--capture=sys", "-q"]
    command = [sys.executable, "-m", "pytest", *options, *(arguments or tests)]
    return subprocess.run(command, env=variables, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
