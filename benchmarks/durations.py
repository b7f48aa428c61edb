"""How long the default tests take, by folder.

python -m benchmarks.durations                        # keeps results/durations.json; further arguments go to pytest
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.speed_rows import facts_of_run

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(__file__).resolve().parent / "results" / "durations.json"


def main(arguments: list[str]) -> int:
    """Run the tests and return pytest's exit status."""
    facts = facts_of_run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        status = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={path}", *arguments], cwd=ROOT).returncode
        suites = ElementTree.parse(path).getroot()
    seconds: defaultdict[str, float] = defaultdict(float)
    tests = Counter[str]()
    for case in suites.iter("testcase"):
        parts = case.attrib["classname"].split(".")
        place = "/".join(parts[:2])
        seconds[place] += float(case.attrib["time"])
        tests[place] += 1
    rows = {place: {"tests": tests[place], "seconds": round(spent, 1)} for place, spent in sorted(seconds.items())}
    whole = round(sum(float(suite.attrib["time"]) for suite in suites.iter("testsuite")))
    OUT.write_text(json.dumps({"seconds": whole, "exit_status": status, "folders": rows, **facts}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
