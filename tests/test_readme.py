"""The README's Python example runs as it stands, with the embedded model."""

import json
import re
from pathlib import Path

import glm53

ROOT = Path(__file__).parents[1]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    nano = Path(glm53.__file__).parent / "data" / "nano"
    code = blocks[0].replace('"path/or/hub-id"', repr(str(nano)))
    assert code != blocks[0]
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["outs"]) == 2 and len(names["several"]) == 3
    assert [len(s) for s in names["scores"]] == [len(s) - 1 for s in names["sequences"]]
    data, forced = names["data"], names["forced"]
    for out in (data, forced):
        assert out.finish_reason == "stop" and isinstance(out.stop_reason, int), out.text
    assert 0 <= json.loads(data.text)["x"] <= 99
    assert forced.tool_calls and all(0 <= c.arguments["x"] <= 99 for c in forced.tool_calls)
    assert names["out"].text in capsys.readouterr().out
    assert glm53.GLM53.from_pretrained(tmp_path / "copy", progress=False).config.vocab_size == 4096
