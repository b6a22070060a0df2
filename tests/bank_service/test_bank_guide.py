"""The program of docs/bank.md, as it stands there, against a real server."""

import pathlib
import re

from service_toys import ROOT, run, serving

GUIDE = pathlib.Path(ROOT) / "docs" / "bank.md"


def test_the_guides_program_runs_as_printed(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {"__name__": "guide"}
    exec(compile(program, "docs/bank.md", "exec"), names)

    async def story():
        async with serving(learns=False) as (url, *_):
            await names["main"](url)

    run(story())
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[-1].replace(".", "").isdigit()
    assert second == "1 1"
