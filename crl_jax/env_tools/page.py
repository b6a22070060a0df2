"""The page of ``crl envs render``: HTML and styles with places for ``string.Template``."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root {
  --paper: #fbfaf7; --ink: #1d1d1b; --dim: #66645e; --line: #dedbd2; --card: #ffffff;
  --accent: #2f5d8a; --won: #2c6e49; --lost: #9a3b2e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171816; --ink: #e8e6df; --dim: #9d9a91; --line: #34352f; --card: #1f201d;
    --accent: #8db8e0; --won: #86c9a0; --lost: #e59a8d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 54rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.05rem; font-weight: 600; color: var(--dim); }
.goal { margin: .2rem 0 1rem; font-size: 1.5rem; line-height: 1.3; font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: .35rem 1.5rem; margin: 0 0 1rem; font-size: .9rem; }
dl div { display: flex; gap: .45rem; }
dt { color: var(--dim); }
dd { margin: 0; }
.outcome {
  display: inline-block; margin: 0 0 1.5rem; padding: .25rem .75rem; border: 1px solid currentColor; border-radius: 1rem;
  font-weight: 600; font-size: .9rem;
}
.won { color: var(--won); }
.lost { color: var(--lost); }
pre {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 14px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
}
.seen { padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
details { margin: 0 0 1rem; }
summary { cursor: pointer; color: var(--dim); font-size: .9rem; }
details pre { margin-top: .5rem; padding-left: 1rem; border-left: 2px solid var(--line); color: var(--dim); }
ol { list-style: none; margin: 0; padding: 0; }
.reply { display: flex; align-items: baseline; flex-wrap: wrap; gap: .6rem; margin: .9rem 0 .5rem; color: var(--accent); }
.reply pre { font-weight: 600; min-width: 0; }
.number { min-width: 1.6rem; text-align: right; color: var(--dim); font-size: .8rem; font-variant-numeric: tabular-nums; }
.note { color: var(--dim); font-size: .8rem; }
.invalid pre, .invalid .note { color: var(--lost); }
</style>
</head>
<body>
<h1>$title</h1>
<p class="goal">$goal</p>
<dl>$facts</dl>
<p class="outcome $mark">$outcome, reward $reward</p>
<details><summary>What the player is told first</summary><pre>$prompt</pre></details>
<pre class="seen">$first</pre>
<ol>
$turns
</ol>
</body>
</html>
"""
