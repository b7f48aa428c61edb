"""Text tables and the question that offers similar names."""

from qat.text import did_you_mean, table


def test_a_table_is_aligned() -> None:
    rows = [["model", "top1 %", ""], ["float", "98.10", "x"], ["QAT (best)", "98", ""]]
    assert table(rows, numbers=True) == [
        "model       top1 %",
        "----------  ------  -",
        "float        98.10  x",
        "QAT (best)      98",
    ]
    assert table(rows) == ["model       top1 %", "float       98.10   x", "QAT (best)  98"]


def test_similar_names_are_offered_as_they_are_spelled() -> None:
    layers = ["Stem", "stage1", "stage2", "head"]
    assert did_you_mean("stem", layers) == "did you mean 'Stem'?"
    assert did_you_mean("stage3", layers, count=2) == "did you mean 'stage2' or 'stage1'?"
    assert did_you_mean("haed", layers, shown=lambda name: f"net.{name}") == "did you mean 'net.head'?"
    assert did_you_mean("xyz", layers) == ""
