import json
from pathlib import Path

found = json.loads(Path("runs/my_run/summary.json").read_text())
assert found["qat"]["top1"] > 80 and found["onnx"]["agreement"] >= 0.995
assert "soft_edge" in Path("runs/my_run/layers.txt").read_text()
